"""The settings of the data, and their valid values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trifocal.fields import check_at_least, check_types

SYNTHETIC = ("synthetic", "recall", "needle")
"""Kinds of source without text: their tokens are drawn."""

SOURCES = (*SYNTHETIC, "builtin", "text", "jsonl", "parquet", "hf", "fineweb-edu")
"""Kinds of source; the part of `DataConfig.source` before the first colon."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of the training text, and how it is read.

    A source that cannot be read is an error: no other source takes its place.
    """

    source: str = "builtin"
    """synthetic (random tokens), recall:PAIRS and needle:COUNT (tasks of random tokens; the number may be left out),
    builtin (text of Python's standard library), text:PATH, jsonl:PATH#field, parquet:PATH#field (file, folder or glob),
    hf:NAME#field or hf:NAME:CONFIG#field (a data set of the Hugging Face hub, or a folder that load_dataset takes),
    fineweb-edu (hf:HuggingFaceFW/fineweb-edu:sample-10BT), fineweb-edu:PATH (a folder of its parquet files). The field
    is text unless given. A field of strings gives texts, a field of lists of messages gives chats."""

    split: str = "train"
    """hf, fineweb-edu: the split to train on."""

    validation_split: str = ""
    """hf, fineweb-edu: the split to validate on; empty: the one named validation, or if there is none,
    validation_fraction of the split to train on."""

    revision: str = "main"
    """hf, fineweb-edu: branch or commit on the hub. A run saves the commit that it found and goes on with it."""

    tokenizer: str = "bytes"
    """bytes; the path of a Hugging Face tokenizer.json, or of its folder; or an id of the hub, such as gpt2 or
    Qwen/Qwen3-0.6B. A run that begins with model.from takes the tokenizer there, unless a flag gives another."""

    separator: str = ""
    """The tokenizer's token that ends a document, such as <|endoftext|>; empty: found by its usual names."""

    seed: int = 1337
    """Orders the documents; each epoch has an order of its own."""

    validation_fraction: float = 0.05
    """Share of documents held out, chosen by a hash of their text alone; of a text file that is cut into several,
    by their place in it. 0 holds out none."""

    shuffle_documents: int = 1024
    """Documents that are shuffled among each other at a time. Files are shuffled, then blocks of this many."""

    shuffle_sequences: int = 1024
    """Rows of sequence_length tokens that are shuffled among each other at a time, so that a batch holds pieces of
    many documents; 1: off. They are read before the first batch, and again by a resumed run, and kept in memory at 8
    bytes a token: rows for half a million to a million tokens mix well and start within seconds."""

    streams: int = 1
    """Streams that the documents are dealt to; rows come from them in turn. Several processes read their own streams
    alone where this is a multiple of their number; otherwise, and with 1, they read each other's too. It decides the
    order of the rows, so it may not change within a run; the number of processes may."""

    on_bad_document: Literal["stop", "skip"] = "stop"
    """The rule for a document without readable text (a null, a missing field, no UTF-8, no JSON), and for a chat that
    is broken or refused by the template: stop the run with a line that names it, or skip it and count it. An empty text
    is passed over. It may change within a run."""

    include_site_packages: bool = False
    """builtin reads the installed packages' Python files too: a few hundred MB on a usual machine."""

    prefetch_batches: int = 4
    """Batches made ahead of the trainer, at most."""

    def __post_init__(self) -> None:
        check_types(self, "data")
        check_at_least(self, "data", seed=0, validation_fraction=0)
        check_at_least(self, "data", shuffle_documents=1, shuffle_sequences=1, streams=1, prefetch_batches=1)
        if self.validation_fraction >= 1:
            raise ValueError(f"data.validation_fraction must be below 1, got {self.validation_fraction}")
