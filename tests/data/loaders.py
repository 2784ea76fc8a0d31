"""Loaders for tests."""

import inspect
from typing import Any

from trifocal.data import DataConfig, Loader, make_tokenizer

_ARGUMENTS = inspect.signature(Loader).parameters


def open_loader(source: str | DataConfig, length: int = 16, batch_size: int = 1, **settings: Any) -> Loader:
    """A loader of bytes; settings are those of `DataConfig` and arguments of `Loader`."""
    arguments = {"tokenizer": make_tokenizer("bytes"), "vocab_size": 257}
    arguments |= {name: settings.pop(name) for name in _ARGUMENTS if name in settings}
    config = DataConfig(source=source, **settings) if isinstance(source, str) else source
    return Loader(config, sequence_length=length, batch_size=batch_size, **arguments)
