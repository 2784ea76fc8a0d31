"""Selected attention, backward: the three loop orders of the forward. No atomics, every sum has one order.

Tiles make d_q from lists of blocks, and d_k and d_v as the block-major order does; that makes d_q, too, by slots, and
only small groups take it. `gate` multiplies o in the mixed output: backward takes the gradient of the mixture and the
gate instead of their product.
"""

from torch import Tensor

from trifocal.ops import dispatch, tiles
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, longest_document
from trifocal.ops.triton.combine import row_sums
from trifocal.ops.triton.common import unit_stride
from trifocal.ops.triton.selected.backward_block_major import block_major_backward
from trifocal.ops.triton.selected.backward_masked import masked_backward
from trifocal.ops.triton.selected.block_csr import split_blocks
from trifocal.ops.triton.selected.common import SelectedProblem
from trifocal.ops.triton.selected.tile_d_q import tile_d_q


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `selected_forward`: d_q, d_k, d_v, contiguous; d_o [B, T, H, V] is of o or, with a gate [B, T, H],
    of the mixture that takes `gate * o`, and `delta` [B, T, H] is computed unless given.
    """
    q, k, v, d_o, o = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(d_o), unit_stride(o)
    largest = tiles.largest_block_of_backward(q, v)
    selected_blocks, block_size = split_blocks(selected_blocks, geometry.selection_block_size, largest)
    if selected_blocks.shape[-1] == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    longest = longest_document(k.shape[1], documents)
    sizes = q.shape[1], longest, selected_blocks.shape[-1], block_size, q.shape[2] // k.shape[2]
    order = dispatch.selected_order(*sizes, backward=True, packed=documents is not None)
    problem = SelectedProblem(
        d_o, q, k, v,
        lse.contiguous(),
        row_sums(d_o, o.contiguous()) if delta is None else delta.contiguous(),
        None if gate is None else gate.contiguous(),
        selected_blocks, block_size, scale, documents,
    )  # fmt: skip
    if order == "masked":
        return masked_backward(problem)
    d_q = tile_d_q(problem) if order == "tiles" else None
    found, d_k, d_v = block_major_backward(problem, with_d_q=d_q is None)
    return found if d_q is None else d_q, d_k, d_v
