"""Shared by the kernels of the selected branch: inputs of backward, and what a block adds to rows that chose it."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.layout import Documents
from trifocal.ops.tiles import named_widths, next_power_of_2
from trifocal.ops.triton.common import LOG2_E, LOG2_E_KERNEL, load_tile, strides
from trifocal.ops.triton.documents import default_documents


class SelectedProblem(NamedTuple):
    """Inputs of backward: d_o of o or, with a gate, of the mixture, [B, T, H, V]; q [B, T, H, D], k [B, S, G, D] and
    v [B, S, G, V]; of the rows, [B, T, H], lse and delta (`sum(o * d_o)`), fp32, and the gate; the choice [B, T, G, N],
    int32, of blocks that fit a tile. All behind v are contiguous.
    """

    d_o: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    gate: Tensor | None
    selected_blocks: Tensor
    block_size: int
    scale: float
    documents: Documents | None

    @property
    def q_per_kv(self) -> int:
        """Heads of a group."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def num_selected(self) -> int:
        """Blocks that a query may choose."""
        return self.selected_blocks.shape[-1]

    @property
    def score_scale(self) -> float:
        """Factor on the scores in base 2."""
        return self.scale * LOG2_E

    def rows(self) -> tuple[Tensor, ...]:
        """The tensors that kernels read: q, k, v, d_o, and the rows' lse, delta and gate."""
        return self.q, self.k, self.v, self.d_o, self.lse, self.delta, self.delta if self.gate is None else self.gate

    def documents_or_lse(self) -> tuple[Tensor, Tensor, Tensor]:
        """ids, positions and cu_seqlens; without documents a tensor that is never read."""
        return default_documents(self.documents, self.lse)

    def sizes(self) -> tuple[int, ...]:
        """See `kernel_sizes`."""
        return kernel_sizes(self.q, self.k, self.v, self.d_o)

    def constants(self) -> dict[str, int]:
        """Compile-time constants of the kernels."""
        constants = kernel_constants(self.q, self.k, self.v, self.block_size)
        return {**constants, "PACKED": self.documents is not None, "GATED": self.gate is not None}


def kernel_sizes(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[int, ...]:
    """Strides of all; queries, the token of the first one, and keys."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    of_all = (stride for x in (q, k, v, *others) for stride in strides(x))
    return *of_all, num_queries, num_keys - num_queries, num_keys


def kernel_constants(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> dict[str, int]:
    """Compile-time constants of every kernel: heads, widths, and tokens of a block and of its tile."""
    groups = k.shape[2]
    return {
        "GROUPS": groups, "Q_PER_KV": q.shape[2] // groups, **named_widths(D=q.shape[3], V=v.shape[3]),
        "BLOCK": block_size, "KEYS": max(16, next_power_of_2(block_size)),
    }  # fmt: skip


@triton.jit
def row_numbers(lse, delta, gate, place, exists, GATED: tl.constexpr):
    """lse in base 2 (infinite where the row adds nothing), delta and gate of rows."""
    lse_2 = tl.load(lse + place, mask=exists, other=float("-inf")) * LOG2_E_KERNEL
    lse_2 = tl.where(lse_2 == float("-inf"), float("inf"), lse_2)
    delta_row = tl.load(delta + place, mask=exists, other=0.0)
    gate_row = delta_row
    if GATED:
        gate_row = tl.load(gate + place, mask=exists, other=0.0).to(tl.float32)
    return lse_2, delta_row, gate_row


@triton.jit
def load_block(
    k, v, k_time_stride, v_time_stride, in_block, keep,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
):  # fmt: skip
    """Keys and values of a block, in two parts each as of `load_parts`."""
    k_1 = load_tile(k, in_block * k_time_stride, keep, 0, D_1, D, True)
    v_1 = load_tile(v, in_block * v_time_stride, keep, 0, V_1, V, True)
    k_2, v_2 = k_1, v_1
    if D_2 > 0:
        k_2 = load_tile(k, in_block * k_time_stride, keep, D_1, D_2, D, True)
    if V_2 > 0:
        v_2 = load_tile(v, in_block * v_time_stride, keep, V_1, V_2, V, True)
    return (k_1, k_2), (v_1, v_2)


@triton.jit
def load_rows(
    q, d_o, q_offsets, d_offsets, keep,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
):  # fmt: skip
    """The same of queries and their d_o."""
    q_1 = load_tile(q, q_offsets, keep, 0, D_1, D, True)
    d_o_1 = load_tile(d_o, d_offsets, keep, 0, V_1, V, True)
    q_2, d_o_2 = q_1, d_o_1
    if D_2 > 0:
        q_2 = load_tile(q, q_offsets, keep, D_1, D_2, D, True)
    if V_2 > 0:
        d_o_2 = load_tile(d_o, d_offsets, keep, V_1, V_2, V, True)
    return (q_1, q_2), (d_o_1, d_o_2)


@triton.jit
def attend_block(
    softmax, scores, chosen, v, offsets, keep, score_scale,
    V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take a block, of which there are scores, into the running softmax of the rows that chose it."""
    o_1, o_2, running_max, running_sum = softmax
    new_max = tl.where(chosen, tl.maximum(running_max, tl.max(scores, 1) * score_scale), running_max)
    # Rows that did not choose the block subtract infinity, and so add nothing.
    p = tl.exp2(scores * score_scale - tl.where(chosen, new_max, float("inf"))[:, None])
    decay = tl.exp2(running_max - new_max)
    running_sum = running_sum * decay + tl.sum(p, 1)
    v_1 = load_tile(v, offsets, keep, 0, V_1, V, MASKED)
    p = p.to(v_1.dtype)
    o_1 = tl.dot(p, v_1, o_1 * decay[:, None], input_precision="ieee")
    if V_2 > 0:
        v_2 = load_tile(v, offsets, keep, V_1, V_2, V, MASKED)
        o_2 = tl.dot(p, v_2, o_2 * decay[:, None], input_precision="ieee")
    return o_1, o_2, new_max, running_sum


@triton.jit
def add_d_q(
    d_q, keys, scores, d_p, chosen, keep, first_key, last_key, numbers, score_scale,
    D_2: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Add a block's share to d_q of the rows that chose it. MASKED: of the keys to keep, up to each row's last one."""
    d_q_1, d_q_2 = d_q
    k_1, k_2 = keys
    lse_2, delta_row, gate_row = numbers
    p = tl.exp2(scores * score_scale - tl.where(chosen, lse_2, float("inf"))[:, None])
    if MASKED:
        key = first_key + tl.arange(0, KEYS)
        p = tl.where(keep[None, :] & (key[None, :] <= last_key[:, None]), p, 0.0)
    if GATED:
        p = p * gate_row[:, None]
    d_scores = (p * (d_p - delta_row[:, None])).to(k_1.dtype)
    d_q_1 = tl.dot(d_scores, k_1, d_q_1, input_precision="ieee")
    if D_2 > 0:
        d_q_2 = tl.dot(d_scores, k_2, d_q_2, input_precision="ieee")
    return d_q_1, d_q_2
