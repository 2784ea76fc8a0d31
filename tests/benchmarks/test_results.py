"""The contents of result files."""

import json

from lib.results import ResultFile

ROWS = [{"row": "a", "time_ms": 1234.5678, "status": "ok"}, {"row": "b", "status": "failed: why"}]


def test_both_files_hold_the_rows_and_where_they_come_from(tmp_path):
    file = ResultFile("what", "A title", folder=tmp_path / "new", device="A CPU", commit="abc", command=["do", "a b"])
    page = file.write(ROWS, notes=["A note."], columns=("row", "time_ms"), more_of_it=[{"x": 1}])
    content = json.loads(file.json.read_text())
    assert content["rows"] == ROWS and content["more_of_it"] == [{"x": 1}]
    assert content["commit"] == "abc" and content["command"] == "do 'a b'" and content["torch"]
    assert {"triton", "python", "date", "device"} <= content.keys()
    text = page.read_text()
    assert page.suffix == ".md" and page.stem.startswith("what_cpu_")
    for words in (
        "# A title",
        "commit `abc`",
        "`do 'a b'`",
        "| a | 1,235 |",
        "| b | - |",
        "## More of it",
        "- A note.",
    ):
        assert words in text, words
    assert "failed" not in text, "not among the columns"
