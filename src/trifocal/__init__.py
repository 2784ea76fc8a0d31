"""Trifocal: train and run language models with Native Sparse Attention (arXiv:2502.11089).

The attention alone is `nsa_attention` (a pure function) and `trifocal.nn.NSAttention` (a module); a whole model is
`trifocal.models.DecoderLM`; training starts with the command `trifocal train`.
"""

from trifocal._version import __version__
from trifocal.ops import Geometry, nsa_attention

__all__ = ["Geometry", "__version__", "nsa_attention"]
