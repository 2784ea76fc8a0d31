"""What a check says of processes that fail."""

import pytest

from trifocal.testing.processes import ProcessesFailed, run_processes


def test_errors_are_quoted_without_colours(tmp_path, monkeypatch):
    """As Python 3.13 and newer would write them in a service of CI."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(ProcessesFailed, match=r"\nRuntimeError: 0$"):
        run_processes(
            ["-c", "import os; raise RuntimeError(os.environ['PYTHON_COLORS'])"], 1, tmp_path, limit_seconds=50
        )
