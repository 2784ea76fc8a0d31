"""The pages tell the truth: their code runs, their links lead somewhere, and what they name exists."""

import contextlib
import io
import pkgutil
import re
import shutil

import pytest
import torch

from tests.docs.pages import HISTORY, PAGES, ROOT, blocks, headings, inline_code, name_of, prose, text_of
from tests.train.tiny import make_config
from trifocal.cli import main
from trifocal.fields import dotted_fields
from trifocal.runlog import read_metrics
from trifocal.runlog.run import read_run
from trifocal.testing.small_models import make_model, small_config
from trifocal.train import train
from trifocal.train.config.sections import RunConfig

KEYS = dotted_fields(RunConfig)
SECTIONS = {key.rpartition(".")[0] for key in KEYS}
OUTPUT_MARK = "# →"
PACKAGES = "ops|nn|models|generate|data|distributed|runlog|telemetry|report|train|checks|doctor|evaluation|cli"
PATH = re.compile(rf"(?:src|tests|docs|configs|benchmarks|examples|{PACKAGES})/[\w./-]*\w")


def need_packages(page):
    if page.name == "huggingface.md":
        pytest.importorskip("transformers")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path, monkeypatch):
    need_packages(page)
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
    need_packages(page)
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


def test_make_demo_says_in_five_lines_what_it_trains_before_the_first_step(tmp_path, capsys):
    run = tmp_path / "demo run"
    flags = ["--train.steps", "2", "--train.sequence_length", "256", "--data.shuffle_sequences", "4"]
    flags += ["--log.sample_tokens", "2", "--evaluate.sequences", "2", "--schedule.warmup_steps", "1"]
    command = ["train", str(ROOT / "configs/demo.toml"), "--run.directory", str(run), "--run.device", "cpu", *flags]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines[:5]] == ["device", "model", "data", "folder", "watch"]
    assert "cores, fp32" in lines[0]
    assert "4 layers of width 64, 0.2 M parameters, window, selected attention" in lines[1]
    assert "builtin, 256 tokens a row, 2 rows a step" in lines[2] and lines[3].endswith(f"'{run}', 2 steps")
    assert lines[4].endswith(f"trifocal watch '{run}'")
    assert any(line.startswith("step 1/2") for line in lines[5:])


def test_a_run_writes_every_file_and_field_of_the_reports(tmp_path):
    page = text_of(ROOT / "docs/reports.md")
    answers = page[page.index("| there |") :].split("\n\n")[0].splitlines()[2:]
    codes = [code for line in answers for code in re.findall(r"`([^`]+)`", line.strip("| ").split(" | ")[1])]
    flags = ("--trace.what", "memory,dtypes,gradients", "--trace.steps", "1:4", "--log.telemetry_interval_steps", "2")
    run = train(make_config(tmp_path, *flags)).directory
    files = [code for code in codes if re.search(r"\.(jsonl|json|csv)$", code)]
    assert len(files) >= 7
    for file in files:
        assert (run / file).is_file(), file
    (row, *_) = read_metrics(run / "metrics.jsonl", "telemetry")
    diagnostics, beat = text_of(ROOT / "docs/diagnostics.md"), read_run(run).heartbeats[0][-1]
    assert [name for name in (*row, *beat) if f"`{name}`" not in diagnostics] == []
    fields = [code for code in codes if re.fullmatch(r"(selected|fewer|gate|heads)_\w+", code)]
    assert len(fields) == 6 and set(fields) <= row.keys()


def test_the_client_of_the_server_gets_an_answer_and_every_route_is_named():
    for package in ("openai", "uvicorn"):
        pytest.importorskip(package)
    from tests.serve.servers import serving

    page = ROOT / "docs/serving.md"
    decoder = make_model(small_config(vocab_size=257), torch.device("cpu"), torch.float32).eval()
    [block] = blocks(page, "py")
    with serving(decoder) as served, contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block.replace("http://127.0.0.1:8000", served.url), "serving.md", "exec"), {})
        assert printed.getvalue()
        for route in served.server.config.app.routes:
            assert f"`{route.path_format}`" in text_of(page) or route.path == "/attention/{name}"
