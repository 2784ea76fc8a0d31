"""The settings of the data, and the parts of a source string."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from trifocal.errors import UserError, nearest
from trifocal.fields import check_at_least, check_types
from trifocal.paths import check_path_text, user_path

SYNTHETIC = ("synthetic", "recall", "needle")
"""Kinds of source without text: their tokens are drawn."""

SOURCES = (*SYNTHETIC, "builtin", "text", "jsonl", "parquet", "hf", "fineweb-edu")
"""Kinds of source; the part of `DataConfig.source` before the first colon."""
COMMIT = "[0-9a-f]{40}"
"""Pattern of a commit of the hub."""
_WITH_FIELD = ("jsonl", "parquet", "hf", "fineweb-edu")


class SourceName(NamedTuple):
    """The parts of a source string `kind:path#field`."""

    kind: str
    path: str
    field: str

    @property
    def has_text(self) -> bool:
        """Whether it gives text; the tokens of the others are drawn."""
        return self.kind not in SYNTHETIC

    @property
    def is_local(self) -> bool:
        """Whether it can be read without a network."""
        if self.kind == "hf":
            return dataset_name(self.path)[0].is_dir()
        return self.kind != "fineweb-edu" or bool(self.path)


def parse_source(source: str) -> SourceName:
    """Split a source string, like `text:book.txt`, `parquet:folder#text` or `hf:owner/name:config#messages`, into its
    parts; UserError if there is no such kind, it lacks its path, or takes none; if it is a URL. The path is the number
    of `recall` and `needle`, name and configuration of `hf`; the field is `text` where none is given.
    """
    kind, _, rest = source.partition(":")
    check_path_text(source, "data.source")
    if "://" in source:
        # Not repeated in the message: it may hold a password.
        raise UserError(
            "data.source is an address with ://; expected local files or hf:OWNER/NAME: download the files first, and "
            "give a login in the environment (HF_TOKEN), not in the address"
        )
    if kind not in SOURCES:
        hint = f"the nearest is {nearest(kind, SOURCES)}"
        if user_path(source, "data.source").exists() or "/" in kind or Path(kind).suffix:
            hint = f"for this path write {_kind_of_path(source)}:{source}"
        raise UserError(f"unknown data.source {source!r}; {hint} (known: {', '.join(SOURCES)})")
    path, field = rest, "text"
    # A name may have a # in it.
    if kind in _WITH_FIELD and "#" in rest and not user_path(rest, "data.source").exists():
        path, _, field = rest.rpartition("#")
    if kind in ("text", "jsonl", "parquet", "hf") and not path:
        raise UserError(f"data.source {source!r} lacks its path; write {kind}:{'NAME' if kind == 'hf' else 'PATH'}")
    if kind in ("synthetic", "builtin") and path:
        raise UserError(f"data.source {source!r}: {kind} takes no path; write {kind}, or text:{path} to read it")
    if kind in ("recall", "needle") and path and not (path.isdecimal() and len(path) < 10 and int(path)):
        raise UserError(f"data.source {source!r}: {kind} takes a whole number above 0, such as {kind}:8")
    if not field:
        raise UserError(f"data.source {source!r} has an empty field after #; write #text, for instance")
    return SourceName(kind, path, field)


def dataset_name(path: str) -> tuple[Path, str]:
    """Name and configuration of an `hf` source, `NAME` or `NAME:CONFIG`; the name is a folder's path, which may have a
    colon, or the hub's `OWNER/NAME`.
    """
    whole = user_path(path, "data.source")
    name, _, config = path.rpartition(":")
    return (whole, "") if not name or whole.is_dir() else (user_path(name, "data.source"), config)


def _kind_of_path(path: str) -> str:
    name = path.removesuffix(".gz")
    return {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(Path(name).suffix, "text")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of the training text, and how it is read.

    A source that cannot be read is an error: no other source takes its place.
    """

    source: str | tuple[str, ...] = "builtin"
    """synthetic (random tokens), recall:PAIRS and needle:COUNT (tasks of random tokens; the number may be left out),
    builtin (text of Python's standard library), text:PATH, jsonl:PATH#field, parquet:PATH#field (file, folder or glob),
    hf:NAME#field or hf:NAME:CONFIG#field (a data set of the Hugging Face hub, or a folder that load_dataset takes),
    fineweb-edu (hf:HuggingFaceFW/fineweb-edu:sample-10BT), fineweb-edu:PATH (a folder of its parquet files). The field
    is text unless given; in JSON lines it may be nested, like a.text. A field of strings gives texts, a field of lists
    of messages gives chats. Several sources of text are mixed, by weights."""

    weights: tuple[float, ...] = ()
    """With several sources: each one's share of the tokens, in any unit, like 3, 1; empty: equal shares. A source of
    weight 0 is only evaluated."""

    weights_after: tuple[float, ...] = ()
    """With several sources: the weights after change_step steps; empty: they do not change."""

    change_step: int = 0
    """The last step with weights, before weights_after; 0: the last one before "wsd" lowers the learning rate."""

    split: str | tuple[str, ...] = "train"
    """hf, fineweb-edu: the split to train on; with several sources one for all, or one each, as are the next two."""

    validation_split: str | tuple[str, ...] = ""
    """hf, fineweb-edu: the split to validate on; empty: the one named validation, or if there is none,
    validation_fraction of the split to train on."""

    revision: str | tuple[str, ...] = "main"
    """hf, fineweb-edu: branch or commit on the hub. A run saves the commit that it found and continues with it."""

    tokenizer: str = "bytes"
    """bytes; the path of a Hugging Face tokenizer.json, or of its folder; or an id of the hub, such as gpt2 or
    Qwen/Qwen3-0.6B. A run that begins with model.from takes the tokenizer there, unless a flag gives another."""

    separator: str = ""
    """The tokenizer's token that ends a document, such as <|endoftext|>; empty: found by its usual names."""

    seed: int = 1337
    """Orders the documents; each epoch has its own order."""

    validation_fraction: float = 0.05
    """Share of documents held out, chosen only by a hash of their text; of a text file that is cut into several,
    by their place in it. 0 holds out none."""

    shuffle_documents: int = 1024
    """Documents that are shuffled among each other at a time. Files are shuffled, then blocks of this many."""

    shuffle_sequences: int = 1024
    """Rows of sequence_length tokens that are shuffled among each other at a time, so that a batch holds pieces of
    many documents; 1: off. They are read before the first batch, and again by a resumed run, and kept in memory at 8
    bytes a token: rows for half a million to a million tokens mix well and start within seconds."""

    streams: int = 1
    """Streams that the documents are dealt to; rows come from them in turn. Several processes read only
    their own streams where this is a multiple of their number; otherwise, and with 1, they read each other's too. It
    decides the order of the rows, so it may not change within a run; the number of processes may."""

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
        # A source that is no such string is refused where the config is read.
        names = [part.parsed for part in self.parts]
        if not names:
            raise ValueError("data.source is an empty list; name a source")
        if len(names) == 1:
            for key in ("weights", "weights_after", "change_step"):
                if getattr(self, key):
                    raise ValueError(f"data.{key} needs several sources, data.source is {self.source!r}")
            return
        if repeated := [source for source in self.sources if self.sources.count(source) > 1]:
            raise ValueError(f"data.source names {repeated[0]!r} more than once; give it a larger weight")
        if drawn := [source for source, name in zip(self.sources, names, strict=True) if not name.has_text]:
            raise ValueError(f"data.source {drawn[0]!r} has no text; only sources of text can be mixed")
        for key in ("weights", "weights_after"):
            weights = getattr(self, key)
            if len(weights) not in (0, len(names)):
                raise ValueError(f"data.{key} has {len(weights)} numbers, data.source {len(names)} sources")
            if min(weights, default=0) < 0 or (weights and not any(weights)):
                raise ValueError(f"data.{key} must not be negative, nor all 0, got {', '.join(map(str, weights))}")
        if self.change_step < 0 or (self.change_step and not self.weights_after):
            raise ValueError(f"data.change_step {self.change_step} needs data.weights_after, and may not be negative")

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:
        """The strings of all sources."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @functools.cached_property
    def parts(self) -> tuple[DataConfig, ...]:
        """The settings of each source; of one source, these settings."""
        number, own = len(self.sources), {"source": self.sources}
        for key in ("split", "validation_split", "revision"):
            value = getattr(self, key)
            own[key] = (value,) * number if isinstance(value, str) else value
            if len(own[key]) != number:
                raise ValueError(f"data.{key} has {len(own[key])} values, data.source {number}; give one, or as many")
        if isinstance(self.source, str):
            return (self,)
        return tuple(
            replace(self, weights=(), weights_after=(), change_step=0, **dict(zip(own, values, strict=True)))
            for values in zip(*own.values(), strict=True)
        )

    @functools.cached_property
    def parsed(self) -> SourceName:
        """The parts of the only source."""
        if not isinstance(self.source, str):
            raise ValueError(f"{self.name} are several sources; each of `parts` has one")
        return parse_source(self.source)

    @property
    def name(self) -> str:
        """The sources in messages."""
        return " + ".join(self.sources)

    @property
    def has_text(self) -> bool:
        """Whether the sources give text; the tokens of others are drawn."""
        return all(part.parsed.has_text for part in self.parts)

    @property
    def is_local(self) -> bool:
        """Whether all sources can be read without a network."""
        return all(part.parsed.is_local for part in self.parts)

    def weights_at(self, *, changed: bool) -> tuple[float, ...]:
        """The weights of all sources, before or after the change."""
        return (self.weights_after if changed else ()) or self.weights or (1.0,) * len(self.sources)

    def only(self, source: str) -> DataConfig:
        """The settings with only this source, one of these or another."""
        found = [part for part in self.parts if part.source == source]
        return found[0] if found else replace(self.parts[0], source=source, revision=self.revisions_of([source]))

    def revisions_of(self, sources: Sequence[str]) -> str | tuple[str, ...]:
        """The revisions of these sources or others: a commit, as a run saves it, is only of its own data set."""
        known = {part.parsed[:2]: str(part.revision) for part in self.parts}
        first = str(self.parts[0].revision)
        default = str(DataConfig.revision) if re.fullmatch(COMMIT, first) else first
        found = tuple(known.get(parse_source(source)[:2], default) for source in sources)
        return found[0] if len(set(found)) == 1 else found
