"""Backward of the whole attention: one pass over the branches that shares what they have in common.

| step | reads | writes |
|---|---|---|
| combination | d_o and the three outputs, once | d_gates; the row sums `delta` of the branches, fp32 |
| selected | q, k, v, d_o, the gate, lse, delta | d_q, d_k, d_v |
| compressed, window | the same | d_k, d_v; adds to d_q in place |

A branch's own gradient, `gate * d_o`, is never written: its kernels multiply probabilities by the gate. The branches'
shares of d_q are added up in one tensor, always in this order.
"""

from typing import NamedTuple

from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents
from trifocal.ops.triton.combine import combine_backward
from trifocal.ops.triton.compressed import compressed_backward
from trifocal.ops.triton.selected_backward import selected_backward
from trifocal.ops.triton.window import window_backward


class Branches(NamedTuple):
    """Inputs of the branches and what forward made of them; shapes as in `trifocal.ops.nsa_attention`."""

    k_cmp: Tensor
    v_cmp: Tensor
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    o_cmp: Tensor
    lse_cmp: Tensor
    o_slc: Tensor
    lse_slc: Tensor
    o_win: Tensor
    lse_win: Tensor
    selected_blocks: Tensor


def attention_backward(
    d_o: Tensor, q: Tensor, branches: Branches, geometry: Geometry, scale: float, documents: Documents | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the gated mixture.

    Args:
        d_o: Gradient of the mixture, [B, T, H, V].
        q: Queries, [B, T, H, D].
        branches: What forward took and made.
        geometry: Block sizes, in tokens.
        scale: Factor on the scores.
        documents: Packed documents, or None.

    Returns:
        d_q, d_k_cmp, d_v_cmp, d_k_slc, d_v_slc, d_k_win, d_v_win, d_gates, contiguous, in their inputs' types.
    """
    b = branches
    d_gates, delta = combine_backward(d_o, b.o_cmp, b.o_slc, b.o_win, b.gates.dtype)
    gate_cmp, gate_slc, gate_win = b.gates.unbind(-1)
    d_q, d_k_slc, d_v_slc = selected_backward(
        d_o,
        q,
        b.k_slc,
        b.v_slc,
        b.o_slc,
        b.lse_slc,
        b.selected_blocks,
        geometry,
        scale,
        documents,
        gate=gate_slc,
        delta=delta[1],
    )
    num_keys = b.k_slc.shape[1]
    d_q, d_k_cmp, d_v_cmp = compressed_backward(
        d_o,
        q,
        b.k_cmp,
        b.v_cmp,
        None,
        b.lse_cmp,
        geometry,
        num_keys,
        scale,
        documents,
        delta=delta[0],
        gate=gate_cmp,
        d_q=d_q,
    )
    d_q, d_k_win, d_v_win = window_backward(
        d_o,
        q,
        b.k_win,
        b.v_win,
        None,
        b.lse_win,
        geometry.window_size,
        scale,
        documents,
        delta=delta[2],
        gate=gate_win,
        d_q=d_q,
    )
    return d_q, d_k_cmp, d_v_cmp, d_k_slc, d_v_slc, d_k_win, d_v_win, d_gates
