"""Command-line flags into dataclasses through tyro, and every refusal as one clear line."""

import contextlib
import io
import itertools
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from trifocal.errors import UserError, nearest
from trifocal.paths import user_path
from trifocal.train.config import RunConfig
from trifocal.train.toml import dotted_fields, from_table, read_toml


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML config and apply command-line overrides to it.

    Args:
        path: The TOML file.
        overrides: Flags as on a command line: `["--train.steps", "200", "--model.dim=64"]`.

    Returns:
        The whole configuration, each section checked by itself; `preflight` checks how they fit together.

    Raises:
        UserError: If the file cannot be read, or a key, flag or value is not valid; names the nearest valid one.
    """
    config = from_table(RunConfig, read_toml(user_path(path, "config file")), str(path))
    return override(config, overrides)


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Apply `--section.field value` flags to a configuration.

    Raises:
        UserError: As load_config.
    """
    if not overrides:
        return config
    for argument in check_flags(dotted_fields(RunConfig), overrides):
        if not argument.startswith("--"):
            raise UserError(f"expected a flag like --train.steps, got {argument!r}")
    return parse_arguments(RunConfig, overrides, default=config, use_underscores=True)  # type: ignore[no-any-return]


def parse_arguments(
    cls: Any,
    args: Sequence[str],
    *,
    prog: str = "trifocal",
    default: Any = tyro.MISSING_NONPROP,
    use_underscores: bool = False,
) -> Any:
    """Parse flags into a dataclass; `--help` prints every field with its docstring and exits with status 0.

    Args:
        cls: The dataclass, possibly Annotated with tyro's markers.
        args: The arguments, without the program's name.
        prog: What the help calls the program.
        default: An instance whose values hold where no flag is given.
        use_underscores: Write flags as the config's keys in the help and in messages; both ways are read.

    Raises:
        UserError: If a flag is unknown (names the nearest valid one) or a value does not fit.
    """
    flags = check_flags(dotted_fields(getattr(cls, "__origin__", cls)), args)
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(
                cls,
                prog=prog,
                args=flags,
                default=default,
                use_underscores=use_underscores,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as error:
        if not error.code:
            raise
        raise UserError(_one_line(output.getvalue())) from None


def check_flags(valid: Mapping[str, Any], args: Sequence[str], switches: Collection[str] = ()) -> list[str]:
    """Refuse unknown flags, and write all of them in one way.

    Args:
        valid: The names of the flags, without dashes, and their types.
        args: The arguments, as `--flag value`, `--flag=value` or bare.
        switches: Flags that take no value.

    Returns:
        The arguments, flags as `--flag=value` (a value may begin with a dash), underscores in their names, booleans
        capitalised as tyro reads them.

    Raises:
        UserError: If a flag is unknown or its value is missing; names it.
    """
    checked: list[str] = []
    rest = iter(args)
    for argument in rest:
        if not argument.startswith("--") or argument == "--help":
            checked.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        name = flag[2:].replace("-", "_")
        if name not in valid:
            raise UserError(f'unknown flag "{flag}"; the nearest valid one is "--{nearest(name, valid)}"')
        if name in switches:
            if equals:
                raise UserError(f"{flag} takes no value, got {value!r}")
            checked.append(f"--{name}")
            continue
        if not equals:
            try:
                value = next(rest)
            except StopIteration:
                raise UserError(f"{flag} needs a value") from None
        if typing.get_origin(valid[name]) is tuple:
            # Takes several values; those after the first are passed on as they come.
            checked += [f"--{name}", value]
            continue
        if valid[name] is bool and value in ("true", "false"):
            value = value.capitalize()
        if valid[name] is float and value.strip("+-").lower() in ("nan", "inf", "infinity"):
            raise UserError(f"{flag} must be a finite number, got {value!r}")
        checked.append(f"--{name}={value}")
    return checked


# What tyro says, and how a person would.
_REWORDINGS = (
    (r"Error parsing (--\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 must be an integer, got \2"),
    (r"Error parsing (--\S+): could not convert string to float: (.*)", r"\1 must be a number, got \2"),
    (r"invalid choice (.*) for argument '(--\S+)'. Expected one of \((.*)\)\.?", r"\2 must be one of \3, got \1"),
    (r"Error parsing \S+: (.*)", r"\1"),
    (r"Missing from [^:]*: (.*?) \(required\).*", r"missing argument: \1"),
)


def _one_line(box: str) -> str:
    """The message in the box that tyro draws, without frame, title and the help below it."""
    rows = [row.strip("│ ") for row in box.splitlines()]
    # The title is in the frame's first row; where the terminal cannot show frames, it has two rows of its own.
    rows = rows[1:] if box.startswith("╭") else rows[2:]
    message = " ".join(itertools.takewhile(lambda row: not re.match("╰|[─-]{4}", row), rows)).strip()
    for pattern, wording in _REWORDINGS:
        match = re.fullmatch(pattern, message)
        if match:
            return match.expand(wording).replace("'True', 'False'", "true, false")
    return message
