"""Tokenizers: bytes, or a Hugging Face `tokenizer.json` from a file, a folder or the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trifocal.data.sources.base import fingerprint
from trifocal.data.sources.chats import Chat, render_chat, render_prompt
from trifocal.errors import UserError, first_sentence, one_line
from trifocal.paths import read_json, read_text, user_path

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    *("special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE, "chat_template.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
"""Files of a tokenizer in a folder of Hugging Face; those after the second are transformers' alone."""
# Tables of a few bytes a token are made of a vocabulary; the largest known have a million tokens.
_MOST_TOKENS = 1 << 24
# An id of the hub.
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Usual names of the token that ends a document, the most explicit first.
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|end_of_document|>", "<eos>", "</s>", "[SEP]", "[EOS]")
# In training; a model that is served has the tokenizer of its training.
_ANOTHER = "set data.tokenizer to a folder that has one, such as the model's own"


class ChatTokens(NamedTuple):
    """A chat in tokens.

    Attributes:
        tokens: [n] int32.
        answers: Which of them the assistant wrote, [n] bool.
    """

    tokens: NDArray[np.int32]
    answers: NDArray[np.bool_]


class Tokenizer(Protocol):
    """Text to tokens and back. `separator` ends a document and never occurs inside a text."""

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

    def encode_chat(self, messages: Chat) -> ChatTokens:
        """The tokens of a chat, by the tokenizer's template, with the template's special tokens.

        Raises:
            UserError: If the tokenizer has no template.
            BadChat: If the template refuses the chat.
        """
        ...

    def encode_prompt(self, messages: Chat) -> NDArray[np.int32]:
        """The tokens of a chat and of the beginning of its next answer; raises as `encode_chat`, [n]."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, without separators; invalid UTF-8 is replaced."""
        ...

    def count_bytes(self, ids: Any) -> int:
        """UTF-8 bytes of the text of tokens, the divisor of bits per byte. Separators count 0."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files that `make_tokenizer` reads, and transformers too, into an existing folder."""
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

    def encode_chat(self, messages: Chat) -> ChatTokens:
        """Bytes have no chat template."""
        raise UserError(f"{_no_template(self.name)}; {_ANOTHER}")

    def encode_prompt(self, messages: Chat) -> NDArray[np.int32]:
        """Bytes have no chat template."""
        raise UserError(_no_template(self.name))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of bytes, without ids above 255."""
        numbers = list(map(int, ids))
        try:
            text = bytes(numbers)
        except ValueError:
            text = bytes(number for number in numbers if 0 <= number < 256)
        return text.decode("utf-8", errors="replace")

    def count_bytes(self, ids: Any) -> int:
        """Number of ids that are bytes."""
        array = np.asarray(ids)
        return int(np.count_nonzero((array >= 0) & (array < 256)))

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`: a vocabulary of bytes without merges."""
        (folder / TOKENIZER_FILE).write_text(json.dumps(_byte_vocabulary(self.separator)) + "\n", encoding="utf-8")
        # A separator's name in a text is no separator.
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SEPARATORS[0],
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
        }
        (folder / CONFIG_FILE).write_text(json.dumps(content) + "\n")

    @staticmethod
    def wrote(content: Mapping[str, Any]) -> bool:
        """Whether the content of a `tokenizer.json` is a vocabulary of bytes, with no token beside the separator."""
        model, added, expected = (
            content.get("model"),
            content.get("added_tokens"),
            _byte_vocabulary(ByteTokenizer.separator),
        )
        return (
            isinstance(model, Mapping)
            and all(model.get(key) == expected["model"][key] for key in ("vocab", "merges"))
            and isinstance(added, list)
            and all(isinstance(token, Mapping) and token.get("id") == ByteTokenizer.separator for token in added)
        )


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        name: For messages.
        separator: The token that ends a document; empty: the config's `eos_token`, or the first of the usual names that
            the vocabulary has.
        config: Content of its `tokenizer_config.json`.
        chat_template: Writes chats, in Jinja; empty: none.

    Raises:
        UserError: If there is no such separator, or an id is too large.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        separator: str = "",
        config: Mapping[str, Any] | None = None,
        chat_template: str = "",
    ) -> None:
        # A file may ask for truncation or padding to a model's length.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._config, self._chat_template = dict(config or {}), chat_template
        self.name = name
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MOST_TOKENS:
            raise UserError(f"tokenizer {name} has {self.vocab_size:,} tokens, expected 1 to {_MOST_TOKENS:,}")
        own = _text_of_token(self._config.get("eos_token"))
        candidates = [separator] if separator else [token for token in (own, *_SEPARATORS) if token in vocabulary]
        if not candidates or candidates[0] not in vocabulary:
            wanted = f"no token {separator!r}" if separator else f"none of {', '.join(_SEPARATORS)}"
            raise UserError(f"tokenizer {name} has {wanted}; name the token that ends a document in data.separator")
        self.separator_token = candidates[0]
        self.separator: int = vocabulary[self.separator_token]
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special.add(self.separator)
        parts = [tokenizer.to_str(), self.separator, *filter(None, [chat_template])]
        self.fingerprint = fingerprint(*parts)
        self._bytes_of_token: NDArray[np.int64] | None = None

    def encode(self, text: str) -> NDArray[np.int32]:
        """The tokens of a text, without special tokens around it, [n]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The tokens of each text, computed on several cores."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # The library raises plain Exception.
            raise self._cannot_encode(error) from error
        arrays = [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
        # A text may contain the separator's name; it must not end the document there.
        return [array[array != self.separator] for array in arrays]

    def encode_chat(self, messages: Chat) -> ChatTokens:
        """The tokens of a chat, by the template."""
        chat = render_chat(*self._template_of(messages, f"; {_ANOTHER}"))
        encoding = self._encode_rendered(chat.text)
        starts, ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        answers = np.zeros(len(starts), dtype=np.bool_)
        for first, end in chat.answers:
            # A token with characters of both is an answer's, as in transformers.
            answers |= (ends > first) & (starts < end)
        return ChatTokens(np.asarray(encoding.ids, dtype=np.int32), answers)

    def encode_prompt(self, messages: Chat) -> NDArray[np.int32]:
        """The tokens of a chat and of the beginning of its next answer, by the template."""
        return np.asarray(self._encode_rendered(render_prompt(*self._template_of(messages))).ids, dtype=np.int32)

    def _template_of(self, messages: Chat, advice: str = "") -> tuple[str, Chat, dict[str, str], str]:
        if not self._chat_template:
            raise UserError(_no_template(self.name) + advice)
        names = {key: text for key, value in self._config.items() if (text := _text_of_token(value)) and "token" in key}
        return self._chat_template, messages, names, self.name

    def _encode_rendered(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # As above.
            raise self._cannot_encode(error) from error

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
        """Write `tokenizer.json`, `tokenizer_config.json` and the chat template."""
        (folder / TOKENIZER_FILE).write_text(self._tokenizer.to_str(), encoding="utf-8")
        content = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config, "eos_token": self.separator_token}
        (folder / CONFIG_FILE).write_text(json.dumps(content) + "\n")
        if self._chat_template:
            (folder / TEMPLATE_FILE).write_text(self._chat_template, encoding="utf-8")

    def _cannot_encode(self, error: Exception) -> UserError:
        return UserError(
            f"tokenizer {self.name} cannot encode the text: {one_line(error)}; a vocabulary "
            "without an unknown token must have every word of the text"
        )

    def _count_bytes_of_tokens(self) -> NDArray[np.int64]:
        decoder = json.dumps(json.loads(self._tokenizer.to_str()).get("decoder"))
        byte_level = '"ByteLevel"' in decoder
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in self._special:
                continue
            if i in added:
                # Found in the text as they are written.
                lengths[i] = len(token.encode("utf-8"))
            elif byte_level:
                # Byte-level vocabularies write each byte as one character.
                lengths[i] = len(token)
            elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
                lengths[i] = 1
            else:
                lengths[i] = len(token.replace("\u2581", " ").encode("utf-8"))
        return lengths


def _text_of_token(value: Any) -> str:
    """The text of a special token in a `tokenizer_config.json`: plain, or an object with its options."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _byte_vocabulary(separator: int) -> dict[str, Any]:
    """The `tokenizer.json` of bytes."""
    # GPT-2's characters for bytes: printable ones for themselves, the others from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    characters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    end = {"id": separator, "content": _SEPARATORS[0], "single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    # A decoder has the same options, and reads none of them.
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    vocabulary = {character: byte for byte, character in enumerate(characters)}
    return {
        "version": "1.0",
        "added_tokens": [{**end, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _no_template(name: str) -> str:
    return f"tokenizer {name} has no chat template"


def make_tokenizer(name: str, *, separator: str = "") -> Tokenizer:
    """Load a tokenizer by name.

    Args:
        name: `bytes`; the path of a `tokenizer.json`, or of a folder that transformers reads, with its chat template;
            or the id of such a repository on the Hugging Face hub, like `gpt2` or `Qwen/Qwen3-0.6B`.
        separator: The token that ends a document; empty: the `eos_token` of a folder's `tokenizer_config.json`, or
            found by its usual names.

    Raises:
        UserError: If there is no such tokenizer, it cannot be read, or has no separator.
    """
    if name == ByteTokenizer.name:
        if separator:
            raise UserError(f"data.separator is {separator!r}, but tokenizer bytes has its own (id 256); leave it out")
        return ByteTokenizer()
    path = user_path(name, "data.tokenizer")
    if path.is_file():
        return _from_file(path, name, separator)
    if path.is_dir():
        return _from_folder(path, name, separator)
    if name.endswith(".json") or not _ID.fullmatch(name):
        raise UserError(f"tokenizer {name}: no such file; give the path of a tokenizer.json")
    return _from_folder(_download(name), name, separator)


def _from_folder(folder: Path, name: str, separator: str) -> Tokenizer:
    """The tokenizer of a folder, with its end token and chat template."""
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(f"tokenizer {name}: no such file; give the path of a tokenizer.json, or of its folder")
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    template = config.pop("chat_template", "")
    if isinstance(template, list):
        # Several, by name.
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default", "")
    if (folder / TEMPLATE_FILE).is_file():
        template = read_text(folder / TEMPLATE_FILE)
    return _from_file(folder / TOKENIZER_FILE, name, separator, config, str(template or ""))


def _from_file(
    path: Path, name: str, separator: str, config: dict[str, Any] | None = None, template: str = ""
) -> Tokenizer:
    # Bytes need no library.
    content = read_json(path)
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
    # The library gives the next free number to an added token whose own is not that, without a word, and leaves out one
    # without text.
    for token in content.get("added_tokens") or ():
        if (found := loaded.token_to_id(token["content"])) not in (None, token["id"]):
            raise UserError(
                f"tokenizer {path}: the added token {token['content']!r} has the id {token['id']:,}, but the library "
                f"reads it as {found:,}; added tokens must follow the vocabulary without gaps, or have its ids"
            )
    return HuggingFaceTokenizer(loaded, name, separator, config, template)


def _download(name: str) -> Path:
    """The folder of a repository's tokenizer in the hub's cache on this machine."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"tokenizer {name} needs an extra: pip install 'trifocal[data]'") from None
    advice = "use bytes, or give the path of a tokenizer.json"
    try:
        files = [TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files))
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise UserError(
            f"tokenizer {name}: there is no such file, and the hub shows no such repository; {advice}"
        ) from error
    except Exception as error:  # The library raises many kinds of errors, those of the HTTP client too.
        raise UserError(
            f"tokenizer {name}: there is no such file, and neither the hub nor its cache on this machine answers "
            f"({first_sentence(error)}); {advice}"
        ) from error
