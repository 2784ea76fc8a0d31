"""The figures and tables that the script of the docs makes: drawn, used on a page, and those of the newest results."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.children import load_script
from tests.docs.pages import PAGES, ROOT, text_of

FOLDER = ROOT / "docs/figures"


@pytest.fixture(scope="module")
def draw():
    return load_script("docs/figures/draw.py")


def test_script_draws_every_figure_of_the_folder(draw, tmp_path):
    drawn = draw.draw_all(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in FOLDER.glob("*.svg")}
    for path in drawn:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_every_figure_serves_dark_pages():
    for path in FOLDER.glob("*.svg"):
        assert "@media (prefers-color-scheme: dark) { svg { filter: invert" in path.read_text(encoding="utf-8")


def test_every_figure_is_on_a_page_and_described():
    described = {}
    for page in PAGES:
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text_of(page)):
            described[(page.parent / target).resolve()] = words
    for path in FOLDER.glob("*.svg"):
        assert len(described[path].split()) > 5, f"{path.name} needs words for those who cannot see it"


def test_the_tables_of_quality_are_those_of_the_newest_results(draw):
    quality = draw.draw_quality
    text = text_of(quality.PAGE)
    assert quality.page(text) == text, "a result has been added: make docs"
