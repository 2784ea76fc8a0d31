"""`trifocal new`: a commented configuration to begin with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from trifocal.train.arguments import parse_arguments
from trifocal.train.presets import preset_text, presets, summary


@dataclass(frozen=True, kw_only=True)
class NewArguments:
    """Print a preset, every key with a comment, to begin a configuration of your own with; without a name, list all."""

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")] = ""
    """Its name."""


def run(args: Sequence[str]) -> int:
    """Print the preset, or the list.

    Raises:
        UserError: If there is no such preset.
    """
    options: NewArguments = parse_arguments(NewArguments, args, prog="trifocal new")
    if options.preset:
        print(preset_text(options.preset), end="")
        return 0
    for name in presets():
        print(f"{name:12} {summary(name)}")
    print("\ntrifocal new PRESET > my.toml writes one; then: trifocal train my.toml")
    return 0
