"""Native Sparse Attention as pure functions of tensors: one function a stage, and all of them together."""

from trifocal.ops.api import (
    compressed_attention,
    mean_compress,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from trifocal.ops.dispatch import backend_choices
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents

__all__ = [
    "Documents",
    "Geometry",
    "backend_choices",
    "compressed_attention",
    "mean_compress",
    "nsa_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]
