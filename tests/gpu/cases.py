"""Shapes for the GPU, with why each is there, and the error that PyTorch's own attention makes at them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.ops.cases import geometry
from trifocal import Geometry
from trifocal.ops import Documents, compressed_attention, select_blocks, selected_attention, window_attention
from trifocal.testing.inputs import Inputs, attention_inputs, cotangent
from trifocal.testing.tolerances import error

PAPER = Geometry()
SMALL = geometry(8, 4, 16, 3, 1, 1, 40)
# PyTorch's own attention may err half as much.
FACTOR = 2.0


@dataclass(frozen=True)
class Case:
    """One problem. `lengths`: of packed documents, None for one document a row. S = T unless given."""

    why: str
    geometry: Geometry
    queries: int
    heads: int
    groups: int
    dim: int
    value_dim: int
    keys: int = 0
    batch: int = 1
    lengths: tuple[int, ...] | None = None

    @property
    def num_keys(self) -> int:
        return self.keys or self.queries

    @property
    def documents(self) -> Documents | None:
        if self.lengths is None:
            return None
        borders = torch.tensor([0, *self.lengths]).cumsum(0).to("cuda", torch.int32)
        return Documents.from_cu_seqlens(borders, self.num_keys)


CASES = (
    Case("16 heads a group, two batch entries", PAPER, 333, 32, 2, 128, 128, batch=2),
    Case("packed: 1 token, around l, long", PAPER, 900, 12, 2, 64, 64, lengths=(1, 31, 32, 33, 500, 2, 301)),
    Case("packed: short blocks", SMALL, 600, 12, 2, 64, 64, lengths=(200, 7, 8, 1, 384)),
    Case("one head a group, D in two parts", SMALL, 257, 3, 3, 192, 128),
    Case("64 heads a group, least dims", SMALL, 129, 64, 1, 16, 16),
    Case("rows that no copy engine takes", SMALL, 300, 4, 2, 100, 36),
    Case("odd dims, 3 heads a group", PAPER, 131, 6, 2, 71, 41, keys=300, batch=2),
    Case("widest", SMALL, 300, 4, 2, 256, 256),
    Case("fewer queries than keys", PAPER, 77, 16, 1, 128, 128, keys=900, batch=2),
    Case("one query", PAPER, 1, 16, 1, 128, 64, keys=700, batch=2),
    Case("block-major: many more blocks than chosen", SMALL, 1500, 8, 2, 64, 64),
    Case("few programs: a block's rows in parts", PAPER, 1100, 12, 2, 64, 64, batch=2),
    Case("in parts, packed: a document that they cut", PAPER, 1300, 32, 2, 128, 128, lengths=(65, 1100, 1, 134)),
    Case("in parts, fewer queries than keys", PAPER, 500, 16, 1, 128, 64, keys=1500),
)


def draw(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Inputs for a case, rounded to `dtype`; the window's keys are as few as will do."""
    reach = case.num_keys
    if case.lengths is None:
        reach = min(case.num_keys, case.queries + case.geometry.window_size - 1)
    return attention_inputs(
        case.geometry,
        case.queries,
        "cuda",
        dtype,
        batch=case.batch,
        num_heads=case.heads,
        num_kv_heads=case.groups,
        head_dim=case.dim,
        value_dim=case.value_dim,
        num_keys=case.num_keys,
        num_window_keys=reach,
        document_lengths=case.lengths,
        seed=seed,
    )


def choice(case: Case, inputs: Inputs) -> Tensor:
    """The blocks that float64 chooses, for both sides of a comparison."""
    q, k_cmp, v_cmp = (x.detach().double() for x in inputs[:3])
    rules = {"num_keys": case.num_keys, "cu_seqlens": case.documents, "backend": "reference"}
    _, lse = compressed_attention(q, k_cmp, v_cmp, case.geometry, **rules)
    return select_blocks(q, k_cmp, lse, case.geometry, **rules)


def branch_masks(case: Case, inputs: Inputs, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which keys each head of each query sees in each branch, [B, H, T, keys], bool.

    Read off the reference: with the identity for values, an output is its probabilities.
    """
    x = Inputs(*(leaf.detach().double() for leaf in inputs))
    rules = {"cu_seqlens": case.documents, "backend": "reference"}

    def identity(k: Tensor) -> Tensor:
        size = k.shape[1]
        return torch.eye(size, device="cuda", dtype=torch.float64)[:, None].expand(case.batch, size, case.groups, size)

    p_cmp, _ = compressed_attention(x.q, x.k_cmp, identity(x.k_cmp), case.geometry, num_keys=case.num_keys, **rules)
    p_slc = selected_attention(x.q, x.k_slc, identity(x.k_slc), chosen, case.geometry, **rules)
    p_win = window_attention(x.q, x.k_win, identity(x.k_win), case.geometry.window_size, **rules)
    return p_cmp.transpose(1, 2) > 0, p_slc.transpose(1, 2) > 0, p_win.transpose(1, 2) > 0


def allowed(inputs: Inputs, masks: tuple[Tensor, Tensor, Tensor], branch: int | None = None) -> float:
    """Twice the worst error, output or gradient, of PyTorch's attention on the same problem.

    Args:
        inputs: The problem.
        masks: What each branch sees.
        branch: One branch alone; None for the gated mixture of the three.
    """

    def results(leaves: Inputs) -> list[Tensor]:
        pairs = [(leaves.k_cmp, leaves.v_cmp), (leaves.k_slc, leaves.v_slc), (leaves.k_win, leaves.v_win)]
        if branch is not None:
            o = _masked(leaves.q, *pairs[branch], masks[branch])
            wanted = [leaves.q, *pairs[branch]]
        else:
            exact = torch.promote_types(leaves.q.dtype, torch.float32)
            total = torch.zeros((), device="cuda", dtype=exact)
            for number, (k, v) in enumerate(pairs):
                total = total + leaves.gates[..., number, None].to(exact) * _masked(leaves.q, k, v, masks[number])
            o, wanted = total.to(leaves.q.dtype), list(leaves)
        d_o = cotangent(o if o.dtype != torch.float64 else o.to(inputs.q.dtype)).to(o.dtype)
        return [o, *torch.autograd.grad(o, wanted, d_o, allow_unused=True, materialize_grads=True)]

    got, exact = results(inputs.leaves()), results(inputs.leaves(torch.float64))
    return FACTOR * max(error(a, e) for a, e in zip(got, exact, strict=True))


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's attention; zeros, without gradients, for queries that see nothing."""
    if k.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]) + 0.0 * q.sum()
    heads = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(heads, 2).transpose(1, 2) for x in (k, v))
    sees = mask.any(-1, keepdim=True)
    o = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask | ~sees)
    return o.where(sees, 0.0).transpose(1, 2)
