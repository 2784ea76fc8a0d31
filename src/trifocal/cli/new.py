"""`trifocal new`: a commented configuration to begin with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from trifocal.cli.flags import parse_arguments
from trifocal.errors import unknown
from trifocal.train.config.load import comment, load_config, presets, repeating, summary
from trifocal.train.config.toml import to_toml


@dataclass(frozen=True, kw_only=True)
class NewArguments:
    """Print a preset, every key with a comment, to begin your own configuration with; without a name, list all."""

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")] = ""
    """Its name."""


def run(args: Sequence[str]) -> int:
    """Print the preset, or the list."""
    options: NewArguments = parse_arguments(NewArguments, args, prog="trifocal new")
    found = presets()
    if options.preset:
        if options.preset not in found:
            raise unknown("preset", options.preset, found)
        path = found[options.preset]
        config = load_config(path)
        # As a preset has them: a pattern fits other numbers of layers too.
        object.__setattr__(config.model, "layer_types", repeating(config.model.layer_types))
        print(comment(path), to_toml(config, comments=True), sep="\n", end="")
        return 0
    for name, path in found.items():
        print(f"{name:12} {summary(path)}")
    print("\ntrifocal new PRESET > my.toml writes one; then: trifocal train my.toml")
    return 0
