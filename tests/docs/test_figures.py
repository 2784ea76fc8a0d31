"""The figures of the docs: drawn by their script, used on a page, and right where they can be counted."""

import re
import xml.etree.ElementTree as ElementTree

from tests.children import load_script
from tests.docs.pages import PAGES, ROOT, text_of

FOLDER = ROOT / "docs/figures"


def test_script_draws_every_figure_of_the_folder(tmp_path):
    drawn = load_script("docs/figures/draw.py").draw_all(tmp_path)
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
