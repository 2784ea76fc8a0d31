"""Rows that fail, are refused, are not available or come too late: all of them are written down."""

import pytest

from lib.recorder import Recorder, Refused, Unavailable


def raising(error):
    def figures():
        raise error

    return figures


def test_every_row_is_kept_with_what_became_of_it():
    said, written = [], []
    recorder = Recorder(60, said.append, lambda: written.append(len(recorder.rows)))
    recorder.measure({"row": "a"}, lambda: {"ms": 1.0})
    recorder.measure({"row": "b"}, raising(Unavailable("no GPU")))
    assert recorder.exit_status == 0
    recorder.measure({"row": "c"}, raising(RuntimeError("out of memory\nand more")))
    assert recorder.exit_status == 1
    recorder.measure({"row": "d"}, raising(Refused("wrong")))
    assert recorder.rows == [
        {"row": "a", "ms": 1.0, "status": "ok"},
        {"row": "b", "status": "not available: no GPU"},
        {"row": "c", "status": "failed: RuntimeError: out of memory"},
        {"row": "d", "status": "refused: wrong"},
    ]
    assert written == [1, 2, 3, 4]
    recorder.say("hello")
    assert said[-1].endswith("s] hello")


def test_past_the_limit_nothing_is_measured():
    recorder = Recorder(1e-9, lambda text: None, lambda: None)
    row = recorder.measure({"row": "a"}, lambda: pytest.fail("must not run"))
    assert row["status"].startswith("not run: the limit of") and recorder.exit_status == 0
