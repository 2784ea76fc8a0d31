"""Writing configurations as TOML."""

import dataclasses
import json
import textwrap
from typing import Any

import docstring_parser

from trifocal.fields import key_of


def to_toml(config: Any, *, comments: bool = False) -> str:
    """A nested dataclass as TOML for `from_table`; with `comments`, the docstring of each field above it."""
    lines: list[str] = []
    _write(config, "", lines, comments)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write(config: Any, prefix: str, lines: list[str], comments: bool) -> None:
    tables = []
    described = docstring_parser.parse_from_object(type(config)).params if comments else []
    texts = {param.arg_name: " ".join((param.description or "").split()) for param in described}
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
    # As JSON writes it, which leaves one control character in a text as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
