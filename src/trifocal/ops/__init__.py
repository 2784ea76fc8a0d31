"""Native Sparse Attention as pure functions of tensors: one function a stage, and all of them together.

Shape letters are those of DESIGN.md. Queries are the last T positions of the S keys. The operations share these
arguments:

    geometry: Block sizes, in tokens.
    num_keys: Tokens behind the compressed blocks, S; T when not given.
    scale: Factor on the scores; 1/sqrt(D) when not given.
    cu_seqlens: Boundaries of packed documents, int [documents + 1] from 0 to S, or checked `Documents`; then B is 1,
        nothing crosses a boundary, and blocks are counted from the start of the query's own document.
    selected_blocks: Block indices, [B, T, G, N], int32 or int64, in any order. An index that is no block of the query's
        past, negative or too large, is a pad; a block that is named twice counts once; N may be 0.
    backend: `"auto"`, `"reference"` or `"triton"`. `"auto"` chooses before the call and records the choice; another
        one that cannot run raises.

All raise ValueError if shapes, types or boundaries do not fit, or the backend cannot run; the message says which.
"""

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
from trifocal.ops.decode.api import append_dense, append_sparse, decode_attention, decode_dense_attention
from trifocal.ops.decode.caches import DecodeBatch, DenseCache, SparseCache, WindowCache
from trifocal.ops.dispatch import backend_choices
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents

__all__ = [
    "DecodeBatch",
    "DenseCache",
    "Documents",
    "Geometry",
    "SparseCache",
    "WindowCache",
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
