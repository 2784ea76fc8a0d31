"""Trifocal: train and run language models with Native Sparse Attention (arXiv:2502.11089).

The attention alone is `nsa_attention` (a pure function) and `trifocal.nn.NSAttention` (a module); a whole model is
`trifocal.models.DecoderLM`, and a trained one comes from `load_model`; training starts with `trifocal train`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trifocal._version import __version__

if TYPE_CHECKING:
    from trifocal import data, generate, models, nn, ops, train
    from trifocal.ops import Geometry, nsa_attention
    from trifocal.train.pretrained import load_model

_ROOMS = ("data", "generate", "models", "nn", "ops", "train")

__all__ = ["Geometry", "__version__", "data", "generate", "load_model", "models", "nn", "nsa_attention", "ops", "train"]


def __getattr__(name: str) -> Any:
    # PyTorch is imported with the first use, so that `trifocal --help` need not wait for it.
    if name in _ROOMS:
        return importlib.import_module(f"trifocal.{name}")
    if name in ("Geometry", "nsa_attention"):
        return getattr(importlib.import_module("trifocal.ops"), name)
    if name == "load_model":
        return importlib.import_module("trifocal.train.pretrained").load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
