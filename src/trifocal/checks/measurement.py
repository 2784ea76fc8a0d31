"""The finding of one check."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """A check's finding here: a figure, at most `bound`, which its docstring derives, and lines for a person."""

    figure: float
    bound: float
    unit: str
    details: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return math.isfinite(self.figure) and self.figure <= self.bound


def largest(found: Mapping[str, float], bound: float, unit: str) -> Measurement:
    """The largest of the figures of several cases, one that is not finite first; the four largest are its lines."""
    worst = sorted(found.items(), key=lambda row: (math.isfinite(row[1]), -row[1]))[:4]
    return Measurement(worst[0][1], bound, unit, tuple(f"{case}: {figure:.3g}" for case, figure in worst))


@dataclass(frozen=True)
class Skipped:
    """Why a check could not run here."""

    reason: str
