"""The contents of result files."""

import json

from lib.results import ResultFile, cell

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


def test_parts_have_tables_of_their_own(tmp_path):
    rows = [{"part": "one", "a": 1}, {"part": "two", "b": 2}, {"part": "one", "a": 3}]
    file = ResultFile("what", "A title", folder=tmp_path, device="A CPU", commit="abc")
    text = file.write(rows).read_text()
    assert "## One\n\n| a |\n|---|\n| 1 |\n| 3 |\n\n## Two\n\n| b |\n|---|\n| 2 |\n" in text
    assert json.loads(file.json.read_text())["rows"] == rows


def test_a_file_is_written_again_under_the_same_name(tmp_path):
    file = ResultFile("what", "A title", folder=tmp_path, device="NVIDIA H200", commit="abc")
    file.write(ROWS[:1])
    file.write(ROWS)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(json.loads(file.json.read_text())["rows"]) == 2
    assert "h200" in file.json.name


def test_cells():
    assert [cell(value) for value in (None, 0.00012345, 12345.6, 7, "x")] == ["-", "0.0001234", "12,346", "7", "x"]
