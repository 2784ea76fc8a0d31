"""Batches for the trainer, made ahead in a thread; a saved state repeats them exactly."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trifocal.data.data_config import DataConfig
from trifocal.data.mix import Drawn, SourceDraw, Weights
from trifocal.data.packing import IGNORED, Row
from trifocal.data.prefetch import Activity, Prefetcher
from trifocal.data.reader import SourceReader
from trifocal.data.sources.base import BadDocuments
from trifocal.data.tokenizers import Tokenizer
from trifocal.errors import UserError

POSITION_VERSION = 5
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
        epochs: Complete passes over each source at its first row in the global batch, counted as if rows were not
            shuffled: if a block of shuffled rows spans two epochs, its batches hold rows of both. With several streams,
            the lowest epoch among those that this process reads.
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
    epochs: tuple[int, ...]
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

    @property
    def document_lengths(self) -> list[int]:
        """Tokens of each document, or of each row where `cu_seqlens` is None."""
        num_rows, length = self.rows.shape
        lengths: list[int] = [length] * num_rows if self.cu_seqlens is None else self.cu_seqlens.diff().tolist()
        return lengths


def _log_stall(age_seconds: float, activity: str) -> None:
    _log.warning("data stall: no batch for %.0f s; the data thread is %s", age_seconds, activity)


class Loader(AbstractContextManager["Loader"]):
    """An endless iterator of the batches of a split.

    Rows are numbered; row `n` comes from stream `n % S` of a source; of several, `SourceDraw` says which. A global
    batch is the next `world_size * batch_size` rows; each process gets every `world_size`-th of them. So the global
    batch does not depend on the number of processes, and if that number divides `S`, each process reads only its own
    streams. A thread makes batches ahead; it starts with the first `next` and ends with `close`.

    Args:
        config: Sources and settings.
        tokenizer: From `make_tokenizer`.
        sequence_length: Tokens of a row.
        batch_size: Rows of this process's batches.
        vocab_size: The model's; the range of synthetic tokens, and at least the tokenizer's otherwise.
        split: `train` or `validation`.
        rank: This process, from 0.
        world_size: Number of processes.
        on_stall: Called while a batch is late, with the seconds so far and the activity of the data thread; by default
            a warning is logged. It and the next may be set again before the first batch.
        interrupted: Called while a batch is late: whether to wait no longer.
        local_tokens: Where processes share rows, takes this one's part of tokens [1, B * S], as
            `ContextShard.local_tokens` does. All that share rows have the same `rank`.
        change_row: Number of the first row with `config.weights_after`; may be set again before the next batch.

    Attributes:
        config: The settings, with the hub's branch replaced by its commit: a loader made from them reads the same data
            after the branch has moved.
        name: The data in messages: the source, with its commit on the hub.
        fingerprint: Hash of the files' names and sizes, or of the commit; empty without text.
        first_wait: Seconds that the consumer waited for the first batch; 0 before it.
        bad_documents: Those that this process has skipped so far; some may be in batches that are still to come.

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
        change_row: float = math.inf,
    ) -> None:
        self._activity, self.bad_documents = Activity(), BadDocuments(config.on_bad_document)
        self._readers = [
            SourceReader(
                part,
                tokenizer=tokenizer,
                sequence_length=sequence_length,
                vocab_size=vocab_size,
                split=split,
                activity=self._activity,
                bad=self.bad_documents,
            )
            for part in config.parts
        ]
        revisions = tuple(str(reader.config.revision) for reader in self._readers)
        self.config = replace(config, revision=revisions if len(set(revisions)) > 1 else revisions[0])
        self.name = " + ".join(reader.name for reader in self._readers)
        self.fingerprint = " + ".join(reader.fingerprint for reader in self._readers)
        if self._readers[1:] and len({reader.fingerprint for reader in self._readers}) < len(self._readers):
            raise UserError(f"data.source: two of {config.name} are the same files; give one of them a larger weight")
        self._num_streams = self._readers[0].num_streams
        self._draw: SourceDraw | None = None
        if len(self._readers) > 1:
            self._draw = SourceDraw(self._num_streams, self._weights_at, seed=config.seed)
        common = math.gcd(self._num_streams, world_size)
        # Only the streams with rows of this process.
        own = [index for index in range(self._num_streams) if index % common == rank % common]
        for reader in self._readers:
            reader.keep(own)
        self.change_row = change_row
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self.on_stall, self.interrupted = on_stall, interrupted
        self._local_tokens = local_tokens
        self._prefetcher: Prefetcher[tuple[Batch, dict[str, Any]]] | None = None
        self._next_sample = 0
        self._state = self._describe(0)
        self._closed = False
        self._waits: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self.first_wait = 0.0

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
                on_stall=self.on_stall,
                interrupted=self.interrupted,
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
        """The data in words: sources, fingerprints, numbers of files, and what was left out; empty without text."""
        return " + ".join(filter(None, (reader.describe() for reader in self._readers)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave, of this loader or of another over the same data.

        Of several sources, some may be new, and begin at their start; others may be missing from here on. If weights or
        sources are others, the shares count from here.

        Raises:
            UserError: If the state has none of these sources, or belongs to other settings, files or another version.
        """
        if state.get("version") != POSITION_VERSION:
            raise UserError(
                f"data position of version {state.get('version')}, expected {POSITION_VERSION}: continue with the "
                "version of trifocal that saved the checkpoint, or start a new run"
            )
        saved: list[dict[str, Any]] = state["sources"]
        found = [reader.find(saved) for reader in self._readers]
        if not any(found):
            raise UserError(
                f"the data position belongs to {state['source']}, this run reads {self.name}; name a saved source in "
                "data.source too, with a weight of 0 if it is not to be read, or begin a new run"
            )
        for reader, own in zip(self._readers, found, strict=True):
            if own is not None:
                reader.check(own)
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
            self._activity.stop.clear()
        for reader, own in zip(self._readers, found, strict=True):
            reader.seek(own)
        if self._draw is not None:
            self._draw.seek(_drawn(saved, found))
        self._next_sample = state["sample_index"]
        self._state = dict(state)

    def latency(self) -> tuple[float, float]:
        """Median and 95th percentile of the seconds that the consumer waited for each of the last thousand batches."""
        p50, p95 = np.percentile(list(self._waits) or [0.0], (50, 95))
        return float(p50), float(p95)

    def close(self) -> None:
        """End the thread and close the files. A closed loader gives no batches; its state can still be read."""
        if self._prefetcher is not None:
            # A request to a silent server cannot be broken off.
            self._prefetcher.close(_CLOSING_SECONDS)
            self._prefetcher = None
        for reader in self._readers:
            # Else their files would stay open.
            reader.keep(())
        self._closed = True

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self) -> tuple[Batch, dict[str, Any]]:
        rows: list[Row] = []
        epochs: list[dict[int, int]] = [{} for _ in self._readers]
        first = self._next_sample
        self._next_sample += self._batch_size * self._world_size
        for number in range(first, self._next_sample):
            source = 0 if self._draw is None else self._draw.source(number)
            index, streams = number % self._num_streams, self._readers[source].streams
            if number % self._world_size == self._rank:
                rows.append(streams[index].next_row())
                epochs[source].setdefault(index, rows[-1].epoch)
            elif index in streams:
                epochs[source].setdefault(index, streams[index].skip_row())
        for reader, found in zip(self._readers, epochs, strict=True):
            reader.add_epochs(found)
        sample = first + (self._rank - first) % self._world_size
        passes = tuple(reader.epoch for reader in self._readers)
        return _to_batch(rows, sample, passes, self._local_tokens), self._describe(self._next_sample)

    def _weights_at(self, row: int) -> Weights:
        return self.config.weights_at(changed=row >= self.change_row)

    def _describe(self, sample_index: int) -> dict[str, Any]:
        weights, rows = Drawn() if self._draw is None else self._draw.state(sample_index)
        blank = (0,) * len(self._readers)
        drawn = zip(self._readers, weights or blank, rows or blank, strict=True)
        sources = [reader.state() | {"weight": weight, "rows": number} for reader, weight, number in drawn]
        return {"version": POSITION_VERSION, "sample_index": sample_index, "source": self.name, "sources": sources}


def _drawn(saved: Sequence[dict[str, Any]], found: Sequence[dict[str, Any] | None]) -> Drawn:
    """Rows drawn of each source that is read now; none, so that shares begin anew, if one that was drawn is not."""
    if any(state["weight"] and not any(state is own for own in found) for state in saved):
        return Drawn()
    states: list[dict[str, Any]] = [{"weight": 0.0, "rows": 0} if state is None else state for state in found]
    return Drawn(tuple(state["weight"] for state in states), tuple(state["rows"] for state in states))


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The position of all processes together, from the state of each at the same step."""
    sources = []
    for own in zip(*(state["sources"] for state in states), strict=True):
        streams = {name: place for state in own for name, place in state["streams"].items()}
        ordered = dict(sorted(streams.items(), key=lambda item: int(item[0])))
        sources.append(own[0] | {"streams": ordered, "epoch": min(state["epoch"] for state in own)})
    return states[0] | {"sources": sources}


def _to_batch(
    rows: list[Row], sample_index: int, epochs: tuple[int, ...], local_tokens: Callable[[Tensor], Tensor] | None
) -> Batch:
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
        epochs,
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
    """Rows of the validation split, the same for any seed, shuffling and batch size of the training: `sequences` of
    each source, one source after the other, in batches of the largest size up to `at_once` that divides them.
    """
    size = next(size for size in range(min(sequences, at_once), 0, -1) if sequences % size == 0)
    pool = max(1, min(_VALIDATION_POOL * sequences, _VALIDATION_TOKENS // sequence_length))
    seed, documents = DataConfig.seed, DataConfig.shuffle_documents
    batches: list[Batch] = []
    for part in config.parts:
        with Loader(
            replace(part, seed=seed, shuffle_documents=documents, shuffle_sequences=pool),
            tokenizer=tokenizer,
            sequence_length=sequence_length,
            batch_size=size,
            vocab_size=vocab_size,
            split="validation",
            local_tokens=local_tokens,
        ) as loader:
            batches += [next(loader) for _ in range(sequences // size)]
    return batches
