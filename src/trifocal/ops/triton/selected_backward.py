"""Selected attention, backward: the two loop orders of the forward that training takes.

| order | kernel | a program holds | it loops over | out |
|---|---|---|---|---|
| keys outside | gathered | a block's k, v, d_k, d_v | the slots of a piece | d_k, d_v of the piece; d_q of each slot |
| | reduction | a row's d_q | its slots, in order | d_q |
| | reduction | a block's d_k, d_v | its pieces, in order | d_k, d_v |
| masked tiles | d_q | a tile of queries, q, d_o, d_q | blocks | d_q |
| | d_k, d_v | a block's k, v, d_k, d_v | all later queries, all heads of the group | d_k, d_v |
| | or, of few programs | the same | those of one part of the queries | d_k, d_v of the part |
| | addition | some keys' d_k or d_v | their parts, in order | d_k, d_v |

No atomics, every sum has one order. A piece is bounded, so the first block, which everyone chose, is many programs'
work; its pieces meet in the reduction.

`gate` is what multiplies o in the mixed output: backward takes the gradient of the mixture and the gate instead
of their product.
"""

from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents
from trifocal.ops.triton.choice_index import split_blocks
from trifocal.ops.triton.combine import row_sums
from trifocal.ops.triton.common import Tile, unit_stride
from trifocal.ops.triton.selected import BUFFER_BYTES, LARGEST_BLOCK, choose_order
from trifocal.ops.triton.selected_backward_gathered import gathered_backward
from trifocal.ops.triton.selected_backward_masked import masked_backward
from trifocal.ops.triton.selected_problem import SelectedProblem
from trifocal.ops.triton.selected_tiles import fits_by_hand


def selected_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    selected_blocks: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
    *,
    gate: Tensor | None = None,
    delta: Tensor | None = None,
    order: str | None = None,
    tile: Tile | None = None,
    tile_d_q: Tile | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    by_hand: bool | None = None,
    part_queries: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `selected_forward`.

    Args:
        d_o: Gradient of o or, with a gate, of the mixture that takes `gate * o`; [B, T, H, V].
        q, k, v: Inputs of the forward.
        o, lse: Its results.
        selected_blocks: The choice, [B, T, G, N].
        geometry: Block sizes, in tokens.
        scale: Factor on the scores.
        documents: Packed documents; None for one sequence a batch entry.
        gate: [B, T, H]; None for ones.
        delta: The sum of `o * d_o` over the value dim, [B, T, H], fp32; computed here when not given.
        order: `"gathered"` or `"masked"` instead of what the shape asks for.
        tile: A configuration of the d_k, d_v kernel; `keys` is how many slots a piece has.
        tile_d_q: A configuration of the masked order's d_q kernel.
        buffer_bytes: Partial d_q that may be held at a time.
        by_hand: Whether the kernels scheduled by hand for Hopper run; None: where they can.
        part_queries: Of how many queries one program of the masked order's d_k, d_v takes the rows.

    Returns:
        d_q, d_k, d_v in the types of q, k, v, contiguous.
    """
    q, k, v, d_o, o = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(d_o), unit_stride(o)
    selected_blocks, block_size = split_blocks(selected_blocks, geometry.selection_block_size, LARGEST_BLOCK)
    if selected_blocks.shape[-1] == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    order = order or choose_order(
        q.shape[1], k.shape[1], selected_blocks.shape[-1], block_size, backward=True, packed=documents is not None
    )
    problem = SelectedProblem(
        d_o, q, k, v,
        lse.contiguous(),
        row_sums(d_o, o.contiguous()) if delta is None else delta.contiguous(),
        None if gate is None else gate.contiguous(),
        selected_blocks, block_size, scale, documents,
    )  # fmt: skip
    by_hand = by_hand is not False and fits_by_hand(order, q, k, v, d_o, rep=problem.rep, block_size=block_size)
    if order == "masked":
        return masked_backward(problem, tile=tile, tile_d_q=tile_d_q, by_hand=by_hand, part_queries=part_queries)
    return gathered_backward(problem, tile=tile, by_hand=by_hand, buffer_bytes=buffer_bytes)
