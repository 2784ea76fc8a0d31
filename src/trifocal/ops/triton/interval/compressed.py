"""Compressed attention: query `t` sees the blocks that end at or before it. Kernels: `interval.common`.

A FlashAttention whose causal staircase has steps of `d` queries: with 128 rows of 16 heads a tile holds 8 queries, so
nearly every tile of keys is full. FLOPs: forward `T * C * H * (D + V)` (half of the T × C scores are visible), backward
2.5 times as many, 7/5 of that executed.
"""

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, first_compressed_blocks
from trifocal.ops.tiles import cdiv
from trifocal.ops.triton.combine import row_sums
from trifocal.ops.triton.interval.common import Branch, IntervalProblem
from trifocal.ops.triton.interval.dkdv import launch_backward
from trifocal.ops.triton.interval.forward import launch_forward
from trifocal.ops.triton.launch import Kernel


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
    o: Tensor,
    lse: Tensor,
    geometry: Geometry,
    num_keys: int,
    scale: float,
    documents: Documents | None,
    d_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of compressed attention.

    Args:
        d_o: Gradient of o, [B, T, H, V].
        q, k_cmp, v_cmp, geometry, num_keys, scale, documents: Arguments of forward.
        o, lse: From forward.
        d_lse: Gradient of lse, [B, T, H], or None.

    Returns:
        d_q, d_k_cmp, d_v_cmp in the types of q, k_cmp, v_cmp; zero for slots that no document fills.
    """
    branch = backward_branch(q, k_cmp, geometry, num_keys, documents)
    problem = IntervalProblem(d_o, q, k_cmp, v_cmp, lse, row_sums(d_o, o, d_lse), None, scale, branch)
    d_q, d_k, d_v = launch_backward(problem)
    return d_q, d_k, d_v


def backward_branch(q: Tensor, k_cmp: Tensor, geometry: Geometry, num_keys: int, documents: Documents | None) -> Branch:
    """The interval of compressed keys of each query, for the gradients; arguments of `compressed_backward`."""
    return _branch(q, k_cmp, geometry, num_keys, documents, backward=True)


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
    query_begin, query_end = place_slots(first_blocks, documents.cu_seqlens, k_cmp.shape[1], num_keys, geometry)
    return branch._replace(query_begin=query_begin, query_end=query_end)


@Kernel
@triton.jit(do_not_specialize=["num_documents", "num_slots", "num_keys", "steps"])
def place_slots_kernel(
    first_blocks, cu_seqlens, query_begin, query_end, num_documents, num_slots, num_keys, steps, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The queries of compressed slots, first and end: found by halving which document a slot belongs to."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    exists = slot < num_slots
    # Invariant: `low` starts at or before the slot, `high` behind it. Of documents that start at one slot, only the
    # last has any.
    low = tl.zeros([SLOTS], tl.int32)
    high = low + num_documents
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        before = tl.load(first_blocks + middle) <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    in_document = slot - tl.load(first_blocks + low)
    last_token = tl.load(cu_seqlens + low) + in_document * STRIDE + (BLOCK - 1)
    end = tl.load(cu_seqlens + low + 1)
    # A slot that no document fills is seen from the end of the last document on: by nobody.
    filled = last_token < end
    tl.store(query_begin + slot, tl.where(filled, last_token, num_keys), mask=exists)
    tl.store(query_end + slot, tl.where(filled, end, num_keys), mask=exists)


def place_slots(
    first_blocks: Tensor, cu_seqlens: Tensor, num_slots: int, num_keys: int, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """The range of tokens, begin and end, at which queries see each compressed slot, [slots], int32."""
    query_begin, query_end = (first_blocks.new_empty(num_slots) for _ in range(2))
    num_documents, slots_of_program = first_blocks.shape[0], 256
    if num_slots:
        place_slots_kernel[(cdiv(num_slots, slots_of_program),)](
            first_blocks, cu_seqlens, query_begin, query_end, num_documents, num_slots, num_keys,
            max(1, num_documents.bit_length()), BLOCK=geometry.compression_block_size,
            STRIDE=geometry.compression_stride, SLOTS=slots_of_program,
        )  # fmt: skip
    return query_begin, query_end
