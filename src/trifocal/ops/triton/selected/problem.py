"""The inputs of the selected branch's backward, for both loop orders."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.layout import Documents
from trifocal.ops.tiles import Widths, next_power_of_2, split_width
from trifocal.ops.triton.common import LOG2_E, LOG2_E_KERNEL, strides
from trifocal.ops.triton.selected.block_csr import default_documents


class SelectedProblem(NamedTuple):
    """Inputs of backward, checked and laid out.

    Attributes:
        d_o: Gradient of o or, with a gate, of the mixture, [B, T, H, V].
        q: Queries, [B, T, H, D].
        k, v: Keys and values, [B, S, G, D] and [B, S, G, V].
        lse, delta: Log-sum-exp and `sum(o * d_o)` of the rows, [B, T, H], fp32, contiguous.
        gate: [B, T, H], contiguous; None for ones.
        selected_blocks: The choice, [B, T, G, N], int32, contiguous.
        block_size: Tokens in a block, at most a tile's.
        scale: Factor on the scores.
        documents: Packed documents, or None.
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

    @property
    def widths(self) -> tuple[Widths, Widths]:
        """How the columns of q and of v split into tiles."""
        return split_width(self.q.shape[3]), split_width(self.v.shape[3])

    def rows(self) -> tuple[Tensor, ...]:
        """The tensors that kernels read: q, k, v, d_o, and the rows' lse, delta and gate."""
        return self.q, self.k, self.v, self.d_o, self.lse, self.delta, self.delta if self.gate is None else self.gate

    def documents_or_lse(self) -> tuple[Tensor, Tensor, Tensor]:
        """ids, positions and cu_seqlens; without documents a tensor that is never read."""
        return default_documents(self.documents, self.lse)

    def sizes(self) -> tuple[int, ...]:
        """Strides of q, k, v and d_o; queries, the token of the first one, and keys."""
        num_queries, num_keys = self.q.shape[1], self.k.shape[1]
        of_all = (*strides(self.q), *strides(self.k), *strides(self.v), *strides(self.d_o))
        return *of_all, num_queries, num_keys - num_queries, num_keys

    def constants(self) -> dict[str, int | bool]:
        """Compile-time constants of the kernels."""
        d, v = self.widths
        return {
            "GROUPS": self.k.shape[2], "Q_PER_KV": self.q_per_kv, "D": d.size, "D_1": d.part_1, "D_2": d.part_2,
            "V": v.size, "V_1": v.part_1, "V_2": v.part_2,
            "BLOCK": self.block_size, "KEYS": max(16, next_power_of_2(self.block_size)),
            "PACKED": self.documents is not None, "GATED": self.gate is not None,
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
