"""The arguments of a command into its dataclass, by the rule of files (`trifocal.fields`); tyro writes the help."""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn

import tyro

from trifocal.errors import UserError
from trifocal.fields import HELP, checked, dotted_fields, from_table, nested, read_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The model of a command, and its device."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """A run, also while it trains; one of its checkpoints; a folder of weights, also a dense one of Hugging Face; or
    demo, that of the package."""
    checkpoint: str = ""
    """A checkpoint of the run, like step_00000500; the newest by default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; "auto" takes a GPU if there is one."""


def parse_arguments(cls: Any, args: Sequence[str], *, prog: str) -> Any:
    """Read the arguments of a command into its dataclass; `--help` prints every field and exits with status 0. A field
    marked `tyro.conf.Positional` takes a word, or all of them if it is a tuple.
    """
    kinds = dotted_fields(cls)
    positional = _positional(cls)
    words, given = read_flags({name: kind for name, kind in kinds.items() if name not in positional}, args)
    if HELP & set(words):
        show_help(cls, prog=prog)
    for name, metavar in positional.items():
        several = typing.get_origin(kinds[name]) is tuple
        taken, words = (words, []) if several else (words[:1], words[1:])
        if taken:
            given[name] = checked(kinds[name], taken if several else taken[0], metavar)
    if words:
        raise UserError(f"unexpected argument {words[0]!r}; {prog} --help shows the flags")
    table = nested(given)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            flag = "--" + field.name.replace("_", "-")
            raise UserError(f"missing argument: {positional.get(field.name, flag)}")
        if isinstance(section := table.get(field.name), dict):
            # The rest of a section is the command's default, which the help shows, not that of the section's class.
            table[field.name] = dataclasses.asdict(field.default_factory()) | section  # type: ignore[operator]
    return from_table(cls, table)


def show_help(cls: Any, *, prog: str, use_underscores: bool = False) -> NoReturn:
    """Print the flags of a dataclass, or its keys, `use_underscores`, with their docstrings, and exit with status 0."""
    tyro.cli(cls, prog=prog, args=["--help"], use_underscores=use_underscores, config=(tyro.conf.FlagConversionOff,))
    raise AssertionError("the help exits")


def _positional(cls: Any) -> dict[str, str]:
    """The positional fields, and their names in messages."""
    found = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        if tyro.conf.Positional in marks:
            metavars = [mark.metavar for mark in marks if getattr(mark, "metavar", None)]
            found[name] = (metavars or [name.upper()])[0].removesuffix(" ...")
    return found
