"""The self-check: named checks, each with a figure and a bound, that test an installation on its machine."""

from trifocal.checks.measurement import CheckResult, Measurement, Report, Skipped
from trifocal.checks.registry import CHECKS, Check
from trifocal.checks.runner import run

__all__ = ["CHECKS", "Check", "CheckResult", "Measurement", "Report", "Skipped", "run"]
