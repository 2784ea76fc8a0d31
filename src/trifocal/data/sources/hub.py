"""Data sets of the Hugging Face hub and their local copies: `datasets` finds the files and opens those on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trifocal.data.data_config import DataConfig, dataset_name
from trifocal.data.prefetch import Activity
from trifocal.data.sources.base import BadDocuments, Source, fingerprint
from trifocal.data.sources.local_files import sizes
from trifocal.data.sources.parquet import ParquetSource
from trifocal.errors import UserError, nearest, one_line

_FINEWEB = "HuggingFaceFW/fineweb-edu:sample-10BT"
_FILE_OF_HUB = re.compile(r"hf://datasets/(?P<repository>[^@]+)@(?P<revision>[^/]+)/(?P<path>.+)")


def open_dataset(config: DataConfig, split: str, activity: Activity, bad: BadDocuments) -> tuple[Source, str]:
    """The parquet files of a data set's configuration and split as one source, and their commit, or for a local folder
    the config's revision. `datasets` lists the files; without a split for validation, both read that for training.
    """
    _, path, field = config.parsed
    # Settings of one source, as `DataConfig.parts` has them.
    assert isinstance(config.split, str)
    assert isinstance(config.validation_split, str)
    assert isinstance(config.revision, str)
    folder, name = dataset_name(path or _FINEWEB)
    repository = str(folder)
    asked = f"hf:{repository}" + (f":{name}" if name else "")
    # A path drops the "./" that the user wrote.
    if (folder.is_absolute() or path.startswith(".")) and not folder.is_dir():
        raise UserError(f"data.source {config.source}: no such folder: {repository}")
    activity.text = f"asking for the files of {repository}"
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.source {config.source} needs an extra: pip install 'trifocal[data]'") from None
    revision = None if folder.is_dir() else config.revision
    try:
        builder: Any = datasets.load_dataset_builder(repository, name=name or None, revision=revision)
    except Exception as error:  # The libraries raise many kinds of errors, those of the HTTP client too.
        other = "; --data.source builtin needs no network" if isinstance(error, ConnectionError) else ""
        raise UserError(f"{asked} cannot be opened: {one_line(error)}{other}") from error
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
                else f"{asked}: its files are not listed; give the folder of its files"
            )
    if split == "validation" and not validation and not config.validation_fraction:
        raise UserError(
            f"{asked} has no split named validation; name one of {', '.join(splits)} in data.validation_split, or set "
            "data.validation_fraction above 0"
        )
    held_out = split == "validation" if validation else None
    wanted = validation if held_out else config.split
    files, commit = _locate(splits[wanted], repository)
    # A revision fixes the content of its files; for those of a folder, which may move, the sizes stand in. Those of the
    # split for validation count too: without one, some of the documents to train on are held out.
    both = _locate(splits[validation] if validation else [], repository)[0] | files
    local = {key: path for key, path in both.items() if isinstance(path, Path)}
    mark = fingerprint("hub", commit and repository, commit, list(files), sizes(local), field)
    source_name = asked + (f"@{commit}" if commit else "")
    if others := [key for key in files if not key.endswith(".parquet")]:
        raise UserError(
            f"{asked}: {others[0]} is no parquet file; read the hub's parquet copy of it with --data.revision "
            "refs/convert/parquet, or local files with jsonl:PATH or text:PATH"
        )
    source = ParquetSource(source_name, files, field, mark, bad, held_out)
    return source, commit or config.revision


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
