"""The fixture that writes a run directory."""

from tests.written_runs import make_run

__all__ = ["make_run"]
