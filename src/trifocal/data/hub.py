"""Data sets of the Hugging Face hub and their local copies: `datasets` finds the files; parquet is read by ranges."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from trifocal.data.activity import Activity, DataError
from trifocal.data.data_config import DataConfig
from trifocal.data.local_files import sizes
from trifocal.data.parquet import ParquetSource
from trifocal.data.remote import HttpClient
from trifocal.data.sources import BadDocuments, Source, dataset_name, fingerprint, parse_source
from trifocal.data.streamed import StreamedSource
from trifocal.errors import UserError, nearest, one_line

_FINEWEB = "HuggingFaceFW/fineweb-edu:sample-10BT"
_FILE_OF_HUB = re.compile(r"hf://datasets/(?P<repository>[^@]+)@(?P<revision>[^/]+)/(?P<path>.+)")

_log = logging.getLogger("trifocal.data")


def open_dataset(config: DataConfig, split: str, activity: Activity, bad: BadDocuments) -> tuple[Source, str]:
    """The files of a data set's configuration and split, as one source.

    `datasets` lists the files and pins the revision. Parquet files are then read by ranges, as any on a server: only
    the field's column, a row group at a time, so that a resumed run starts at its position. `datasets` streams files of
    other formats; a resumed run reads the present one again from its start.

    Args:
        config: Its source is `hf:NAME`, `hf:NAME:CONFIG` or `fineweb-edu`.
        split: `train` or `validation`. Where the data set has no split for validation, both read the one for training.
        activity: The loader's.
        bad: The rule for bad documents.

    Returns:
        The source, and the commit of its files; for a local folder, which has none, the config's revision.

    Raises:
        UserError: If there is no such data set, configuration or split, or the hub is switched off.
        DataError: If the hub does not answer.
    """
    _, path, field = parse_source(config.source)
    folder, name = dataset_name(path or _FINEWEB)
    repository = str(folder)
    asked = f"hf:{repository}" + (f":{name}" if name else "")
    if repository.startswith(("/", ".")) and not folder.is_dir():
        raise UserError(f"data.source {config.source}: no such folder: {repository}")
    builder = _find_files(config, asked, repository, name, activity)
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
    common: dict[str, Any] = {"bad": bad, "held_out": held_out}
    others = [key for key in files if not key.endswith(".parquet")]
    if others and len(others) < len(files):
        raise UserError(f"{asked}: {others[0]} is no parquet file, as the others are; move it elsewhere")
    if not others:
        import huggingface_hub

        token = None if local else huggingface_hub.get_token()
        client = HttpClient(config, activity, {} if token is None else {"Authorization": f"Bearer {token}"})
        return ParquetSource(source_name, files, field, mark, client, **common), revision or config.revision
    try:
        dataset = builder.as_streaming_dataset(split=wanted)
    except Exception as error:  # A format's own, such as a folder without the files that it looks for.
        raise _explain(error, asked, repository, name) from error
    return StreamedSource(source_name, dataset, files, field, mark, **common), revision or config.revision


def _find_files(config: DataConfig, asked: str, repository: str, name: str, activity: Activity) -> Any:
    """The builder of `datasets`, which knows the files; nothing of them is read."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.source {config.source} needs an extra: pip install 'trifocal[data]'") from None

    local = Path(repository).is_dir()
    activity.text = f"asking the hub for the files of {repository}"
    for attempt in range(1, config.retry_attempts + 1):
        try:
            return datasets.load_dataset_builder(
                repository, name=name or None, revision=None if local else config.revision
            )
        except Exception as error:  # The libraries raise many kinds of errors, those of the HTTP client too.
            failure = _explain(error, asked, repository, name)
            if attempt == config.retry_attempts or not isinstance(failure, DataError):
                raise failure from error
            # `datasets` asks once. The hub's own client repeats only the requests for the files' content.
            pause = min(config.retry_base_seconds * 2.0 ** (attempt - 1), config.retry_max_seconds)
            _log.warning("data: %s; attempt %d of %d follows", failure, attempt + 1, config.retry_attempts)
            activity.pause(pause)
    raise AssertionError("the last attempt returns or raises")


def _locate(found: list[str], repository: str) -> tuple[dict[str, Path | str], str]:
    """Path or URL of each file by its name in the repository, and the commit of the hub."""
    files: dict[str, Path | str] = {}
    revision = ""
    for file in found:
        match = _FILE_OF_HUB.fullmatch(file)
        if match is None:
            files[Path(file).absolute().relative_to(Path(repository).absolute()).as_posix()] = Path(file)
        else:
            import huggingface_hub

            revision = match["revision"]
            files[match["path"]] = huggingface_hub.hf_hub_url(
                match["repository"], match["path"], repo_type="dataset", revision=revision
            )
    return files, revision


def _explain(error: Exception, asked: str, repository: str, name: str) -> UserError:
    """The error for a failure to find the files: a `DataError` if it may pass, a `UserError` otherwise."""
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
    # If every request failed, `datasets` reports a missing file, with the hub's error in its text.
    unreachable = isinstance(error, ConnectionError | TimeoutError) or "LocalEntryNotFoundError" in str(error)
    if unreachable or (status is not None and (status == 429 or status >= 500)):
        return DataError(f"{asked}: the hub cannot be reached (a copy on disk is read with hf:PATH): {reason}")
    login = "; log in with hf auth login, or set HF_TOKEN" if status in (401, 403) or "gated" in reason else ""
    return UserError(f"{asked} cannot be opened: {reason}{login}")
