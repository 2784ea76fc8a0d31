"""The pages tell the truth: their code runs, their links lead somewhere, and names in them exist."""

import contextlib
import io
import pkgutil
import re
import shutil

import pytest

from tests.docs.pages import HISTORY, PAGES, ROOT, blocks, headings, inline_code, name_of, prose
from trifocal.fields import dotted_fields
from trifocal.train.config.sections import RunConfig

KEYS = dotted_fields(RunConfig)
SECTIONS = {key.rpartition(".")[0] for key in KEYS}
OUTPUT_MARK = "# →"
PACKAGES = "ops|nn|models|generate|data|distributed|runlog|telemetry|report|train|checks|doctor|evaluation|cli"
PATH = re.compile(rf"(?:src|tests|docs|configs|benchmarks|examples|{PACKAGES})/[\w./-]*\w")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    # One page is one session: a later block uses the names of an earlier one.
    names = {"__name__": "page"}
    for body in blocks(page, "python"):
        promised = [line[len(OUTPUT_MARK) :].strip() for line in body.splitlines() if line.startswith(OUTPUT_MARK)]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, name_of(page), "exec"), names)
        if promised or "print(" in body:
            assert [line.strip() for line in printed.getvalue().splitlines()] == promised, body


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in headings(file), f"{name_of(page)} links to {target}, headings: {sorted(headings(file))}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_rows_of_a_table_have_its_columns(page):
    for table in re.findall(r"(?:^\|.*\n)+", prose(page), re.MULTILINE):
        columns = [len(re.findall(r"(?<!\\)\|", row)) - 1 for row in table.splitlines()]
        wrong = [row for row, count in zip(table.splitlines(), columns, strict=True) if count != columns[0]]
        assert not wrong, f"{name_of(page)}: not {columns[0]} columns: {wrong}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=name_of)
def test_files_that_are_named_exist(page):
    for code in inline_code(page):
        for path in PATH.findall(code):
            found = code != path or (ROOT / path).exists() or (ROOT / "src/trifocal" / path).exists()
            assert found, f"{name_of(page)} names {path}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=name_of)
def test_python_names_exist(page):
    for code in inline_code(page):
        name = re.match(r"trifocal(\.\w+)+", code)
        if name and not name[0].endswith((".py", ".toml")):
            assert pkgutil.resolve_name(name[0]), f"{name_of(page)} names {code}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=name_of)
def test_config_keys_that_are_named_exist(page):
    for code in inline_code(page):
        sections = "run|model|data|train|distill|parallel|optimizer|schedule|checkpoint|evaluate|log"
        key = re.match(rf"(?:--)?((?:{sections})\.[\w.]+)", code)
        if key and not key[1].endswith((".py", ".md", ".json")):
            assert key[1] in KEYS or key[1] in SECTIONS, f"{name_of(page)} names the key {key[1]}"
