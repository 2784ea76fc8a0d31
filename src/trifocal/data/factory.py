"""The source of documents that a config names."""

from __future__ import annotations

from dataclasses import replace

from trifocal.data.activity import Activity
from trifocal.data.data_config import DataConfig
from trifocal.data.sources.base import BadDocuments, Source, parse_source


def make_source(config: DataConfig, activity: Activity, split: str) -> tuple[Source, DataConfig]:
    """Open the source of documents that a config names, except the synthetic ones, which have no text.

    Args:
        config: Names the source.
        activity: The loader's, for messages and the signal to stop.
        split: `train` or `validation`; most sources hold both, and a document tells which it is of.

    Returns:
        The source, and the config with the hub's branch replaced by its present commit.

    Raises:
        UserError: If the source is unknown, its data are missing or empty, or the hub does not answer.
    """
    # Imported here so that a run loads only the libraries of its own source.
    kind, path, field = parse_source(config.source)
    bad = BadDocuments(config.on_bad_document)
    if kind == "builtin":
        from trifocal.data.sources.builtin import BuiltinSource

        return BuiltinSource(include_site_packages=config.include_site_packages, bad=bad), config
    if kind == "text":
        from trifocal.data.sources.text import TextSource

        return TextSource(path, validation_fraction=config.validation_fraction, bad=bad), config
    if kind == "jsonl":
        from trifocal.data.sources.text import JsonlSource

        return JsonlSource(path, field, bad=bad), config
    if kind == "hf" or (kind == "fineweb-edu" and not path):
        from trifocal.data.sources.hub import open_dataset

        source, revision = open_dataset(config, split, activity, bad)
        return source, replace(config, revision=revision)
    from trifocal.data.sources.parquet import ParquetSource

    return ParquetSource.from_path(config.source, path, field, bad), config
