"""Command-line flags into typed dataclasses, by the rule of files (`trifocal.fields`); tyro writes the help."""

import contextlib
import dataclasses
import itertools
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

from trifocal.errors import UserError, unknown
from trifocal.fields import checked, dotted_fields, from_table, number_of, value_of
from trifocal.paths import parse_json, read_toml, user_path
from trifocal.train.checkpoint.pretrained import pretrained_values
from trifocal.train.config.sections import RunConfig

# In a checkout a link to configs/, in a wheel the files themselves.
_PRESETS = Path(__file__).parents[2] / "configs"
HELP = {"-h", "--help"}
ALIASES = {
    "lr": "optimizer.learning_rate",
    "batch_size": "train.global_batch_size",
    "steps": "train.steps",
}
"""Short names of flags that are typed often."""


def load_config(path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Read a TOML config and apply overrides to it.

    Where `model.from` names weights, the whole section `model` comes from there, and the tokenizer; overrides go before
    both.

    Args:
        path: The TOML file, or the name of a preset; None: the defaults, and the model of `model.from`.
        overrides: Flags as on a command line, `["--train.steps", "200", "--model.dim=64"]`, or values by key,
            `{"train.steps": 200, "model.dim": 64}`.

    Returns:
        The whole configuration; each section is checked by itself, and `preflight` checks them against each other.

    Raises:
        UserError: If the file cannot be read, or a key, flag or value is not valid; names the nearest valid one.
    """
    if path is None:
        config = RunConfig()
    else:
        config = from_table(RunConfig, read_toml(_config_file(path)), str(path))
    given = _values(overrides)
    source = given.get("model.from", config.model.from_)
    if not source:
        return override(config, given)
    try:
        found = pretrained_values(source, tokenizer="data.tokenizer" not in given)
    except UserError as error:
        if "model.from" in given:
            raise
        raise UserError(f"{path}: model.from: {error}") from error
    config = override(config, found | {"model.from": source} | given)
    if path is None and "data.tokenizer" not in found | given and config.data.parsed.has_text:
        raise UserError(f"{source} has no tokenizer; name one with --data.tokenizer")
    return config


def _config_file(path: str | Path) -> Path:
    """The file at this path, or else the preset of this name."""
    file = user_path(path, "config file")
    if not file.suffix and file.name == str(path) and not file.exists():
        found = presets()
        if str(path) not in found:
            raise unknown("config file or preset", str(path), found)
        return found[str(path)]
    return file


def presets() -> dict[str, Path]:
    """The files by name.

    Raises:
        UserError: If the package has lost them.
    """
    found = {path.stem: path for path in sorted(_PRESETS.glob("*.toml"))}
    if not found:
        raise UserError(f"no preset is in {_PRESETS}; install trifocal again, or name a TOML file of your own")
    return found


def comment(path: Path) -> str:
    """The comment at the beginning of a preset, with its marks."""
    return "".join(itertools.takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines(True)))


def summary(path: Path) -> str:
    """The first sentence of the comment at the beginning of a preset."""
    text = " ".join(line.lstrip("# ") for line in comment(path).splitlines())
    return text.partition(". ")[0].rstrip(".")


def override(config: RunConfig, overrides: Sequence[str] | Mapping[str, Any]) -> RunConfig:
    """Apply overrides to a configuration.

    Args:
        config: The configuration.
        overrides: Flags or values by key, see `load_config`.

    Raises:
        UserError: If a key, flag or value is not valid.
    """
    given = _values(overrides)
    if not given:
        return config
    values = {name: value_of(config, name) for name in dotted_fields(RunConfig)}
    return from_table(RunConfig, _nested(values | given))


def _values(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Overrides by key."""
    if isinstance(overrides, Mapping):
        return dict(overrides)
    words, given = read_flags(dotted_fields(RunConfig), overrides)
    if words:
        raise UserError(f"expected a flag like --train.steps, got {words[0]!r}")
    return given


def parse_arguments(cls: Any, args: Sequence[str], *, prog: str) -> Any:
    """Read the arguments of a command into its dataclass; `--help` prints every field and exits with status 0.

    Args:
        cls: The dataclass. A field marked `tyro.conf.Positional` takes a word, or all of them if it is a tuple.
        args: The arguments, without the program's name.
        prog: Name of the program in the help.

    Raises:
        UserError: If a flag is unknown (names the nearest valid one), or an argument is missing, too many, or not
            valid.
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
        raise UserError(f"unexpected argument {words[0]!r}")
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            flag = "--" + field.name.replace("_", "-")
            raise UserError(f"missing argument: {positional.get(field.name, flag)}")
    return from_table(cls, _nested(given))


def show_help(cls: Any, *, prog: str, use_underscores: bool = False) -> NoReturn:
    """Print the flags of a dataclass with their docstrings, and exit with status 0.

    Args:
        cls: The dataclass.
        prog: Name of the program in the help.
        use_underscores: Write flags as the config's keys.
    """
    tyro.cli(cls, prog=prog, args=["--help"], use_underscores=use_underscores, config=(tyro.conf.FlagConversionOff,))
    raise AssertionError("the help exits")


def read_flags(
    kinds: Mapping[str, Any], args: Sequence[str], switches: Collection[str] = ()
) -> tuple[list[str], dict[str, Any]]:
    """Split arguments into words and flags, and read the flags' values.

    Args:
        kinds: The names of the flags, without dashes, and their types.
        args: The arguments: `--flag value`, `--flag=value` (a value may begin with a dash), or words. Dashes and
            underscores in a flag's name are the same. A list takes all words up to the next flag; numbers and names
            may also be separated by commas, or be a list in JSON. A truth value in front of the next flag, or at the
            end, is true.
        switches: Flags that take no value; they are True.

    Returns:
        The words, help flags among them, and the values by name. If a flag is given twice, the last counts.

    Raises:
        UserError: If a flag is unknown, its value is missing, or does not fit; names it.
    """
    words: list[str] = []
    given: dict[str, Any] = {}
    rest = list(args)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument in HELP:
            words.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        name = flag[2:].replace("-", "_")
        if ALIASES.get(name) in kinds:
            name = ALIASES[name]
        if name not in kinds:
            # Keys of a section are written as in a file.
            raise unknown("flag", flag, [f"--{key if '.' in key else key.replace('_', '-')}" for key in kinds])
        if name in switches:
            if equals:
                raise UserError(f"{flag} takes no value, got {value!r}")
            given[name] = True
            continue
        kind = kinds[name]
        if not equals and kind is bool and (not rest or rest[0].startswith("--")):
            value = "true"
        elif not equals:
            if not rest:
                raise UserError(f"{flag} needs a value")
            value = rest.pop(0)
        if typing.get_origin(kind) is tuple:
            values = [value]
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            element = typing.get_args(kind)[0]
            given[name] = checked(kind, [part for text in values for part in _elements(element, text)], flag)
        else:
            given[name] = checked(kind, _meaning(kind, value), flag)
    return words, given


def _elements(kind: Any, text: str) -> list[Any]:
    """The elements of a list in a word: those between commas, or those of a JSON list; a free text is one."""
    if kind is str:
        return [text]
    if text.startswith("["):
        with contextlib.suppress(ValueError):
            return list(parse_json(text))
    return [_meaning(kind, part.strip()) for part in text.split(",") if part.strip()] or [text]


def _meaning(kind: Any, text: str) -> Any:
    """Parse a text as a value of this type; a text that is none is returned as it is, and the check refuses it."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    number = number_of(kind) or kind
    if number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def _positional(cls: Any) -> dict[str, str]:
    """The positional fields, and their names in messages."""
    found = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        if tyro.conf.Positional in marks:
            metavars = [mark.metavar for mark in marks if getattr(mark, "metavar", None)]
            found[name] = (metavars or [name.upper()])[0].removesuffix(" ...")
    return found


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    table: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return table
