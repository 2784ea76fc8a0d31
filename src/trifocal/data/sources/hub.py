"""Data sets of the Hugging Face hub and their local copies: `datasets` finds the files and opens those on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trifocal.data.activity import Activity
from trifocal.data.data_config import DataConfig
from trifocal.data.sources.base import (
    BadDocument,
    BadDocuments,
    Cursor,
    Document,
    Source,
    dataset_name,
    fingerprint,
    make_document,
    no_field,
    parse_source,
)
from trifocal.data.sources.local_files import content_hash, sizes
from trifocal.data.sources.parquet import ParquetSource
from trifocal.errors import UserError, nearest, one_line

_FINEWEB = "HuggingFaceFW/fineweb-edu:sample-10BT"
_FILE_OF_HUB = re.compile(r"hf://datasets/(?P<repository>[^@]+)@(?P<revision>[^/]+)/(?P<path>.+)")


def open_dataset(config: DataConfig, split: str, activity: Activity, bad: BadDocuments) -> tuple[Source, str]:
    """The files of a data set's configuration and split, as one source.

    `datasets` lists the files and pins the revision. Parquet files are then read by ranges: only the field's column, a
    row group at a time, so that a resumed run starts at its position. `datasets` streams files of other formats; a
    resumed run reads the present one again from its start.

    Args:
        config: Its source is `hf:NAME`, `hf:NAME:CONFIG` or `fineweb-edu`.
        split: `train` or `validation`. Where the data set has no split for validation, both read the one for training.
        activity: The loader's.
        bad: The rule for bad documents.

    Returns:
        The source, and the commit of its files; for a local folder, which has none, the config's revision.

    Raises:
        UserError: If there is no such data set, configuration or split, or the hub is switched off or does not answer.
    """
    _, path, field = parse_source(config.source)
    folder, name = dataset_name(path or _FINEWEB)
    repository = str(folder)
    asked = f"hf:{repository}" + (f":{name}" if name else "")
    if repository.startswith(("/", ".")) and not folder.is_dir():
        raise UserError(f"data.source {config.source}: no such folder: {repository}")
    activity.text = f"asking for the files of {repository}"
    builder = _find_files(config, asked, repository, name)
    splits = {str(key): list(files) for key, files in (builder.config.data_files or {}).items()}
    validation = config.validation_split
    if validation == config.split:
        raise UserError(f"data.split and data.validation_split are both {validation!r}; validate on other data")
    if not validation and config.split != "validation" in splits:
        validation = "validation"
    for key, wanted in (("split", config.split), ("validation_split", validation or config.split)):
        if wanted not in splits:
            raise UserError(
                f"data.{key} {wanted!r} is not in {asked}; the nearest is {nearest(wanted, splits)} "
                f"(it has {', '.join(splits)})"
                if splits
                else f"{asked}: its files are not listed, so it cannot be streamed; give the folder of its files"
            )
    if split == "validation" and not validation and not config.validation_fraction:
        raise UserError(
            f"{asked} has no split named validation; name one of {', '.join(splits)} in data.validation_split, or set "
            "data.validation_fraction above 0"
        )
    held_out = split == "validation" if validation else None
    wanted = validation if held_out else config.split
    files, revision = _locate(splits[wanted], repository)
    local = {key: path for key, path in files.items() if isinstance(path, Path)}
    # A revision fixes the content of its files; for local files the sizes stand in.
    mark = fingerprint("hub", repository, revision, list(files), sizes(local), field)
    source_name = asked + (f"@{revision}" if revision else "")
    others = [key for key in files if not key.endswith(".parquet")]
    if others and len(others) < len(files):
        raise UserError(f"{asked}: {others[0]} is no parquet file, as the others are; move it elsewhere")
    if not others:
        return ParquetSource(source_name, files, field, mark, bad, held_out, _open_address), revision or config.revision
    try:
        dataset = builder.as_streaming_dataset(split=wanted)
    except Exception as error:  # A format's own, such as a folder without the files that it looks for.
        raise _explain(error, asked, repository, name) from error
    return StreamedSource(source_name, dataset, files, field, mark, bad, held_out), revision or config.revision


class StreamedSource:
    """A field of a data set that `datasets` streams; a file is a shard, a record a document.

    Args:
        name: The source in messages.
        dataset: A `datasets.IterableDataset`.
        files: Path or address of each of its files by name, in its order.
        field: The field of the text, or of the list of messages of a chat.
        fingerprint: Hash of the files' names and sizes.
        bad: The rule for records without text.
        held_out: `Document.held_out` of all records.

    Raises:
        UserError: If `datasets` does not read file by file, as it does not with folders of images or sounds.
    """

    def __init__(
        self,
        name: str,
        dataset: Any,
        files: dict[str, Path | str],
        field: str,
        fingerprint: str,
        bad: BadDocuments,
        held_out: bool | None,
    ) -> None:
        self.name, self.bad = name, bad
        self.shards = list(files)
        self.fingerprint = fingerprint
        self._dataset, self._paths = dataset, list(files.values())
        self._field, self._held_out = field, held_out
        if dataset.num_shards != len(files):
            raise UserError(
                f"{name} has {len(files)} files, but datasets reads them as {dataset.num_shards}; only files of text "
                "can be streamed"
            )

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """The documents of a file; a cursor is the number of records before it, which are read again and skipped.

        Raises:
            UserError: If the file cannot be read, lacks the field, or a record is bad and stops the run.
        """
        (row,) = cursor or (0,)
        name = self.shards[shard]
        for record in self._records(shard, row):
            row += 1
            if self._field not in record:
                raise UserError(f"{self.name} ({name}): {no_field(self._field, record)}")
            value = record[self._field]
            if value == "":
                continue
            try:
                document = make_document(f"{name}#{row - 1}", value, self._held_out)
            except BadDocument as error:
                self.bad.found(f"{self.name} ({name}): record {row - 1}: field {self._field!r} {error}")
            else:
                yield document, (row,)

    def content_hashes(self) -> list[str]:
        """`content_hash` of each file; empty for files on the hub."""
        local = [path for path in self._paths if isinstance(path, Path)]
        return [content_hash(path) for path in local] if len(local) == len(self._paths) else []

    def _records(self, shard: int, skipped: int) -> Iterator[dict[str, Any]]:
        part = self._dataset.shard(num_shards=len(self.shards), index=shard)
        try:
            yield from part.skip(skipped) if skipped else part
        except Exception as error:  # The libraries raise many kinds of errors, one for each format.
            raise UserError(f"{self.name} ({self.shards[shard]}) cannot be read: {one_line(error)}") from error


def _find_files(config: DataConfig, asked: str, repository: str, name: str) -> Any:
    """The builder of `datasets`, which knows the files; nothing of them is read."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.source {config.source} needs an extra: pip install 'trifocal[data]'") from None
    revision = None if Path(repository).is_dir() else config.revision
    try:
        return datasets.load_dataset_builder(repository, name=name or None, revision=revision)
    except Exception as error:  # The libraries raise many kinds of errors, those of the HTTP client too.
        raise _explain(error, asked, repository, name) from error


def _open_address(address: str) -> Any:
    """A file on the hub. `huggingface_hub` and `datasets` repeat requests that fail, some for minutes."""
    from datasets.utils.file_utils import xopen

    return xopen(address, "rb")


def _locate(found: list[str], repository: str) -> tuple[dict[str, Path | str], str]:
    """Path or address of each file by its name in the repository, and the commit of the hub."""
    files: dict[str, Path | str] = {}
    revision = ""
    for file in found:
        if match := _FILE_OF_HUB.fullmatch(file):
            revision = match["revision"]
            files[match["path"]] = file
        else:
            files[Path(file).absolute().relative_to(Path(repository).absolute()).as_posix()] = Path(file)
    return files, revision


def _explain(error: Exception, asked: str, repository: str, name: str) -> UserError:
    """The error for a failure to find the files."""
    import datasets
    import huggingface_hub

    reason = one_line(error)
    if match := re.fullmatch(r"BuilderConfig '.*' not found\. Available: \[(.*)\]", str(error)):
        names = re.findall(r"'([^']*)'", match[1])
        return UserError(f"{asked}: the configuration {name!r} is not there; the nearest is {nearest(name, names)}")
    local = Path(repository).is_dir()
    if not local and (huggingface_hub.constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE):
        return UserError(
            f"{asked}: the hub is switched off (HF_HUB_OFFLINE is set); unset it, or read a local folder with "
            f"hf:PATH ({reason})"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    login = "; log in with hf auth login, or set HF_TOKEN" if status in (401, 403) or "gated" in reason else ""
    return UserError(f"{asked} cannot be opened: {reason}{login}")
