"""Batches for the trainer, made ahead in a thread; a saved state repeats them exactly."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trifocal.data.data_config import DataConfig
from trifocal.data.packing import IGNORED, PackedStream, Row, RowStream, ShuffledStream
from trifocal.data.prefetch import Activity, Prefetcher
from trifocal.data.sources.base import BadDocuments, Source
from trifocal.data.sources.builtin import BuiltinSource
from trifocal.data.sources.hub import open_dataset
from trifocal.data.sources.parquet import ParquetSource
from trifocal.data.sources.synthetic import synthetic_stream
from trifocal.data.sources.text import JsonlSource, TextSource
from trifocal.data.stream import DocumentStream
from trifocal.data.tokenizers import Tokenizer
from trifocal.errors import UserError

POSITION_VERSION = 4
_LATENCIES_KEPT = 1000
# Held-out rows are drawn from eight times as many, and from half a million tokens at most.
_VALIDATION_POOL, _VALIDATION_TOKENS = 8, 1 << 19
_CLOSING_SECONDS = 1.0

_log = logging.getLogger("trifocal.data")


class Batch(NamedTuple):
    """The input of one forward pass.

    Args:
        tokens: [B, T] int64.
        targets: Next tokens, -100 where the next token is another document's, or no answer of a chat, [B, T] int64.
        cu_seqlens: Boundaries of the documents in the flattened `B * T` tokens (the start of every row is one),
            [docs + 1] int32; None if no row has a boundary inside.
        document_ids: One for each document of `cu_seqlens`, or for each row where that is None.
        sample_index: Global index of the batch's first row, counted over all processes; the next rows of this process
            follow at steps of the number of processes.
        epoch: Complete passes over the source at the global batch's first row, counted as if rows were not shuffled:
            if a block of shuffled rows spans two epochs, its batches hold rows of both. With several streams, the
            lowest epoch among those that this process reads.
        valid_targets: Targets of the rows that are not -100.
        shared_rows: Where processes share rows, tokens of the whole rows, [B, S] int64. `tokens` and `targets` are then
            the process's own, of rows laid end to end, [1, T]; everything else is of the rows, of which each begins a
            document if there are several.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    document_ids: tuple[str, ...]
    sample_index: int
    epoch: int
    valid_targets: int
    shared_rows: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """Tokens of the whole rows, [B, S]."""
        return self.tokens if self.shared_rows is None else self.shared_rows

    @property
    def packed_documents(self) -> int:
        """Documents of `cu_seqlens`; 0 where that is None."""
        return 0 if self.cu_seqlens is None else self.cu_seqlens.numel() - 1


def _log_stall(age_seconds: float, activity: str) -> None:
    _log.warning("data stall: no batch for %.0f s; the data thread is %s", age_seconds, activity)


class Loader:
    """An endless iterator of the batches of a split.

    Rows are numbered; row `n` comes from stream `n % S`. A global batch is the next `world_size * batch_size` rows;
    each process gets every `world_size`-th of them. So the global batch does not depend on the number of processes,
    and if that number divides `S`, each process reads only its own streams. A thread makes batches ahead; it starts
    with the first `next` and ends with `close`.

    Args:
        config: Source and settings.
        tokenizer: From `make_tokenizer`.
        sequence_length: Tokens of a row.
        batch_size: Rows of this process's batches.
        vocab_size: The model's; the range of synthetic tokens, and at least the tokenizer's otherwise.
        split: `train` or `validation`.
        rank: This process, from 0.
        world_size: Number of processes.
        on_stall: Called while a batch is late, with the seconds so far and the activity of the data thread; by default
            a warning is logged.
        interrupted: Called while a batch is late: whether to wait no longer.
        local_tokens: Where processes share rows, takes this one's part of tokens [1, B * S], as
            `ContextShard.local_tokens` does. All that share rows have the same `rank`.

    Attributes:
        config: The settings, with the hub's branch replaced by its commit: a loader made from them reads the same data
            after the branch has moved.
        name: The data in messages: the source, with its commit on the hub.
        fingerprint: Hash of the files' names and sizes, or of the commit; empty without text.
        first_wait: Seconds that the consumer waited for the first batch; 0 before it.

    Raises:
        UserError: If a setting, the source or the tokenizer does not fit.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        tokenizer: Tokenizer,
        sequence_length: int,
        batch_size: int,
        vocab_size: int,
        split: str = "train",
        rank: int = 0,
        world_size: int = 1,
        on_stall: Callable[[float, str], None] = _log_stall,
        interrupted: Callable[[], bool] = lambda: False,
        local_tokens: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._activity = Activity()
        # The settings that decide the rows: a position is valid only for the same ones.
        settings: dict[str, Any] = {"split": split, "data.seed": config.seed, "train.sequence_length": sequence_length}
        self._source: Source | None = None
        streams: list[RowStream]
        if not config.parsed.has_text:
            validation = split == "validation"
            # One stream; every process makes only its own rows.
            streams = [synthetic_stream(config, vocab_size, sequence_length, validation=validation)]
            settings["model.vocab_size"] = vocab_size
            if config.source != "synthetic":
                settings["data.source"] = config.source
        else:
            if tokenizer.vocab_size > vocab_size:
                raise UserError(
                    f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, the model's vocab_size is "
                    f"{vocab_size}; set model.vocab_size to at least {tokenizer.vocab_size}"
                )
            self._source, config = make_source(config, self._activity, split)
            streams = _text_streams(self._source, tokenizer, config, self._activity, sequence_length, split)
            settings |= {
                "the files (names and sizes)": self._source.fingerprint,
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
        self.name = config.source if self._source is None else self._source.name
        self.fingerprint = "" if self._source is None else self._source.fingerprint
        self._num_streams = len(streams)
        common = math.gcd(len(streams), world_size)
        # Only the streams with rows of this process.
        self._streams = {i: stream for i, stream in enumerate(streams) if i % common == rank % common}
        self._epochs: dict[int, int] = {}
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._on_stall, self._interrupted = on_stall, interrupted
        self._local_tokens = local_tokens
        self._prefetcher: Prefetcher[tuple[Batch, dict[str, Any]]] | None = None
        self._next_sample = 0
        self._state = self._describe(0)
        self._closed = False
        self._waits: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self.first_wait = 0.0
        self._no_documents = BadDocuments()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            UserError: If the data are bad, the source gave up, or no batch comes within half an hour.
            Stopped: If the wait was interrupted; see `Loader`.
        """
        if self._closed:
            raise ValueError("the loader is closed; make another to read on")
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(
                self._produce,
                depth=self.config.prefetch_batches,
                activity=self._activity,
                on_stall=self._on_stall,
                interrupted=self._interrupted,
            )
        begin = time.perf_counter()
        batch, state = self._prefetcher.get()
        self._waits.append(time.perf_counter() - begin)
        self.first_wait = self.first_wait or self._waits[0]
        self._state = state
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out, with the settings that decide the rows: JSON types only.

        It does not depend on the number of processes, the batch size or the batches made ahead. With several streams it
        has those of this process; `merge_states` joins the states of all into one that any number of processes can
        load.
        """
        return dict(self._state)

    def describe(self) -> str:
        """The data in words: source, fingerprint, number of files, and what was left out; empty without text."""
        if self._source is None:
            return ""
        number, others = len(self._source.shards), self._source.left_out
        left_out = f"; left out: {others}" if others else ""
        return f"{self.name} (fingerprint {self.fingerprint}): {number:,} file{'s'[: number != 1]}{left_out}"

    @property
    def bad_documents(self) -> BadDocuments:
        """The documents that this process has skipped so far; some may be in batches that are still to come."""
        return self._no_documents if self._source is None else self._source.bad

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave, of this loader or of another over the same data.

        Raises:
            UserError: If the state belongs to other data, other settings or another version.
        """
        if state.get("version") != POSITION_VERSION:
            raise UserError(
                f"data position of version {state.get('version')}, expected {POSITION_VERSION}: continue with the "
                "version of trifocal that saved the checkpoint, or start a new run"
            )
        saved = state["settings"]
        pairs = {key: (saved.get(key, ""), value) for key, value in self._settings.items()}
        differ = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        if differ:
            shown = {key: ["none" if value == "" else value for value in pair] for key, pair in differ.items()}
            values = ", ".join(f"{key} {before} -> {now}" for key, (before, now) in shown.items())
            raise UserError(
                f"the data position belongs to {state['source']}, this run reads {self.name}: {values}; resume with "
                "the saved values"
            )
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
            self._activity.stop.clear()
        positions = state["position"].get("streams", {"0": state["position"]})
        if missing := [i for i in self._streams if str(i) not in positions]:
            raise ValueError(f"the state lacks streams {missing}; it must come from merge_states of all processes")
        for index, stream in self._streams.items():
            stream.seek(positions[str(index)])
        self._epochs = {}
        self._next_sample = state["sample_index"]
        self._state = dict(state)

    def latency(self) -> tuple[float, float]:
        """Median and 95th percentile of the seconds that the consumer waited for each of the last thousand batches."""
        p50, p95 = np.percentile(list(self._waits) or [0.0], (50, 95))
        return float(p50), float(p95)

    def close(self) -> None:
        """End the thread. A closed loader gives no batches; its state can still be read."""
        if self._prefetcher is not None:
            # A request to a silent server cannot be broken off.
            self._prefetcher.close(_CLOSING_SECONDS)
            self._prefetcher = None
        self._closed = True

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self) -> tuple[Batch, dict[str, Any]]:
        rows: list[Row] = []
        epochs: dict[int, int] = {}
        first = self._next_sample
        self._next_sample += self._batch_size * self._world_size
        for number in range(first, self._next_sample):
            index = number % self._num_streams
            if number % self._world_size == self._rank:
                rows.append(self._streams[index].next_row())
                epochs.setdefault(index, rows[-1].epoch)
            elif index in self._streams:
                epochs.setdefault(index, self._streams[index].skip_row())
        self._epochs |= epochs
        sample = first + (self._rank - first) % self._world_size
        batch = _to_batch(rows, sample, min(self._epochs.values()), self._local_tokens)
        return batch, self._describe(self._next_sample)

    def _describe(self, sample_index: int) -> dict[str, Any]:
        return {
            "version": POSITION_VERSION,
            "source": self.name,
            "settings": self._settings,
            "sample_index": sample_index,
            "position": self._streams[0].state()
            if self._num_streams == 1
            else {"streams": {str(index): stream.state() for index, stream in self._streams.items()}},
        }


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The position of all processes together, from the state of each at the same step."""
    merged = dict(states[0])
    if "streams" in merged["position"]:
        found = {name: place for state in states for name, place in state["position"]["streams"].items()}
        merged["position"] = {"streams": dict(sorted(found.items(), key=lambda item: int(item[0])))}
    return merged


def _to_batch(rows: list[Row], sample_index: int, epoch: int, local_tokens: Callable[[Tensor], Tensor] | None) -> Batch:
    length = len(rows[0].tokens)
    cu_seqlens = None
    if any(len(row.starts) > 1 for row in rows) or (local_tokens is not None and len(rows) > 1):
        starts = [number * length + start for number, row in enumerate(rows) for start in row.starts]
        cu_seqlens = torch.tensor([*starts, len(rows) * length], dtype=torch.int32)
    tokens, targets = (
        torch.from_numpy(np.stack(parts, dtype=np.int64))
        for parts in ([row.tokens for row in rows], [row.targets for row in rows])
    )
    return Batch(
        tokens if local_tokens is None else local_tokens(tokens.view(1, -1)),
        targets if local_tokens is None else local_tokens(targets.view(1, -1)),
        cu_seqlens,
        tuple(name for row in rows for name in row.document_ids),
        sample_index,
        epoch,
        int((targets != IGNORED).sum()),
        None if local_tokens is None else tokens,
    )


def read_validation(
    config: DataConfig,
    *,
    tokenizer: Tokenizer,
    sequence_length: int,
    sequences: int,
    at_once: int,
    vocab_size: int,
    local_tokens: Callable[[Tensor], Tensor] | None = None,
) -> list[Batch]:
    """Read rows of the validation split, the same ones for any seed, shuffling and batch size of the training.

    Args:
        config, tokenizer, sequence_length, vocab_size, local_tokens: See `Loader`.
        sequences: Rows in all.
        at_once: Rows of a batch, at most: the largest number up to it that divides `sequences`.

    Raises:
        UserError: If the split is empty, or cannot be read.
    """
    size = next(size for size in range(min(sequences, at_once), 0, -1) if sequences % size == 0)
    order = DataConfig(
        shuffle_sequences=max(1, min(_VALIDATION_POOL * sequences, _VALIDATION_TOKENS // sequence_length))
    )
    fixed = {name: getattr(order, name) for name in ("seed", "shuffle_documents", "shuffle_sequences")}
    with Loader(
        replace(config, **fixed),
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        batch_size=size,
        vocab_size=vocab_size,
        split="validation",
        local_tokens=local_tokens,
    ) as loader:
        return [next(loader) for _ in range(sequences // size)]


def make_source(config: DataConfig, activity: Activity, split: str) -> tuple[Source, DataConfig]:
    """Open the source of documents that a config names, except the synthetic ones, for `train` or `validation`; and the
    config with the hub's branch replaced by its present commit. UserError if its data are missing or empty.
    """
    kind, path, field = config.parsed
    bad = BadDocuments(config.on_bad_document)
    if kind == "builtin":
        return BuiltinSource(include_site_packages=config.include_site_packages, bad=bad), config
    if kind == "text":
        return TextSource(path, validation_fraction=config.validation_fraction, bad=bad), config
    if kind == "jsonl":
        return JsonlSource(path, field, bad=bad), config
    if kind == "hf" or (kind == "fineweb-edu" and not path):
        source, revision = open_dataset(config, split, activity, bad)
        return source, replace(config, revision=revision)
    return ParquetSource.from_path(config.source, path, field, bad), config


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
