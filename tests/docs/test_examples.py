"""Each example runs as it is, in an empty folder, and prints what it promises."""

import runpy

import pytest

from tests.docs.pages import ROOT, blocks

PRINTS = {
    "layer": "at the last",
    "train": "resumed to step 14",
    "own_data": "its first row:",
    "engine": "'class ' + ",
}


@pytest.mark.parametrize("name", PRINTS)
def test_the_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    names = runpy.run_path(str(ROOT / f"examples/{name}.py"))
    text = capsys.readouterr().out
    assert PRINTS[name] in text
    if name == "layer":
        assert names["losses"][-1] < names["losses"][0]
    if name in ("train", "own_data"):
        runpy.run_path(str(ROOT / f"examples/{name}.py"))  # after a change, with the first run still there
    if name == "engine":
        assert len(text.splitlines()) == len(names["requests"])


def test_every_example_is_run():
    # That of docs/huggingface.md runs with the page.
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*PRINTS, "huggingface"}


def test_cells_of_the_script_are_the_blocks_of_the_page():
    text = (ROOT / "examples/huggingface.py").read_text(encoding="utf-8")
    # The first cell makes a folder; the others may print more than the page.
    _, _, *cells = text.split("\n# %% ")
    bodies = [cell.partition("\n")[2].splitlines() for cell in cells]
    expected = [block.splitlines() for block in blocks(ROOT / "docs/huggingface.md", "python")]
    assert [[line for line in body if line and not line.startswith("print(")] for body in bodies] == [
        [line for line in body if line] for body in expected
    ]
