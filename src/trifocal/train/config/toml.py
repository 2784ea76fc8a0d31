"""Reading and writing configurations as TOML."""

import dataclasses
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import docstring_parser

from trifocal.errors import UserError
from trifocal.fields import checked, key_of
from trifocal.paths import read_small_file

_LARGEST_BYTES = 2**16
"""Python's parser takes time that grows with the square of a key's length."""
_YAML_LINE = re.compile(r"[\w.-]+:(\s|$)")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: If the file is missing, unreadable, not UTF-8 or not TOML; names the file and the place.
    """
    path = Path(checked(str, str(path), "the path of a config file"))
    text = ""
    try:
        # Some editors begin a file with a byte order mark.
        text = read_small_file(path, _LARGEST_BYTES).decode("utf-8-sig")
        return tomllib.loads(text)
    except FileNotFoundError as error:
        raise UserError(f"config file {path} does not exist") from error
    except OSError as error:
        raise UserError(f"cannot read the config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path} is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        if path.suffix in (".yaml", ".yml") or _is_yaml(text):
            raise UserError(
                f"config file {path} is YAML, expected TOML: write [train] for train: and steps = 100 for steps: 100; "
                "trifocal new showcase prints an example"
            ) from error
        raise UserError(f"config file {path} is not valid TOML: {error}") from error
    except UserError:
        raise
    except ValueError as error:
        # Python's parser raises no other one.
        raise UserError(f"config file {path} has a number of too many digits") from error
    except RecursionError as error:
        raise UserError(f"config file {path} is nested too deeply") from error


def _is_yaml(text: str) -> bool:
    """Whether the first line of a text that is no comment is a key with a colon."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and line != "---" and not line.startswith("#")), "")
    return _YAML_LINE.match(first) is not None


def to_toml(config: Any, *, comments: bool = False) -> str:
    """Write a nested dataclass as TOML that `from_table` reads back equal.

    Args:
        config: The dataclass.
        comments: Write the docstring of each field above it.
    """
    lines: list[str] = []
    _write(config, "", lines, comments)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write(config: Any, prefix: str, lines: list[str], comments: bool) -> None:
    tables = []
    described = docstring_parser.parse_from_object(type(config)).params if comments else []
    texts = {param.arg_name: param.description or "" for param in described}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            tables.append((prefix + field.name, value))
        else:
            lines += textwrap.wrap(texts.get(field.name, ""), 116, initial_indent="# ", subsequent_indent="# ")
            lines.append(f"{key_of(field.name)} = {to_literal(value)}")
    for name, value in tables:
        lines.extend(["", f"[{name}]"])
        _write(value, name + ".", lines, comments)


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
