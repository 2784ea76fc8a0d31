"""Trifocal: train and run language models with Native Sparse Attention (arXiv:2502.11089).

`nsa` (a pure function) and `NSAttention` (a layer) are only the attention; `nsa_attention` takes separate keys for each
branch. A whole model is `DecoderLM`. Training starts with the command `trifocal train`, or `trifocal.train.train`;
`generate`, `load_model` and `load_tokenizer` take what it wrote.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trifocal._version import __version__

if TYPE_CHECKING:
    from trifocal import data, inference, models, nn, ops, train
    from trifocal.api import generate, load_tokenizer
    from trifocal.models import DecoderLM
    from trifocal.nn import NSAttention
    from trifocal.ops import Geometry, nsa, nsa_attention
    from trifocal.train.checkpoint.pretrained import load_model

_PACKAGES = ("data", "inference", "models", "nn", "ops", "train")
_MODULE_OF = {
    "DecoderLM": "models",
    "Geometry": "ops",
    "NSAttention": "nn",
    "generate": "api",
    "load_model": "train.checkpoint.pretrained",
    "load_tokenizer": "api",
    "nsa": "ops",
    "nsa_attention": "ops",
}

__all__ = [
    "DecoderLM",
    "Geometry",
    "NSAttention",
    "__version__",
    "data",
    "generate",
    "inference",
    "load_model",
    "load_tokenizer",
    "models",
    "nn",
    "nsa",
    "nsa_attention",
    "ops",
    "train",
]


def __getattr__(name: str) -> Any:
    # PyTorch is imported with the first use, so that `trifocal --help` need not wait for it.
    if name in _PACKAGES:
        return importlib.import_module(f"trifocal.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"trifocal.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
