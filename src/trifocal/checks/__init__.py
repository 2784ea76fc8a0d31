"""The self-check: named checks with a figure and a bound each, that prove an installation right on its machine."""

from trifocal.checks.measurement import CheckResult, Measurement, Report, Skipped
from trifocal.checks.registry import CHECKS, Check
from trifocal.checks.runner import run, run_check

__all__ = ["CHECKS", "Check", "CheckResult", "Measurement", "Report", "Skipped", "run", "run_check"]
