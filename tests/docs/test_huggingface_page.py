"""The script of the page about Hugging Face is the page's blocks, which tests/docs/test_pages.py runs."""

from tests.docs.pages import ROOT, blocks


def test_cells_of_the_script_are_the_blocks_of_the_page() -> None:
    text = (ROOT / "examples/huggingface.py").read_text(encoding="utf-8")
    # The first cell makes a folder; the others may print more than the page.
    _, _, *cells = text.split("\n# %% ")
    bodies = [cell.partition("\n")[2].splitlines() for cell in cells]
    expected = [block.splitlines() for block in blocks(ROOT / "docs/huggingface.md", "python")]
    assert [[line for line in body if line and not line.startswith("print(")] for body in bodies] == [
        [line for line in body if line] for body in expected
    ]
