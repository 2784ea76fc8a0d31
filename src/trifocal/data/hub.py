"""FineWeb-Edu: `datasets` finds the parquet files on the hub, `HttpFile` reads them by ranges."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from trifocal.data.activity import Activity, DataError
from trifocal.data.data_config import DataConfig
from trifocal.data.local_files import sizes
from trifocal.data.messages import one_line
from trifocal.data.parquet import ParquetSource
from trifocal.data.remote import HttpClient
from trifocal.data.sources import BadDocuments, fingerprint
from trifocal.errors import UserError, nearest
from trifocal.paths import user_path

_log = logging.getLogger("trifocal.data")


def open_fineweb(config: DataConfig, field: str, activity: Activity, bad: BadDocuments) -> tuple[ParquetSource, str]:
    """The files of a hub repository's configuration and split, as one source.

    `datasets` lists the files and pins the revision. They are then read by ranges, as any parquet file on a server:
    only the text's column, a row group at a time, so that a resumed run starts at its position.

    Args:
        config: Names repository, configuration, split and revision.
        field: The text's column.
        activity: The loader's.
        bad: The rule for bad documents.

    Returns:
        The source, and the commit of its files; for a local copy, which has none, the config's revision.

    Raises:
        UserError: If the hub has no such data, or is switched off.
        DataError: If it does not answer.
    """
    repository = str(user_path(config.fineweb_repository, "data.fineweb_repository"))
    try:
        import datasets
        import huggingface_hub
    except ImportError:
        raise UserError("data.source fineweb-edu needs an extra: pip install 'trifocal[data]'") from None

    activity.text = f"asking the hub for the files of {repository}"
    for attempt in range(1, config.retry_attempts + 1):
        try:
            builder = datasets.load_dataset_builder(
                repository,
                name=config.fineweb_name or None,
                revision=None if Path(repository).is_dir() else config.fineweb_revision,
            )
            break
        except Exception as error:  # The libraries raise many kinds of errors, those of the HTTP client too.
            failure = _explain(error, config)
            if attempt == config.retry_attempts or not isinstance(failure, DataError):
                raise failure from error
            # `datasets` asks once. The hub's own client repeats only the requests for the files' content.
            pause = min(config.retry_base_seconds * 2.0 ** (attempt - 1), config.retry_max_seconds)
            _log.warning("data: %s; attempt %d of %d follows", failure, attempt + 1, config.retry_attempts)
            activity.pause(pause)
    splits = {str(split): list(files) for split, files in (builder.config.data_files or {}).items()}
    if config.fineweb_split not in splits:
        raise UserError(
            f"data.fineweb_split {config.fineweb_split!r} is not in {repository} {config.fineweb_name}; "
            f"the nearest is {nearest(config.fineweb_split, splits)} (it has {', '.join(splits)})"
        )
    found = splits[config.fineweb_split]
    if other := [file for file in found if not file.endswith(".parquet")]:
        raise UserError(f"{repository} {config.fineweb_name}: {other[0]} is not a parquet file; only those are read")
    files: dict[str, Path | str] = {}
    revision = ""
    for file in found:
        match = re.fullmatch(r"hf://datasets/(?P<repository>[^@]+)@(?P<revision>[^/]+)/(?P<path>.+)", file)
        if match is None:
            files[Path(file).absolute().relative_to(Path(repository).absolute()).as_posix()] = Path(file)
        else:
            revision = match["revision"]
            files[match["path"]] = huggingface_hub.hf_hub_url(
                match["repository"], match["path"], repo_type="dataset", revision=revision
            )
    local = {name: path for name, path in files.items() if isinstance(path, Path)}
    token = None if local else huggingface_hub.get_token()
    client = HttpClient(config, activity, {} if token is None else {"Authorization": f"Bearer {token}"})
    name = f"fineweb-edu ({repository}{'@' if revision else ''}{revision}, {config.fineweb_name})"
    # A revision fixes the content of its files; for local files the sizes stand in.
    mark = fingerprint("hub", repository, revision, list(files), sizes(local), field)
    return ParquetSource(name, files, field, mark, client, bad), revision or config.fineweb_revision


def _explain(error: Exception, config: DataConfig) -> UserError:
    """The error for a failure to find the files: a `DataError` if it may pass, a `UserError` otherwise."""
    import datasets
    import huggingface_hub

    repository = config.fineweb_repository
    reason = one_line(error)
    if huggingface_hub.constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE:
        return UserError(
            f"fineweb-edu: the hub is switched off (HF_HUB_OFFLINE is set); unset it, or read a local folder with "
            f"fineweb-edu:PATH ({reason})"
        )
    if match := re.fullmatch(r"BuilderConfig '.*' not found\. Available: \[(.*)\]", str(error)):
        names = re.findall(r"'([^']*)'", match[1])
        return UserError(
            f"data.fineweb_name {config.fineweb_name!r} is not in {repository}; "
            f"the nearest is {nearest(config.fineweb_name, names)}"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    # If every request failed, `datasets` reports a missing file, with the hub's error in its text.
    unreachable = isinstance(error, ConnectionError | TimeoutError) or "LocalEntryNotFoundError" in str(error)
    if unreachable or (status is not None and (status == 429 or status >= 500)):
        return DataError(
            f"fineweb-edu ({repository}): the hub cannot be reached (a copy on disk is read with fineweb-edu:PATH): "
            f"{reason}"
        )
    return UserError(f"fineweb-edu: {repository} {config.fineweb_name} cannot be opened: {reason}")
