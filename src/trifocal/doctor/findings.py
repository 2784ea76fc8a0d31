"""Findings: one line each, with the command that fixes the fault."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Finding:
    """A finding about this machine.

    Attributes:
        name: The part that was examined.
        status: "broken" stops training; "note" costs speed or a feature; "ok" is as it should be.
        text: A sentence.
        remedy: The command that fixes it, or the flags; empty where nothing is to be fixed.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""
