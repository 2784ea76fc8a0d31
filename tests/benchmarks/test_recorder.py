"""A row is written as soon as it is known, and past the limit nothing is measured."""

import pytest

from lib.recorder import Recorder


def test_rows_are_written_one_by_one_up_to_the_limit():
    written = []
    recorder = Recorder(60.0, lambda text: None, lambda: written.append(len(recorder.rows)))
    recorder.measure({"row": "a"}, lambda: {"ms": 1.0})
    recorder.measure({"row": "b"}, lambda: {"ms": 2.0})
    assert written == [1, 2]
    late = Recorder(1e-9, lambda text: None, lambda: None)
    row = late.measure({"row": "a"}, lambda: pytest.fail("must not run"))
    assert row["status"].startswith("not run: the limit of") and late.exit_status == 0
