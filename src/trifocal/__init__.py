"""Trifocal: train and run language models with Native Sparse Attention (arXiv:2502.11089).

The attention alone is `nsa_attention` (a pure function) and `trifocal.nn.NSAttention` (a module); a whole model is
`trifocal.models.DecoderLM`; training starts with the command `trifocal train`.
"""

from typing import TYPE_CHECKING, Any

from trifocal._version import __version__

if TYPE_CHECKING:
    from trifocal.ops import Geometry, nsa_attention

__all__ = ["Geometry", "__version__", "nsa_attention"]


def __getattr__(name: str) -> Any:
    # PyTorch is imported with the first use, so that `trifocal --help` need not wait for it.
    if name in ("Geometry", "nsa_attention"):
        from trifocal import ops

        return getattr(ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
