"""Loaders for tests, and their batches."""

import inspect

import torch

from trifocal.data import DataConfig, Loader, make_tokenizer

_ARGUMENTS = inspect.signature(Loader).parameters


def open_loader(source, length=16, batch_size=1, **settings):
    """A loader of bytes; settings are those of `DataConfig` and arguments of `Loader`."""
    arguments = {"tokenizer": make_tokenizer("bytes"), "vocab_size": 257}
    arguments |= {name: settings.pop(name) for name in _ARGUMENTS if name in settings}
    config = source if isinstance(source, DataConfig) else DataConfig(source=source, **settings)
    return Loader(config, sequence_length=length, batch_size=batch_size, **arguments)


def same(a, b):
    borders = (a.cu_seqlens is None) == (b.cu_seqlens is None) and (
        a.cu_seqlens is None or torch.equal(a.cu_seqlens, b.cu_seqlens)
    )
    return borders and torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets) and a[3:] == b[3:]


def take(loader, count):
    batches = [next(loader) for _ in range(count)]
    assert all(batch.valid_targets == (batch.targets != -100).sum() for batch in batches)
    return batches
