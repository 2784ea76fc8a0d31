"""The tables of docs/quality.md are those of the newest results, and a sceptic can repeat each."""

import importlib
import sys

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def quality():
    sys.path.insert(0, str(ROOT / "docs" / "figures"))
    yield importlib.import_module("draw_quality")
    sys.path.remove(str(ROOT / "docs" / "figures"))


def test_the_page_is_what_the_script_writes(quality):
    text = quality.PAGE.read_text(encoding="utf-8")
    assert quality.page(text) == text, "a result has been added: make docs"


def test_without_results_the_page_says_so(quality, tmp_path):
    empty = quality.page(quality.PAGE.read_text(encoding="utf-8"), tmp_path)
    assert empty.count("Not measured yet.") == 7 and quality.figures(tmp_path) == {}


def test_every_measured_part_has_a_figure(quality):
    figures = quality.figures()
    assert figures and set(figures) <= {f"quality_{part}.svg" for part in quality.PARTS}
    for draw in figures.values():
        assert draw().axes
