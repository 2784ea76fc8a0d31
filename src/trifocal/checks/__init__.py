"""The self-check: named checks, each with a figure and a bound, that test an installation on its machine."""

from trifocal.checks.measurement import Measurement, Skipped
from trifocal.checks.registry import CHECKS, Check, CheckResult, Report, run

__all__ = ["CHECKS", "Check", "CheckResult", "Measurement", "Report", "Skipped", "run"]
