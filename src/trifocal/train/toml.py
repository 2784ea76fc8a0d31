"""Reading and writing configurations as TOML."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from trifocal.errors import UserError
from trifocal.fields import checked, key_of


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: If the file is missing, unreadable, not UTF-8 or not TOML; names the file and the place.
    """
    path = Path(checked(str, str(path), "the path of a config file"))
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
    except ValueError as error:
        # Python's parser raises no other one.
        raise UserError(f"config file {path} has a number of too many digits") from error
    except RecursionError as error:
        raise UserError(f"config file {path} is nested too deeply") from error


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
            lines.append(f"{key_of(field.name)} = {to_literal(value)}")
    for name, value in tables:
        lines.extend(["", f"[{name}]"])
        _write(value, name + ".", lines)


def to_literal(value: bool | int | float | str | tuple[Any, ...]) -> str:
    """Write one value as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(to_literal, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    escaped = "".join(
        f"\\{char}" if char in '"\\' else char if char >= " " and char != "\x7f" else f"\\u{ord(char):04x}"
        for char in value
    )
    return f'"{escaped}"'
