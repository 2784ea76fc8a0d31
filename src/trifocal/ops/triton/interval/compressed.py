"""Compressed attention: query `t` sees the blocks that end at or before it. Kernels: `interval.common`.

A FlashAttention whose causal staircase has steps of `d` queries: with 128 rows of 16 heads a tile holds 8 queries, so
nearly every tile of keys is full. FLOPs: forward `T * C * H * (D + V)` (half of the T × C scores are visible), backward
2.5 times as many, 7/5 of that executed.
"""

from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents
from trifocal.ops.triton.combine import row_sums
from trifocal.ops.triton.documents import first_compressed_blocks, place_slots
from trifocal.ops.triton.interval.common import Branch, IntervalProblem
from trifocal.ops.triton.interval.dkdv import launch_backward
from trifocal.ops.triton.interval.forward import launch_forward


def compressed_forward(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    geometry: Geometry,
    num_keys: int,
    scale: float,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """Attend to the compressed blocks in each query's past.

    Args:
        q: Queries, [B, T, H, D]; the last T positions of `num_keys` tokens.
        k_cmp: Compressed keys, [B, C, G, D].
        v_cmp: Compressed values, [B, C, G, V].
        geometry: Block sizes, in tokens.
        num_keys: Tokens behind the compressed blocks.
        scale: Factor on the scores.
        documents: Packed documents, or None; then blocks lie document after document, and slots past the last one
            are never read.

    Returns:
        o, [B, T, H, V], in q's type, zero where no block is visible; lse, [B, T, H], fp32, natural log, -inf there.
    """
    branch = _branch(q, k_cmp, geometry, num_keys, documents, backward=False)
    return launch_forward(q, k_cmp, v_cmp, scale, branch)


def compressed_backward(
    d_o: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    o: Tensor | None,
    lse: Tensor,
    geometry: Geometry,
    num_keys: int,
    scale: float,
    documents: Documents | None,
    d_lse: Tensor | None = None,
    delta: Tensor | None = None,
    gate: Tensor | None = None,
    d_q: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of compressed attention.

    Args:
        d_o: Gradient of o or, with a gate, of the mixed output, [B, T, H, V].
        q, k_cmp, v_cmp, geometry, num_keys, scale, documents: Arguments of forward.
        o, lse: From forward; o may be None when delta is given.
        d_lse: Gradient of lse, [B, T, H], or None; not together with delta.
        delta: Row sums of `d_o * o`, [B, T, H], fp32; computed here when None.
        gate: This branch's weight in the mixed output, [B, T, H], or None.
        d_q: Gradient of the queries from other branches, contiguous, to add to in place, or None.

    Returns:
        d_q, d_k_cmp, d_v_cmp in the types of q, k_cmp, v_cmp; zero for slots that no document fills.
    """
    if delta is None:
        delta = row_sums(d_o, o, d_lse)
    branch = _branch(q, k_cmp, geometry, num_keys, documents, backward=True)
    problem = IntervalProblem(d_o, q, k_cmp, v_cmp, lse, delta, gate, scale, branch)
    return launch_backward(problem, d_q)


def _branch(
    q: Tensor, k_cmp: Tensor, geometry: Geometry, num_keys: int, documents: Documents | None, backward: bool
) -> Branch:
    branch = Branch(
        block=geometry.compression_block_size,
        stride=geometry.compression_stride,
        query_shift=num_keys - q.shape[1],
    )
    if documents is None:
        return branch
    first_blocks = first_compressed_blocks(documents, geometry)
    branch = branch._replace(ids=documents.ids, positions=documents.positions, first_blocks=first_blocks)
    if not backward:
        return branch
    query_begin, query_end = place_slots(first_blocks, documents, k_cmp.shape[1], num_keys, geometry)
    return branch._replace(query_begin=query_begin, query_end=query_end)
