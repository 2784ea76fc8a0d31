"""The finding of one check."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """The finding of one check on this machine: a figure that may be at most `bound`, which the check's docstring
    derives, and lines for a person.
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
