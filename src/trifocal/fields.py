"""Typed dataclasses from values: one rule for files, flags and code."""

import contextlib
import dataclasses
import keyword
import math
import reprlib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

from trifocal.errors import UserError, unknown
from trifocal.paths import parse_json

T = TypeVar("T")

LONGEST_SECONDS = 1e9
"""About 32 years: well below the 292 years that a clock of 64-bit nanoseconds can count."""

HELP = {"-h", "--help"}
_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}


class _Shown(reprlib.Repr):
    """Values in messages: short, and integers of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write longer ones in decimal.
        return super().repr_int(x, level) if x.bit_length() < 1024 else f"an integer of {x.bit_length()} bits"


_SHOWN = _Shown()


def key_of(attribute: str) -> str:
    """The key of a field in files and flags: a field whose key is a word of Python's has an underscore behind it."""
    key = attribute.removesuffix("_")
    return key if keyword.iskeyword(key) else attribute


def attribute_of(key: str) -> str:
    """The field of a key."""
    return f"{key}_" if keyword.iskeyword(key) else key


def value_of(config: Any, name: str) -> Any:
    """The value of a dotted key in a nested dataclass."""
    for key in name.split("."):
        config = getattr(config, attribute_of(key))
    return config


def field_types(cls: type) -> dict[str, Any]:
    """The keys of a dataclass with their resolved types."""
    hints = typing.get_type_hints(cls)
    return {key_of(field.name): hints[field.name] for field in dataclasses.fields(cls)}


def dotted_fields(cls: type, prefix: str = "") -> dict[str, Any]:
    """Every leaf field of a nested dataclass, as `section.field`, with its type."""
    leaves: dict[str, Any] = {}
    for name, kind in field_types(cls).items():
        if dataclasses.is_dataclass(kind):
            leaves.update(dotted_fields(typing.cast(type, kind), f"{prefix}{name}."))
        else:
            leaves[prefix + name] = kind
    return leaves


def from_table(cls: type[T], table: Mapping[str, Any], source: str = "", *, section: str = "") -> T:
    """Build a dataclass from a nested table, as TOML and JSON give it; missing keys take their defaults. Messages begin
    with the `source` of the values, such as a file's name, and call the dataclass by its `section`.
    """
    prefix = f"{section}." if section else ""
    return _build(cls, table, f"{source}: " if source else "", prefix, dotted_fields(cls, prefix))


def _build(cls: type[T], table: Mapping[str, Any], source: str, prefix: str, known: dict[str, Any]) -> T:
    types = field_types(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if key not in types:
            sections = {leaf.rpartition(".")[0] for leaf in known} - {""}
            raise unknown("key", name, [*known, *sections], source)
        kind = types[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise UserError(f"{source}{name} must be a table, got {_SHOWN.repr(value)}")
            values[key] = _build(typing.cast(type, kind), value, source, name + ".", known)
        else:
            values[key] = checked(kind, value, source + name)
    try:
        return cls(**{attribute_of(key): value for key, value in values.items()})
    except ValueError as error:
        raise UserError(f"{source}{error}") from error


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    table: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return table


def element_of(kind: Any) -> Any:
    """The type of a list's elements, also of a value or a list, like `str | tuple[str, ...]`; None for any other."""
    for part in (kind, *typing.get_args(kind)):
        if typing.get_origin(part) is tuple:
            return typing.get_args(part)[0]
    return None


def number_of(kind: Any) -> Any:
    """The number of a field that is a number or a word, like `float | Literal["auto"]`; None for any other."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) in (typing.Union, types.UnionType) else None


def checked(kind: Any, value: Any, name: str) -> Any:
    """A value, converted to the type of its field: int, float, bool, str, a Literal of str, a number or such a Literal,
    or a tuple of these; of a value or a tuple, a tuple of one becomes the value. UserError if it has another type.
    """
    element = element_of(kind)
    if element is not None and isinstance(value, tuple | list):
        values = tuple(checked(element, part, name) for part in value)
        return values[0] if len(values) == 1 and typing.get_origin(kind) is not tuple else values
    if element is not None and typing.get_origin(kind) is not tuple:
        kind = element
    if number := number_of(kind):
        words = typing.get_args(typing.get_args(kind)[1])
        if value in words:
            return value
        if type(value) is str:
            expected = f"{_NAMES[number]} or {' or '.join(map(repr, words))}"
            raise UserError(f"{name} must be {expected}, got {_SHOWN.repr(value)}")
        kind = number
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise UserError(f"{name} must be one of {', '.join(map(repr, choices))}, got {_SHOWN.repr(value)}")
        return value
    if type(value) is int:
        # The range of TOML's integers. The digits of a larger one may fill a screen.
        if not -(2**63) <= value < 2**63:
            got = f", got {value}" if value.bit_length() < 128 else ""
            raise UserError(f"{name} must fit 64 bits{got}")
        value = float(value) if kind is float else value
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise UserError(f"{name} must be {_NAMES.get(kind, 'a list')}, got {_SHOWN.repr(value)}")
    if kind is str:
        _check_text(value, name)
    return value


def check_types(section: Any, name: str) -> None:
    """Check the types of a dataclass's fields as `checked` does, and store what it returns, also in a frozen one."""
    for key, kind in field_types(type(section)).items():
        attribute = attribute_of(key)
        value = getattr(section, attribute)
        if not dataclasses.is_dataclass(kind):
            object.__setattr__(section, attribute, checked(kind, value, f"{name}.{key}"))
        elif not isinstance(value, typing.cast(type, kind)):
            raise UserError(f"{name}.{key} must be a {kind.__name__}, got {type(value).__name__}")  # type: ignore[union-attr]


def check_at_least(section: object, name: str, **lowest: float) -> None:
    """Raise UserError for a field below its lowest value, of a section, or, where `name` is empty, of a command."""
    for field, least in lowest.items():
        value = getattr(section, field)
        if value < least:
            key = f"{name}.{field}" if name else f"--{field.replace('_', '-')}"
            raise UserError(f"{key} must be at least {least}, got {value}")


def _check_text(value: str, name: str) -> None:
    if "\0" in value:
        raise UserError(f"{name} has a NUL character in it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not UTF-8 text") from error


def check_seconds(name: str, value: float) -> None:
    """Raise UserError for a time that no clock can wait for: unless 0 < value <= LONGEST_SECONDS."""
    if value <= 0:
        raise UserError(f"{name} must be positive, got {value}")
    if value > LONGEST_SECONDS:
        raise UserError(f"{name} may be at most {LONGEST_SECONDS:.0e}, got {value}")


def read_flags(
    kinds: Mapping[str, Any], args: Sequence[str], switches: Collection[str] = (), aliases: Mapping[str, str] = {}
) -> tuple[list[str], dict[str, Any]]:
    """The words of a command line, help flags among them, and the flags' values by name; the last of a flag counts.

    `kinds` are the flags' types by name; `switches` take no value, and are True. Flags are `--flag value` or
    `--flag=value` (a value may begin with a dash); dashes and underscores in a name are the same. A list takes all
    words up to the next flag; numbers and names may also be separated by commas, or be a list in JSON. A truth value in
    front of the next flag, or at the end, is true. Raises UserError for an unknown flag, or a value that does not fit.
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
        name = aliases.get(name, name)
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
        if element := element_of(kind):
            values = [value]
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
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
