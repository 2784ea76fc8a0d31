"""The pages tell the truth: their code runs, their links lead somewhere, their commands and keys exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT_MARK = "#>"


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # One page is one session: a later block uses the names of an earlier one.
    names = {"__name__": "page"}
    for body in blocks(page, "python"):
        promised = [line[len(OUTPUT_MARK) :].strip() for line in body.splitlines() if line.startswith(OUTPUT_MARK)]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, name_of(page), "exec"), names)
        assert [line.strip() for line in printed.getvalue().splitlines()] == promised, body
