"""Trifocal: train and run language models with Native Sparse Attention (arXiv:2502.11089).

The attention alone is `nsa_attention` (a pure function) and `trifocal.nn.NSAttention` (a module); a whole model is
`trifocal.models.DecoderLM`; training starts with the command `trifocal train`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trifocal._version import __version__

if TYPE_CHECKING:
    from trifocal import data, generate, models, nn, ops, train
    from trifocal.ops import Geometry, nsa_attention

_ROOMS = ("data", "generate", "models", "nn", "ops", "train")

__all__ = ["Geometry", "__version__", "data", "generate", "models", "nn", "nsa_attention", "ops", "train"]


def __getattr__(name: str) -> Any:
    # PyTorch is imported with the first use, so that `trifocal --help` need not wait for it.
    if name in _ROOMS:
        return importlib.import_module(f"trifocal.{name}")
    if name in ("Geometry", "nsa_attention"):
        return getattr(importlib.import_module("trifocal.ops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
