"""Native Sparse Attention on the kernels: four stages without gradients, and one boundary that has them all.

Kept for backward: q, the branches' keys, values, outputs and log-sum-exps, the choice, the gates.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from trifocal.ops import operators
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
    selected_blocks: Tensor | None,
) -> Tensor:
    """The mixture of the three branches; see `trifocal.ops.nsa_attention`."""
    num_keys = k_slc.shape[1]
    branches = (k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    if q.is_cuda and not torch.compiler.is_compiling() and not is_fake(q):
        from trifocal.ops.triton.ahead import compile_ahead

        backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, *branches, gates))
        compile_ahead(q, branches, gates, geometry, scale, documents, selected_blocks, backward=backward)
    sizes, packed = operators.sizes_of(geometry), operators.tensors_of(documents)
    with torch.no_grad():
        o_cmp, lse_cmp = operators.compressed_attention(q, k_cmp, v_cmp, sizes, num_keys, scale, *packed)
        if selected_blocks is None:
            cu_seqlens, *places = packed
            selected_blocks = operators.select_blocks(
                q, k_cmp, lse_cmp, sizes, num_keys, scale, cu_seqlens, "triton", *places
            )
        o_slc, lse_slc = operators.selected_attention(q, k_slc, v_slc, selected_blocks, sizes, scale, *packed)
        o_win, lse_win = operators.window_attention(q, k_win, v_win, geometry.window_size, scale, *packed)
    return combine_branches(
        q,
        k_cmp,
        v_cmp,
        k_slc,
        v_slc,
        k_win,
        v_win,
        gates,
        o_cmp,
        lse_cmp,
        o_slc,
        lse_slc,
        o_win,
        lse_win,
        selected_blocks,
        sizes,
        scale,
        *packed,
    )


@torch.library.custom_op("trifocal::combine_branches", mutates_args=(), tags=operators.ANY_STRIDES)
def combine_branches(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    o_cmp: Tensor,
    lse_cmp: Tensor,
    o_slc: Tensor,
    lse_slc: Tensor,
    o_win: Tensor,
    lse_win: Tensor,
    selected_blocks: Tensor,
    geometry: list[int],
    scale: float,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """Mix the branches' outputs. What only backward needs is an argument too: gradients flow to it from here."""
    from trifocal.ops.triton.combine import combine_forward

    with torch.cuda.device_of(q):
        return combine_forward(o_cmp, o_slc, o_win, gates)


@combine_branches.register_fake
def _(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    o_cmp: Tensor,
    *_: Any,
) -> Tensor:
    return o_cmp.new_empty(o_cmp.shape)


@torch.library.custom_op("trifocal::combine_branches_backward", mutates_args=(), tags=operators.ANY_STRIDES)
def combine_branches_backward(
    d_o: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    o_cmp: Tensor,
    lse_cmp: Tensor,
    o_slc: Tensor,
    lse_slc: Tensor,
    o_win: Tensor,
    lse_win: Tensor,
    selected_blocks: Tensor,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
    geometry: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, the keys and values of the branches in their order, and the gates."""
    from trifocal.ops.triton.core import Branches, attention_backward

    branches = Branches(
        *(k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates),
        *(o_cmp, lse_cmp, o_slc, lse_slc, o_win, lse_win, selected_blocks),
    )
    documents = operators.documents_of(cu_seqlens, ids, positions)
    with torch.cuda.device_of(q):
        return attention_backward(d_o, q, branches, operators.geometry_of(geometry), scale, documents)


@combine_branches_backward.register_fake
def _(d_o: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:8])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.geometry, ctx.scale, cu_seqlens, ids, positions = inputs
    ctx.save_for_backward(*tensors, cu_seqlens, ids, positions)


def _gradients(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
    gradients = combine_branches_backward(d_o, *ctx.saved_tensors, ctx.geometry, ctx.scale)
    return (*gradients, *(None,) * 12)


combine_branches.register_autograd(_gradients, setup_context=_save)
