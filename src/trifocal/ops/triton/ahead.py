"""The first call of its kind: every kernel of the whole attention, forward and backward, compiled at the same time."""

import torch
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents
from trifocal.ops.triton.combine import combine_forward
from trifocal.ops.triton.compressed import compressed_forward
from trifocal.ops.triton.core import Branches, attention_backward
from trifocal.ops.triton.launch import only_compile
from trifocal.ops.triton.mean_compression import mean_compress_backward
from trifocal.ops.triton.scoring import select_blocks_forward
from trifocal.ops.triton.selected_forward import selected_forward
from trifocal.ops.triton.window import window_forward

_compiled: set[tuple[object, ...]] = set()


def compile_ahead(
    q: Tensor,
    branches: tuple[Tensor, ...],
    gates: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
    selected_blocks: Tensor | None,
    *,
    backward: bool,
) -> None:
    """Compile what a call of `trifocal.ops.nsa_attention` is going to launch, unless one of its kind was compiled.

    Lengths are of one kind up to the next power of two. The call is made on the meta device, without memory and
    without arithmetic; a kernel that it misses is compiled when it is launched.

    Args:
        q: Queries, on a CUDA device.
        branches: Keys and values, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win.
        gates: Of the branches.
        geometry: Block sizes, in tokens.
        scale: Factor on the scores.
        documents: Packed documents, or None.
        selected_blocks: The choice of blocks; None where it is made.
        backward: Whether gradients will be asked for.
    """
    lengths = tuple(length.bit_length() for length in (*q.shape[:2], branches[2].shape[1]))
    places = None if selected_blocks is None else selected_blocks.shape[-1]
    widths = (*q.shape[2:], *branches[2].shape[2:], branches[3].shape[3])
    kind = (q.device, q.dtype, gates.dtype, lengths, widths, geometry, documents is None, places, backward)
    if kind in _compiled:
        return
    q, gates, *branches = (_meta(x) for x in (q, gates, *branches))  # type: ignore[assignment]
    if documents is not None:
        documents = Documents(*map(_meta, documents))
    with torch.no_grad(), only_compile(kind[0]):  # type: ignore[arg-type]
        _whole(q, branches, gates, geometry, scale, documents, places, backward)
    _compiled.add(kind)


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _whole(
    q: Tensor,
    branches: tuple[Tensor, ...],
    gates: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
    places: int | None,
    backward: bool,
) -> None:
    """As `trifocal.ops.fused.nsa_attention` and its backward, stage by stage."""
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = branches
    num_keys = k_slc.shape[1]
    o_cmp, lse_cmp = compressed_forward(q, k_cmp, v_cmp, geometry, num_keys, scale, documents)
    if places is None:
        blocks = select_blocks_forward(q, k_cmp, lse_cmp, geometry, num_keys, scale, documents)
    else:
        blocks = torch.empty(*q.shape[:2], k_slc.shape[2], places, dtype=torch.int32, device="meta")
    o_slc, lse_slc = selected_forward(q, k_slc, v_slc, blocks, geometry, scale, documents)
    o_win, lse_win = window_forward(q, k_win, v_win, geometry.window_size, scale, documents)
    o = combine_forward(o_cmp, o_slc, o_win, gates)
    if backward:
        made = Branches(*branches, gates, o_cmp, lse_cmp, o_slc, lse_slc, o_win, lse_win, blocks)
        _, d_k_cmp, d_v_cmp, *_ = attention_backward(o, q, made, geometry, scale, documents)
        for gradient in (d_k_cmp, d_v_cmp):
            # The next step of backward, where blocks are means.
            mean_compress_backward(gradient, geometry, num_keys, documents)
