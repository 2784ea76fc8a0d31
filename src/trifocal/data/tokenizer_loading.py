"""Tokenizers by name: bytes, a file or folder, or a repository of the Hugging Face hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trifocal.data.tokenizers import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
)
from trifocal.errors import UserError, nearest, one_line
from trifocal.paths import read_small_file, user_path

_SHORT_IDS = ("gpt2",)
"""Repositories of the hub without an owner."""
_LIMIT_BYTES = 1 << 28
_ID = re.compile(r"[\w.-]+/[\w.-]+")


def make_tokenizer(name: str, *, separator: str = "") -> Tokenizer:
    """Load a tokenizer by name.

    Args:
        name: `bytes`; the path of a `tokenizer.json`, or of a folder that transformers reads, with its chat template;
            or the id of such a repository on the Hugging Face hub, like `gpt2` or `Qwen/Qwen3-0.6B`.
        separator: The token that ends a document; empty: the `eos_token` of a folder's `tokenizer_config.json`, or
            found by its usual names.

    Raises:
        UserError: If there is no such tokenizer (names the nearest), it cannot be read, or has no separator.
    """
    if name == "bytes":
        return _bytes(separator)
    path = user_path(name, "data.tokenizer")
    if path.is_dir():
        return _from_folder(path, name, separator)
    if path.is_file():
        return _from_file(path, name, separator)
    if name in _SHORT_IDS or (_ID.fullmatch(name) and not name.endswith(".json")):
        return _from_folder(_download(name), name, separator)
    if "/" in name or name.endswith(".json"):
        raise UserError(f"tokenizer {name}: no such file; give the path of a tokenizer.json")
    known = ("bytes", *_SHORT_IDS)
    raise UserError(
        f"unknown tokenizer {name!r}; the nearest is {nearest(name, known)} "
        f"(known: {', '.join(known)}, the path of a tokenizer.json, or an id of the Hugging Face hub like OWNER/NAME)"
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote into a folder, such as the `weights` of a run.

    Raises:
        UserError: If there is none, or one of its files is broken.
    """
    path = folder / CONFIG_FILE
    try:
        content = json.loads(read_small_file(path, _LIMIT_BYTES))
        kind = content["tokenizer_class"]
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}, which names the model's tokenizer: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} does not name a tokenizer_class") from error
    # Older runs wrote no more for bytes.
    return ByteTokenizer() if kind == ByteTokenizer.__name__ else _from_folder(folder, str(folder), "")


def _bytes(separator: str) -> ByteTokenizer:
    if separator:
        raise UserError(f"data.separator is {separator!r}, but tokenizer bytes has its own (id 256); leave it out")
    return ByteTokenizer()


def _from_folder(folder: Path, name: str, separator: str) -> Tokenizer:
    """The tokenizer of a folder, with its end token and chat template."""
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(f"tokenizer {name}: no such file; give the path of a tokenizer.json, or of its folder")
    config = {}
    if (folder / CONFIG_FILE).is_file():
        config = _read_object(folder / CONFIG_FILE)
    template = config.pop("chat_template", "")
    if isinstance(template, list):
        # Several, by name.
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default", "")
    if (folder / TEMPLATE_FILE).is_file():
        template = _read_text(folder / TEMPLATE_FILE)
    return _from_file(folder / TOKENIZER_FILE, name, separator, config, str(template or ""))


def _from_file(
    path: Path, name: str, separator: str, config: dict[str, Any] | None = None, template: str = ""
) -> Tokenizer:
    # Bytes need no library.
    content = _read_object(path)
    if not separator and not template and ByteTokenizer.wrote(content):
        return ByteTokenizer()
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"tokenizer {name} needs an extra: pip install 'trifocal[data]'") from None
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception for a broken file.
        raise UserError(f"tokenizer {path} is not a tokenizer.json: {one_line(error)}") from error
    return HuggingFaceTokenizer(loaded, name, separator, config, template)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"tokenizer {path} is not a {path.name}: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"tokenizer {path} is not a {path.name}: it holds no JSON object")
    return content


def _read_text(path: Path) -> str:
    try:
        return read_small_file(path, _LIMIT_BYTES).decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"tokenizer {path} is not UTF-8 text: {one_line(error)}") from error


def _download(name: str) -> Path:
    """The folder of a repository's tokenizer in the hub's cache on this machine."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"tokenizer {name} needs an extra: pip install 'trifocal[data]'") from None
    try:
        files = [TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE]
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=files))
    except Exception as error:  # The library raises many kinds of errors, those of the HTTP client too.
        raise UserError(
            f"tokenizer {name}: there is no such file, and neither the hub nor its cache on this machine answers "
            f"({one_line(error)}); use bytes, or give the path of a tokenizer.json"
        ) from error
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(f"tokenizer {name}: the repository has no {TOKENIZER_FILE}")
    return folder
