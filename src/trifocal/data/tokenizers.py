"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trifocal.data.messages import one_line
from trifocal.data.sources import fingerprint
from trifocal.errors import UserError, nearest
from trifocal.paths import user_path

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
"""Files of a tokenizer in a folder of Hugging Face; those after the second are transformers' alone."""
_HUB_NAMES = ("gpt2",)
# Usual names of the token that ends a document, the most explicit first.
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|end_of_document|>", "<eos>", "</s>", "[SEP]", "[EOS]")


class Tokenizer(Protocol):
    """Text to tokens and back. `separator` ends a document and never occurs inside one; its name may be empty."""

    name: str
    vocab_size: int
    separator: int
    separator_token: str
    fingerprint: str

    def encode(self, text: str) -> NDArray[np.int32]:
        """The tokens of a text, without a separator, [n]."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The tokens of each text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, without separators; invalid UTF-8 is replaced."""
        ...

    def count_bytes(self, ids: Any) -> int:
        """UTF-8 bytes of the text of tokens, the divisor of bits per byte. Separators count 0."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files of `load_tokenizer` into an existing folder."""
        ...


class ByteTokenizer:
    """Token `i` is byte `i` of the UTF-8 text; 256 is the separator."""

    name = "bytes"
    vocab_size = 257
    separator = 256
    separator_token = ""
    fingerprint = "bytes"

    def encode(self, text: str) -> NDArray[np.int32]:
        """The bytes of a text, [n]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of bytes, without ids above 255."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def count_bytes(self, ids: Any) -> int:
        """Number of ids that are bytes."""
        array = np.asarray(ids)
        return int(np.count_nonzero((array >= 0) & (array < 256)))

    def save(self, folder: Path) -> None:
        """Write `tokenizer_config.json`."""
        (folder / CONFIG_FILE).write_text(json.dumps({"tokenizer_class": type(self).__name__}) + "\n")


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        name: For messages.
        separator: The token that ends a document; empty: the first of the usual names that the vocabulary has.

    Raises:
        UserError: If there is no such separator.
    """

    def __init__(self, tokenizer: Any, name: str, separator: str = "") -> None:
        # A file may ask for truncation or padding to a model's length.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.name = name
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        candidates = [separator] if separator else [token for token in _SEPARATORS if token in vocabulary]
        if not candidates or candidates[0] not in vocabulary:
            wanted = f"no token {separator!r}" if separator else f"none of {', '.join(_SEPARATORS)}"
            raise UserError(f"tokenizer {name} has {wanted}; name the token that ends a document in data.separator")
        self.separator_token = candidates[0]
        self.separator: int = vocabulary[self.separator_token]
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special.add(self.separator)
        self.fingerprint = fingerprint(tokenizer.to_str(), self.separator)
        self._bytes_of_token: NDArray[np.int64] | None = None

    def encode(self, text: str) -> NDArray[np.int32]:
        """The tokens of a text, without special tokens around it, [n]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The tokens of each text, computed on several cores."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # The library raises plain Exception.
            raise UserError(
                f"tokenizer {self.name} cannot encode the text: {one_line(error)}; a vocabulary "
                "without an unknown token must have every word of the text"
            ) from error
        arrays = [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
        # A text may contain the separator's name; it must not end the document there.
        return [array[array != self.separator] for array in arrays]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def count_bytes(self, ids: Any) -> int:
        """UTF-8 bytes of the text of tokens; exact for byte-level and byte-fallback vocabularies."""
        if self._bytes_of_token is None:
            self._bytes_of_token = self._count_bytes_of_tokens()
        array = np.asarray(ids).reshape(-1)
        return int(self._bytes_of_token[array[array >= 0]].sum())

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which transformers reads too."""
        (folder / TOKENIZER_FILE).write_text(self._tokenizer.to_str(), encoding="utf-8")
        content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.separator_token}
        (folder / CONFIG_FILE).write_text(json.dumps(content) + "\n")

    def _count_bytes_of_tokens(self) -> NDArray[np.int64]:
        decoder = json.dumps(json.loads(self._tokenizer.to_str()).get("decoder"))
        byte_level = '"ByteLevel"' in decoder
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in self._special:
                continue
            if byte_level:
                # Byte-level vocabularies write each byte as one character.
                lengths[i] = len(token)
            elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
                lengths[i] = 1
            else:
                lengths[i] = len(token.replace("\u2581", " ").encode("utf-8"))
        return lengths


def make_tokenizer(name: str, *, separator: str = "") -> Tokenizer:
    """Load a tokenizer by name.

    Args:
        name: `bytes`, `gpt2`, or the path of a `tokenizer.json` (or of the folder that holds it).
        separator: The token that ends a document; empty: found by its usual names.

    Raises:
        UserError: If there is no such tokenizer (names the nearest), it cannot be read, or has no separator.
    """
    if name == "bytes":
        if separator:
            raise UserError(f"data.separator is {separator!r}, but tokenizer bytes has its own (id 256); leave it out")
        return ByteTokenizer()
    path = user_path(name, "data.tokenizer")
    is_path = "/" in name or name.endswith(".json") or path.exists()
    path = path / TOKENIZER_FILE if path.is_dir() else path
    if name not in _HUB_NAMES and not path.is_file():
        if is_path:
            raise UserError(f"tokenizer {name}: no such file; give the path of a tokenizer.json")
        known = ("bytes", *_HUB_NAMES)
        raise UserError(
            f"unknown tokenizer {name!r}; the nearest is {nearest(name, known)} "
            f"(known: {', '.join(known)}, or the path of a tokenizer.json)"
        )
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"tokenizer {name} needs an extra: pip install 'trifocal[data]'") from None
    # The library raises plain Exception for a broken file and several kinds for an unreachable hub.
    try:
        loaded = (
            tokenizers.Tokenizer.from_file(str(path)) if path.is_file() else tokenizers.Tokenizer.from_pretrained(name)
        )
    except Exception as error:
        reason = one_line(error)
        if path.is_file():
            raise UserError(f"tokenizer {path} is not a tokenizer.json: {reason}") from error
        raise UserError(
            f"tokenizer {name}: neither the hub nor its cache on this machine answers ({reason}); "
            "use bytes, or give the path of a tokenizer.json"
        ) from error
    return HuggingFaceTokenizer(loaded, name, separator)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder: what `Tokenizer.save` wrote, such as the `weights` of a run, or a Hugging Face one.

    Raises:
        UserError: If there is none, or one of its files is broken.
    """
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind, separator = content["tokenizer_class"], content.get("eos_token") or ""
        # Some folders describe the token instead of naming it.
        separator = separator["content"] if isinstance(separator, dict) else separator
    except OSError as error:
        raise UserError(f"cannot read {path}, which names the model's tokenizer: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} does not name a tokenizer_class") from error
    if kind == ByteTokenizer.__name__:
        return ByteTokenizer()
    return make_tokenizer(str(folder / TOKENIZER_FILE), separator=separator)
