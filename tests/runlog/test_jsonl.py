"""The files that everything else stands on: torn lines, full disks, readers at the wrong moment."""

import logging
import resource

import pytest

from trifocal.errors import UserError
from trifocal.runlog import jsonl
from trifocal.runlog.jsonl import JsonLinesWriter, read_lines


def test_rows_come_back_in_order_and_a_second_writer_appends(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    with JsonLinesWriter(path) as writer:
        assert writer.append({"a": 1})
    with JsonLinesWriter(path) as writer:
        assert writer.append({"a": [2.5, None, "ä\n"]})
    assert read_lines(path) == [{"a": 1}, {"a": [2.5, None, "ä\n"]}]


def test_a_torn_last_line_is_ignored_by_readers_and_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a":1}\n{"a":2}\n{"a":')
    assert [row["a"] for row in read_lines(path)] == [1, 2]
    with JsonLinesWriter(path) as writer:
        writer.append({"a": 3})
    assert path.read_text() == '{"a":1}\n{"a":2}\n{"a":3}\n'


def test_a_broken_line_in_the_middle_is_skipped_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a":1}\nnonsense\n{"a":2}\n[]\n')
    rows = read_lines(path)
    assert rows == [{"a": 1}, {"a": 2}] and rows.skipped == 2
    assert read_lines(path, fields={"b"}).skipped == 4
    path.write_text('{"a":1}\n' + "x" * (2 * jsonl.LONGEST_LINE + 5) + '\n{"a":2}\n')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    with pytest.raises(UserError, match="cannot read"):
        read_lines(tmp_path / "missing.jsonl")


def test_reading_the_end_gives_whole_lines_of_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"a":{number}}}\n' for number in range(1000)))
    rows = read_lines(path, last_bytes=100)
    assert [row["a"] for row in rows] == list(range(1000 - len(rows), 1000))
    assert 5 <= len(rows) <= 11


def test_a_full_disk_warns_once_and_loses_rows_only(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING), JsonLinesWriter(path) as writer:
        assert not writer.append({"a": 1})
        assert not writer.append({"a": 2})
    assert len(caplog.records) == 1
    assert "training continues" in caplog.text


def test_a_row_cut_short_by_a_full_disk_is_taken_back_and_writing_recovers(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING), JsonLinesWriter(path) as writer:
        writer.append({"a": 1})
        # The limit is 100 bytes past a complete row, so the kernel writes a part of the next one.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            assert not writer.append({"a": "x" * 500})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.append({"a": 3})
    assert read_lines(path) == [{"a": 1}, {"a": 3}]


def test_an_unwritable_folder_never_raises(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING), JsonLinesWriter(tmp_path / "file" / "rows.jsonl") as writer:
        assert not writer.append({"a": 1})
    assert len(caplog.records) == 1
