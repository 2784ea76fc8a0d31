"""Typed dataclasses to TOML and back, exactly: what is written loads back equal, and nothing unknown is accepted."""

import dataclasses
import math
import tomllib
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from trifocal.errors import UserError, nearest

T = TypeVar("T")


def field_types(cls: type) -> dict[str, Any]:
    """The fields of a dataclass with their resolved types."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def dotted_fields(cls: type, prefix: str = "") -> dict[str, Any]:
    """Every leaf field of a nested dataclass, as `section.field`, with its type."""
    leaves: dict[str, Any] = {}
    for name, kind in field_types(cls).items():
        if dataclasses.is_dataclass(kind):
            leaves.update(dotted_fields(typing.cast(type, kind), f"{prefix}{name}."))
        else:
            leaves[prefix + name] = kind
    return leaves


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: If the file is missing, unreadable, not UTF-8 or not TOML; names the file and the place.
    """
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"config file {path} does not exist") from error
    except OSError as error:
        raise UserError(f"cannot read the config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path} is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"config file {path} is not valid TOML: {error}") from error


def from_table(cls: type[T], table: dict[str, Any], source: str) -> T:
    """Build a dataclass from a TOML table.

    Args:
        cls: The dataclass; fields may be dataclasses, int, float, bool, str or a Literal of str.
        table: The parsed TOML.
        source: Name of the file, for messages.

    Raises:
        UserError: If a key is unknown (names the nearest valid one), missing, of the wrong type, or refused by the
            dataclass itself.
    """
    return _build(cls, table, source, "", dotted_fields(cls))


def _build(cls: type[T], table: dict[str, Any], source: str, prefix: str, known: dict[str, Any]) -> T:
    types = field_types(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix + key
        if key not in types:
            sections = [section.rpartition(".")[0] for section in known]
            valid = [*known, *filter(None, sections)]
            raise UserError(f'{source}: unknown key "{name}"; the nearest valid one is "{nearest(name, valid)}"')
        kind = types[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                raise UserError(f"{source}: {name} must be a table, got {value!r}")
            values[key] = _build(typing.cast(type, kind), value, source, name + ".", known)
        else:
            values[key] = _scalar(kind, value, f"{source}: {name}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            what = "section" if dataclasses.is_dataclass(types[field.name]) else "key"
            raise UserError(f'{source}: the {what} "{prefix}{field.name}" is missing')
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error


def _scalar(kind: Any, value: Any, name: str) -> Any:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise UserError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise UserError(f"{name} must be {_NAMES[kind]}, got {value!r}")
    return value


_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}


def to_toml(config: Any) -> str:
    """Write a nested dataclass as TOML that `from_table` reads back equal."""
    lines: list[str] = []
    _write(config, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write(config: Any, prefix: str, lines: list[str]) -> None:
    tables = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            tables.append((prefix + field.name, value))
        else:
            lines.append(f"{field.name} = {_literal(value)}")
    for name, value in tables:
        lines.extend(["", f"[{name}]"])
        _write(value, name + ".", lines)


def _literal(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    escaped = "".join(
        f"\\{char}" if char in '"\\' else char if char >= " " and char != "\x7f" else f"\\u{ord(char):04x}"
        for char in value
    )
    return f'"{escaped}"'
