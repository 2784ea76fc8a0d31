"""The finding of one check."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """The finding of one check on this machine.

    Attributes:
        figure: The measured value; passes if it is a number and at most `bound`.
        bound: The largest value allowed; the check's docstring derives it.
        unit: The unit of both.
        details: Lines for a person: further figures, the worst case's name.
    """

    figure: float
    bound: float
    unit: str
    details: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return math.isfinite(self.figure) and self.figure <= self.bound


@dataclass(frozen=True)
class Skipped:
    """Why a check could not run here."""

    reason: str
