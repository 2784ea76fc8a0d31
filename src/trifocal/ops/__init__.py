"""Native Sparse Attention as pure functions of tensors: one function a stage, and all of them together."""

from trifocal.ops.api import (
    compressed_attention,
    mean_compress,
    nsa,
    nsa_attention,
    select_blocks,
    select_blocks_by_index,
    selected_attention,
    window_attention,
)
from trifocal.ops.decode.api import (
    append_chunk,
    append_dense,
    append_sparse,
    decode_attention,
    decode_dense_attention,
)
from trifocal.ops.decode.caches import DecodeBatch, DenseCache, SparseCache
from trifocal.ops.dispatch import backend_choices
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents

__all__ = [
    "DecodeBatch",
    "DenseCache",
    "Documents",
    "Geometry",
    "SparseCache",
    "append_chunk",
    "append_dense",
    "append_sparse",
    "backend_choices",
    "compressed_attention",
    "decode_attention",
    "decode_dense_attention",
    "mean_compress",
    "nsa",
    "nsa_attention",
    "select_blocks",
    "select_blocks_by_index",
    "selected_attention",
    "window_attention",
]
