"""Each example runs as it is, in an empty folder, and prints what it promises."""

import runpy

import pytest

from tests.docs.pages import ROOT

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
    if name == "engine":
        assert len(text.splitlines()) == len(names["requests"])


def test_every_example_is_run():
    # The blocks of docs/huggingface.md are its example, and run with the page.
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*PRINTS, "huggingface"}
