"""One source of a loader: its streams of rows, and the settings for which a position in it is valid."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from trifocal.data.data_config import COMMIT, DataConfig
from trifocal.data.packing import PackedStream, ShuffledStream
from trifocal.data.prefetch import Activity
from trifocal.data.sources.base import BadDocuments, Source
from trifocal.data.sources.builtin import BuiltinSource
from trifocal.data.sources.hub import open_dataset
from trifocal.data.sources.parquet import ParquetSource
from trifocal.data.sources.synthetic import SyntheticStream, synthetic_stream
from trifocal.data.sources.text import JsonlSource, TextSource
from trifocal.data.stream import DocumentStream
from trifocal.data.tokenizers import Tokenizer
from trifocal.errors import UserError

RowStream = ShuffledStream | SyntheticStream
"""Endless rows with an exact position."""
_FILES = "the files (names and sizes)"
_COMMIT = re.compile(f"@{COMMIT}$")


class SourceReader:
    """One source of a loader: its streams of rows, and the settings that decide them, for which a position is valid.
    Attributes are as of `Loader`, for this source; `epoch` is that of the last batch.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        tokenizer: Tokenizer,
        sequence_length: int,
        vocab_size: int,
        split: str,
        activity: Activity,
        bad: BadDocuments,
    ) -> None:
        settings: dict[str, Any] = {"split": split, "data.seed": config.seed, "train.sequence_length": sequence_length}
        self.source: Source | None = None
        streams: list[RowStream]
        if not config.has_text:
            # One stream; every process makes only its own rows.
            validation = split == "validation"
            streams = [synthetic_stream(config, vocab_size, sequence_length, validation=validation)]
            settings["model.vocab_size"] = vocab_size
            if config.source != "synthetic":
                settings["data.source"] = config.source
        else:
            if tokenizer.vocab_size > vocab_size:
                raise UserError(
                    f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, the model {vocab_size}: it is that "
                    "of another model"
                )
            self.source, config = make_source(config, activity, split, bad)
            streams = _text_streams(self.source, tokenizer, config, activity, sequence_length, split)
            settings |= {
                _FILES: self.source.fingerprint,
                "data.tokenizer": tokenizer.fingerprint,
                "data.validation_fraction": config.validation_fraction,
                "data.shuffle_documents": config.shuffle_documents,
                "data.shuffle_sequences": config.shuffle_sequences,
                "data.streams": len(streams),
            }
            if config.parsed.kind in ("hf", "fineweb-edu"):
                # Without its own split, validation would be on text that was trained on.
                settings["data.validation_split"] = config.validation_split
        self.config, self._settings = config, settings
        self.name = config.name if self.source is None else self.source.name
        self.fingerprint = "" if self.source is None else self.source.fingerprint
        self.num_streams = len(streams)
        self.streams = dict(enumerate(streams))
        self._start = {index: stream.state() for index, stream in self.streams.items()}
        self._epochs: dict[int, int] = {}
        self.epoch = 0

    def keep(self, indices: Collection[int]) -> None:
        """Keep only these streams."""
        self.streams = {index: self.streams[index] for index in indices}
        self._epochs = dict.fromkeys(indices, self.epoch)

    def add_epochs(self, epochs: dict[int, int]) -> None:
        """Note the epochs of streams at their first rows of a batch."""
        self._epochs |= epochs
        self.epoch = min(self._epochs.values())

    def state(self) -> dict[str, Any]:
        """The position in each stream, with the name of the data, their settings and the epoch."""
        streams = {str(index): stream.state() for index, stream in self.streams.items()}
        return {"source": self.name, "settings": self._settings, "streams": streams, "epoch": self.epoch}

    def describe(self) -> str:
        """The data in words; empty without text."""
        if self.source is None:
            return ""
        number, others = len(self.source.shards), self.source.left_out
        left_out = f"; left out: {others}" if others else ""
        return f"{self.name} (fingerprint {self.fingerprint}): {number:,} file{'s'[: number != 1]}{left_out}"

    def find(self, states: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The state that is of these data: of the same files, which may have moved, or else of the same name."""
        same_files = [state for state in states if state["settings"].get(_FILES, "") == self.fingerprint]
        # Another commit of the hub is another state of the same data.
        name = _COMMIT.sub("", self.name)
        found = same_files or [state for state in states if _COMMIT.sub("", state["source"]) == name]
        return found[0] if found else None

    def check(self, state: dict[str, Any]) -> None:
        """Refuse the state of other settings: UserError."""
        saved = state["settings"]
        pairs = {key: (saved.get(key, ""), value) for key, value in self._settings.items()}
        differ = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        if differ:
            shown = {key: ["none" if value == "" else value for value in pair] for key, pair in differ.items()}
            values = ", ".join(f"{key} {before} -> {now}" for key, (before, now) in shown.items())
            advice = "resume with the saved values"
            if _FILES in differ:
                advice = "bring back the saved files, or begin a new run with --model.from and the folder of this one"
            raise UserError(
                f"the data position belongs to {state['source']}, this run reads {self.name}: {values}; {advice}"
            )
        if missing := [i for i in self.streams if str(i) not in state["streams"]]:
            raise ValueError(f"the state lacks streams {missing}; it must come from merge_states of all processes")

    def seek(self, state: dict[str, Any] | None) -> None:
        """Go to a position that was checked; None: the start."""
        for index, stream in self.streams.items():
            stream.seek(self._start[index] if state is None else state["streams"][str(index)])
        self.epoch = 0 if state is None else state["epoch"]
        # Of streams without a row since then, too: the lowest counts.
        self._epochs = dict.fromkeys(self.streams, self.epoch)


def make_source(config: DataConfig, activity: Activity, split: str, bad: BadDocuments) -> tuple[Source, DataConfig]:
    """Open the documents of a config, and return it too, with the hub's branch replaced by its present commit."""
    kind, path, field = config.parsed
    if kind == "builtin":
        return BuiltinSource(include_site_packages=config.include_site_packages, bad=bad), config
    if kind == "text":
        return TextSource(path, validation_fraction=config.validation_fraction, bad=bad), config
    if kind == "jsonl":
        return JsonlSource(path, field, bad=bad), config
    if kind == "hf" or (kind == "fineweb-edu" and not path):
        source, revision = open_dataset(config, split, activity, bad)
        return source, replace(config, revision=revision)
    return ParquetSource.from_path(config.name, path, field, bad), config


def _text_streams(
    source: Source, tokenizer: Tokenizer, config: DataConfig, activity: Activity, sequence_length: int, split: str
) -> list[RowStream]:
    """The streams that a split's documents are dealt to."""
    # Validation is read by every process, and shared out batch by batch.
    parts = 1 if split == "validation" else config.streams
    streams: list[RowStream] = []
    for part in range(parts):
        documents = DocumentStream(
            source,
            tokenizer,
            longest_chat=sequence_length,
            validation=split == "validation",
            validation_fraction=config.validation_fraction,
            seed=config.seed,
            # Divided, so that the text read before the first batch does not grow with the number of streams.
            block_documents=max(1, config.shuffle_documents // parts),
            activity=activity,
            part=part,
            parts=parts,
        )
        packed = PackedStream(documents, sequence_length)
        streams.append(ShuffledStream(packed, max(1, config.shuffle_sequences // parts), seed=config.seed))
    return streams
