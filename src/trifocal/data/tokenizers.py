"""Tokenizers: bytes, or a Hugging Face `tokenizer.json` from a file, a folder or the hub."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trifocal.data.sources.base import fingerprint
from trifocal.data.sources.chats import Chat, render_chat, render_prompt
from trifocal.errors import UserError, first_sentence, one_line
from trifocal.paths import read_json, read_text, user_path

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    *("special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE, "chat_template.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
"""Files of a tokenizer in a folder of Hugging Face; only transformers reads those after the third."""
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Special tokens in a model's `config.json` and `generation_config.json`."""
_MODEL_CONFIG_FILE = "config.json"
# Keys of `generation_config.json` that are not kept: by the first, transformers would make the others anew.
_UNKEPT = ("_from_model_config", "transformers_version")
# Tables of a few bytes a token are made of a vocabulary; the largest known have a million tokens.
_MAX_TOKENS = 1 << 24
# An id of the hub.
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Usual names of the token that ends a document, the most explicit first.
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|end_of_document|>", "<eos>", "</s>", "[SEP]", "[EOS]")
_NO_TEMPLATE = "tokenizer {} has no chat template"
# In training; a model that is served has the tokenizer of its training.
_ANOTHER = "set data.tokenizer to a folder that has one, such as the model's own"


class ChatTokens(NamedTuple):
    """A chat in tokens, [n] int32, and which of them the assistant wrote, [n] bool."""

    tokens: NDArray[np.int32]
    answers: NDArray[np.bool_]


class ByteTokenizer:
    """Token `i` is byte `i` of the UTF-8 text, 256 the separator `<|endoftext|>`; else as `HuggingFaceTokenizer`."""

    name = "bytes"
    vocab_size = 257
    separator = 256
    separator_token = ""
    longest = len(_SEPARATORS[0])
    fingerprint = "bytes"

    def __init__(self, generation: Mapping[str, Any] | None = None) -> None:
        self.generation: dict[str, Any] = dict(generation or {})
        self.ends = _ends(self.separator, self.generation, self.name)

    def encode(self, text: str) -> NDArray[np.int32]:
        """The bytes of a text, also of the separator's name, [n]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [self.encode(text) for text in texts]

    def encode_chat(self, messages: Chat) -> ChatTokens:
        raise UserError(f"{_NO_TEMPLATE.format(self.name)}; {_ANOTHER}")

    def encode_prompt(self, prompt: str | Chat) -> NDArray[np.int32]:
        """The bytes of a text, with separators where it names them; bytes have no chat template, [n]."""
        if not isinstance(prompt, str):
            raise UserError(_NO_TEMPLATE.format(self.name))
        parts = [[*part.encode("utf-8")] for part in prompt.split(_SEPARATORS[0])]
        joined = [token for part in parts for token in (*part, self.separator)]
        return np.array(joined[:-1], dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of bytes, without ids above 255."""
        return bytes(number for number in map(int, ids) if 0 <= number < 256).decode("utf-8", errors="replace")

    def token_text(self, token: int, *, begins: bool = False) -> str:
        return _SEPARATORS[0] if token == self.separator else self.decode([token])

    def count_bytes(self, ids: Any) -> int:
        array = np.asarray(ids)
        return int(np.count_nonzero((array >= 0) & (array < 256)))

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`: a vocabulary of bytes without merges."""
        (folder / TOKENIZER_FILE).write_text(json.dumps(_byte_vocabulary(self.separator)) + "\n", encoding="utf-8")
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SEPARATORS[0],
            "clean_up_tokenization_spaces": False,
        }
        (folder / CONFIG_FILE).write_text(json.dumps(content) + "\n")

    @staticmethod
    def wrote(content: Mapping[str, Any]) -> bool:
        """Whether the content of a `tokenizer.json` is a vocabulary of bytes, with no token beside the separator."""
        model, added, expected = content.get("model"), content.get("added_tokens"), _byte_vocabulary(256)["model"]
        return (
            isinstance(model, Mapping)
            and all(model.get(key) == expected[key] for key in ("vocab", "merges"))
            and isinstance(added, list)
            and all(isinstance(token, Mapping) and token.get("id") == ByteTokenizer.separator for token in added)
        )


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library; UserError if it has no separator.

    The separator is the token that ends a document; empty: the `eos_token` of the config, the content of
    `tokenizer_config.json`, or the first of the usual names that the vocabulary has.

    Attributes:
        name: For messages.
        vocab_size: Tokens.
        longest: Characters of the longest token.
        separator: The token that ends a document. No text of the training data contains it.
        separator_token: Its name; empty for bytes.
        fingerprint: Equal for tokenizers that make the same tokens.
        generation: Settings of `generation_config.json`, which lies beside the tokenizer's files, and the special
            tokens of the model's `config.json`. They are kept where the tokenizer is saved.
        ends: Tokens that end an answer: the separator, and the `eos_token_id` of these settings.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        separator: str = "",
        config: Mapping[str, Any] | None = None,
        chat_template: str = "",
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        # A file may ask for truncation or padding to a model's length.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._config, self._chat_template = dict(config or {}), chat_template
        self.name = name
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MAX_TOKENS:
            raise UserError(f"tokenizer {name} has {self.vocab_size:,} tokens, expected 1 to {_MAX_TOKENS:,}")
        self.longest = max(map(len, vocabulary))
        named = _text_of_token(self._config.get("eos_token"))
        candidates = [separator] if separator else [token for token in (named, *_SEPARATORS) if token in vocabulary]
        if not candidates or candidates[0] not in vocabulary:
            wanted = f"no token {separator!r}" if separator else f"none of {', '.join(_SEPARATORS)}"
            raise UserError(f"tokenizer {name} has {wanted}; name the token that ends a document in data.separator")
        self.separator_token = candidates[0]
        self.separator: int = vocabulary[self.separator_token]
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special.add(self.separator)
        self._before = self._tokens_before()
        self.generation: dict[str, Any] = dict(generation or {})
        self.ends = _ends(self.separator, self.generation, name)
        self.fingerprint = fingerprint(tokenizer.to_str(), self.separator, *filter(None, [chat_template, self._before]))

    def encode(self, text: str) -> NDArray[np.int32]:
        """The tokens of a piece of text, without special tokens around it and without separators in it, [n]."""
        return self._encode_texts([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The tokens of each document, on several cores, behind those that begin prompts; none of an empty one."""
        before = np.array(self._before, dtype=np.int32)
        return [np.concatenate((before, array)) if len(array) else array for array in self._encode_texts(texts)]

    def _encode_texts(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        with self._encoding():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        arrays = [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
        # A text may contain the separator's name; it must not end the document there.
        return [array[array != self.separator] for array in arrays]

    def encode_chat(self, messages: Chat) -> ChatTokens:
        """The tokens of a chat, by the tokenizer's template; BadChat if it refuses the chat."""
        text, parts = render_chat(*self._template_of(messages, f"; {_ANOTHER}"))
        with self._encoding():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        answers = np.zeros(len(starts), dtype=np.bool_)
        for first, end in parts:
            # A token with characters of both is an answer's, as in transformers.
            answers |= (ends > first) & (starts < end)
        return ChatTokens(np.asarray(encoding.ids, dtype=np.int32), answers)

    def encode_prompt(self, prompt: str | Chat) -> NDArray[np.int32]:
        """The tokens of a text as transformers gives them, with special ones around; or of a chat up to its answer."""
        is_text = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else render_prompt(*self._template_of(prompt))
        with self._encoding():
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=is_text).ids, dtype=np.int32)

    def _tokens_before(self) -> list[int]:
        """The special tokens that the tokenizer puts in front of a text; a chat's template writes them itself."""
        if not self._tokenizer.num_special_tokens_to_add(False):
            return []
        encoding = self._tokenizer.encode(self.separator_token)
        # Such a token belongs to no text.
        return list(encoding.ids[: encoding.sequence_ids.index(0)])

    def _template_of(self, messages: Chat, advice: str = "") -> tuple[str, Chat, dict[str, str], str]:
        if not self._chat_template:
            raise UserError(_NO_TEMPLATE.format(self.name) + advice)
        names = {key: text for key, value in self._config.items() if (text := _text_of_token(value)) and "token" in key}
        return self._chat_template, messages, names, self.name

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, without separators; invalid UTF-8 is replaced."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def token_text(self, token: int, *, begins: bool = False) -> str:
        """The text that a token adds, or begins a text with; a special one's name; U+FFFD for a part of a character."""
        if token in self._special:
            return str(self._tokenizer.id_to_token(token) or "")
        if begins:
            return self.decode([token])
        # Decoders leave out a space in front of the first token.
        letter = self._a_letter
        return self.decode([letter, token])[len(self.decode([letter])) :]

    @functools.cached_property
    def _a_letter(self) -> int:
        """A token of letters, behind which every other shows its text."""
        ordinary = (token for token in range(self.vocab_size) if token not in self._special)
        return next((token for token in ordinary if self.decode([token]).isalnum()), 0)

    def count_bytes(self, ids: Any) -> int:
        """UTF-8 bytes of the tokens' text without separators, exact for byte-level and byte-fallback vocabularies."""
        array = np.asarray(ids).reshape(-1)
        return int(self._bytes_of_token[array[array >= 0]].sum())

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and the chat template."""
        (folder / TOKENIZER_FILE).write_text(self._tokenizer.to_str(), encoding="utf-8")
        content = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config, "eos_token": self.separator_token}
        (folder / CONFIG_FILE).write_text(json.dumps(content) + "\n")
        if self._chat_template:
            (folder / TEMPLATE_FILE).write_text(self._chat_template, encoding="utf-8")

    @contextlib.contextmanager
    def _encoding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # The library raises plain Exception.
            raise UserError(
                f"tokenizer {self.name} cannot encode the text: {one_line(error)}; a vocabulary "
                "without an unknown token must have every word of the text"
            ) from error

    @functools.cached_property
    def _bytes_of_token(self) -> NDArray[np.int64]:
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


Tokenizer = ByteTokenizer | HuggingFaceTokenizer
"""Text to tokens and back."""


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
    return _from_file(folder / TOKENIZER_FILE, name, separator, config, str(template or ""), _read_generation(folder))


def _read_generation(folder: Path) -> dict[str, Any]:
    """The settings of `generation_config.json`, and the special tokens of the model's `config.json` that it lacks."""
    found: dict[str, Any] = {}
    if (folder / _MODEL_CONFIG_FILE).is_file():
        content = read_json(folder / _MODEL_CONFIG_FILE)
        found = {key: content[key] for key in SPECIAL_IDS if content.get(key) is not None}
    if (folder / GENERATION_FILE).is_file():
        content = read_json(folder / GENERATION_FILE)
        found |= {key: value for key, value in content.items() if value is not None and key not in _UNKEPT}
    return found


def _ends(separator: int, generation: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The tokens that end an answer."""
    ends = generation.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise UserError(f"tokenizer {name}: eos_token_id in {GENERATION_FILE} must be token ids, got {ends}")
    return tuple(dict.fromkeys((separator, *ends)))


def _from_file(
    path: Path,
    name: str,
    separator: str,
    config: dict[str, Any] | None = None,
    template: str = "",
    generation: dict[str, Any] | None = None,
) -> Tokenizer:
    # Bytes need no library.
    content = read_json(path)
    if not separator and not template and ByteTokenizer.wrote(content):
        return ByteTokenizer(generation)
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
    return HuggingFaceTokenizer(loaded, name, separator, config, template, generation)


def _download(name: str) -> Path:
    """The folder of a repository's tokenizer in the hub's cache on this machine."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"tokenizer {name} needs an extra: pip install 'trifocal[data]'") from None
    try:
        files = [TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE, GENERATION_FILE]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files))
    except Exception as error:  # The library raises many kinds of errors, those of the HTTP client too.
        raise UserError(
            f"tokenizer {name}: there is no such file, and the hub does not give it ({first_sentence(error)}); "
            "use bytes, or give the path of a tokenizer.json"
        ) from error
