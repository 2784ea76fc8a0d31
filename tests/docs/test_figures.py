"""The figures of the docs: drawn by their script, used on a page, and right where they can be counted."""

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


def test_maps_count_what_the_geometry_counts(draw):
    scene = draw.make_scene()
    selected, window = draw.reads_of_selected(scene), draw.reads_of_window()
    compressed = draw.reads_of_compressed(scene)
    for position in range(draw.NUM_TOKENS):
        blocks = draw.SMALL.num_compressed_blocks(position + 1)
        reads = blocks + selected[position].sum() + window[position].sum()
        assert reads == draw.SMALL.keys_read_per_step(position)
        # Probabilities sum to one, and each block covers so many tokens.
        total = draw.SMALL.compression_block_size if blocks else 0
        assert compressed[position].sum() == pytest.approx(total, abs=1e-4)
        assert (compressed[position, position + 1 :] == 0).all()


def test_chosen_blocks_are_the_most_important(draw):
    scene = draw.make_scene()
    for position in (100, 180, 234, 255):
        importance = draw.importance(scene, position)
        own = position // draw.SMALL.selection_block_size
        chosen = {int(j) for j in scene.selected_blocks[position]}
        forced = {0, own - 1, own}
        assert forced <= chosen
        free = [j for j in range(own + 1) if j not in forced]
        best = sorted(free, key=lambda j: -importance[j])[: draw.SMALL.num_selected_blocks - len(forced)]
        assert chosen - forced == set(best)
