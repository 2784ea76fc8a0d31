"""Choosers of blocks and the loss that teaches them, in plain PyTorch: the attention of `choice_text.py`.

`teacher_masses` is the selected branch's own attention over the whole past of a few queries, summed by block.
`Probe` and `ProbeSelected` are the sparse layers with a chooser of their own: today's compressed keys, the exact mass,
or index heads. `Lesson` holds what a training step teaches, and collects the losses of its layers.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from trifocal.models import DecoderLM
from trifocal.nn import NSAttention, SelectedAttention
from trifocal.nn.rope import rotary_tables, rotate
from trifocal.ops import Geometry, compressed_attention, nsa_attention, select_blocks, selected_attention
from trifocal.ops.choice_loss import hash_numbers
from trifocal.ops.reference import full_precision, importance

INDEX_DIM = 64
FLOOR, LEAST_MASS = 1e-6, 1e-9


@dataclass
class Lesson:
    """What the layers do beside attending.

    Attributes:
        chooser: `"compressed"`, `"exact"`, `"mass"` or `"maximum"`; the last two are index heads.
        weight: Of the loss; 0 teaches nothing.
        stretch: One query in so many is sampled.
        heads: Index heads of each KV head, each with a bias of its own. Their maxima, or their masses, are joined.
        step: Draws the queries.
        measure: Whether the share of the exact mass that the choice holds is measured.
        losses: Of the layers, a scalar each.
        held: Of the layers: the share of the mass of free blocks that the choice holds, and the exact choice.
    """

    chooser: str = "compressed"
    weight: float = 0.0
    stretch: int = 256
    heads: int = 1
    step: int = 0
    measure: bool = False
    losses: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)


def sampled(batch: int, tokens: int, stretch: int, step: int, layer: int, device: torch.device) -> Tensor:
    """One position of each stretch, [B, M]."""
    first = torch.arange(0, tokens, stretch, device=device)
    key = torch.arange(batch, device=device)[:, None] * (tokens // stretch + 1) + torch.arange(
        len(first), device=device
    )
    drawn = hash_numbers(hash_numbers(key + (layer + 1) * 0x9E3779B9) + step) % stretch
    return (first + drawn).clamp(max=tokens - 1)


def free_blocks(positions: Tensor, blocks: int, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Candidates that are not forced, [B, M, J], and whether a query has more of them than free places, [B, M]."""
    own = positions[..., None] // geometry.selection_block_size
    block = torch.arange(blocks, device=positions.device)
    free = (block >= geometry.num_initial_blocks) & (block <= own - geometry.num_local_blocks)
    places = geometry.num_selected_blocks - geometry.num_initial_blocks - geometry.num_local_blocks
    return free, free.sum(-1) > places


def at(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of x, [B, T, ...], at positions [B, M]."""
    return x[torch.arange(len(x), device=x.device)[:, None], positions]


def token_scores(q: Tensor, k: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Scores of queries [B, M, G, R, D] and all keys [B, S, G, D], fp32, [B, G, R, M, S]; the future is -inf."""
    scores = torch.einsum("bmgrd,bsgd->bgrms", q.float(), k.float()) * scale
    future = torch.arange(k.shape[1], device=k.device) > positions[..., None]
    return scores.masked_fill(future[:, None, None], -torch.inf)


def by_block(x: Tensor, size: int, value: float) -> Tensor:
    """[..., S] -> [..., J, size]."""
    return F.pad(x, (0, -x.shape[-1] % size), value=value).unflatten(-1, (-1, size))


@torch.no_grad()
def teacher_masses(q: Tensor, k: Tensor, positions: Tensor, geometry: Geometry) -> Tensor:
    """Attention of q [B, M, H, D] over the whole past in k [B, S, G, D], mean over heads: [B, M, G, J]."""
    q = q.unflatten(2, (k.shape[2], -1))
    p = token_scores(q, k, positions, q.shape[-1] ** -0.5).softmax(-1)
    return by_block(p.mean(2), geometry.selection_block_size, 0.0).sum(-1).transpose(1, 2)


def index_importance(
    q: Tensor, k: Tensor, bias: Tensor, positions: Tensor, free: Tensor, geometry: Geometry, score: str
) -> Tensor:
    """Shares of the free blocks by index heads, [B, M, G, J]: q [B, M, G, R, Di], k [B, S, Di], bias [B, M, G, R]."""
    k = k[:, :, None].expand(-1, -1, q.shape[2], -1)
    scores = token_scores(q, k, positions, q.shape[-1] ** -0.5)
    blocks = by_block(scores, geometry.selection_block_size, -torch.inf)
    if score == "maximum":
        blocks = (blocks.amax(-1) + bias.permute(0, 2, 3, 1)[..., None].float()).amax(2)
        return blocks.transpose(1, 2).masked_fill(~free[:, :, None], -1e30).softmax(-1)
    blocks = blocks.logsumexp(-1).transpose(1, 3)
    # A mixture of the heads' masses: [B, M, R, G, J].
    return blocks.masked_fill(~free[:, :, None, None], -1e30).softmax(-1).mean(2)


def compressed_importance(q: Tensor, k_cmp: Tensor, positions: Tensor, blocks: int, geometry: Geometry) -> Tensor:
    """Importance of each block by compressed keys, mean over heads: [B, M, G, J]."""
    q = q.unflatten(2, (k_cmp.shape[2], -1))
    scores = torch.einsum("bmgrd,bcgd->bgrmc", q.float(), k_cmp.float()) * q.shape[-1] ** -0.5
    last = torch.arange(k_cmp.shape[1], device=q.device) * geometry.compression_stride
    unseen = last + (geometry.compression_block_size - 1) > positions[..., None]
    # Finite, so that a query without a visible block has no NaN; such a query is not eligible.
    p = scores.masked_fill(unseen[:, None, None], -1e30).softmax(-1).mean(2)
    return importance(p, geometry, blocks).transpose(1, 2)


def divergence(m: Tensor, i: Tensor, free: Tensor, eligible: Tensor) -> Tensor:
    """Mean KL of the teacher's masses and the student's importance, both over free blocks: [B, M, G, J] -> scalar."""
    free = free[:, :, None]
    m, i = m * free, (i + FLOOR) * free
    total = m.sum(-1, keepdim=True)
    counts = eligible[:, :, None] & (total[..., 0] > LEAST_MASS)
    m, i = m / total.clamp(min=LEAST_MASS), i / i.sum(-1, keepdim=True).clamp(min=FLOOR)
    terms = torch.xlogy(m, m) - m * i.clamp(min=1e-30).log()
    return (terms.sum(-1) * counts).sum() / (eligible.sum() * m.shape[2]).clamp(min=1)


@torch.no_grad()
def held_masses(m: Tensor, chosen: Tensor, free: Tensor, eligible: Tensor, geometry: Geometry) -> Tensor:
    """Shares of the mass of free blocks that a choice [B, M, G, N] and the exact choice hold, and their ratio, [3]."""
    m = m * free[:, :, None]
    index = chosen.long().masked_fill(chosen < 0, m.shape[-1])
    taken = torch.zeros(*m.shape[:-1], m.shape[-1] + 1, dtype=torch.bool, device=m.device)
    taken = taken.scatter_(-1, index, True)[..., :-1]
    places = geometry.num_selected_blocks - geometry.num_initial_blocks - geometry.num_local_blocks
    total = m.sum(-1).clamp(min=LEAST_MASS)
    ours = (m * taken).sum(-1) / total
    best = m.topk(min(places, m.shape[-1]), -1).values.sum(-1) / total
    weight = eligible[:, :, None].float() / (eligible.sum() * m.shape[2]).clamp(min=1)
    return torch.stack(
        [(ours * weight).sum(), (best * weight).sum(), (ours / best.clamp(min=LEAST_MASS) * weight).sum()]
    )


def tokens_as_blocks(geometry: Geometry) -> Geometry:
    """The geometry in which each token is a compressed block: its choice is by exact mass."""
    return Geometry(
        compression_block_size=1,
        compression_stride=1,
        selection_block_size=geometry.selection_block_size,
        num_selected_blocks=geometry.num_selected_blocks,
        num_initial_blocks=geometry.num_initial_blocks,
        num_local_blocks=geometry.num_local_blocks,
        window_size=geometry.window_size,
    )


@torch.no_grad()
def choose_by_mass(q: Tensor, k: Tensor, geometry: Geometry) -> Tensor:
    """The blocks with the most softmax mass, summed over the heads of a group: q [B, T, H, D], k [B, T, G, D]."""
    every = tokens_as_blocks(geometry)
    _, lse = compressed_attention(q, k, k[..., :16], every)
    return select_blocks(q, k, lse, every)


@triton.jit
def block_maxima(q, k, bias, out, tokens, blocks, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
                 SIZE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The largest score of each block before a query's own: q [B, T, G, R, D], k [B, T, D], out [B, T, G, J]."""
    batch, group = tl.program_id(1).to(tl.int64) // GROUPS, tl.program_id(1) % GROUPS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists, column, key = row < tokens, tl.arange(0, D), tl.arange(0, SIZE)
    q_row = ((batch * tokens + row) * GROUPS + group) * HEADS
    end = tl.minimum((tl.program_id(0) * ROWS + ROWS - 1) // SIZE, blocks - 1)
    for block in range(end):
        k_offsets = (batch * tokens + block * SIZE + key)[None, :] * D + column[:, None]
        keys = tl.load(k + k_offsets)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        for head in tl.static_range(HEADS):
            rows = tl.load(q + (q_row + head)[:, None] * D + column[None, :], mask=exists[:, None], other=0.0)
            top = tl.max(tl.dot(rows, keys, input_precision="ieee"), 1)
            best = tl.maximum(best, top + tl.load(bias + q_row + head, mask=exists, other=0.0))
        tl.store(out + ((batch * tokens + row) * GROUPS + group) * blocks + block, best, mask=exists)


@torch.no_grad()
def choose_by_maximum(q: Tensor, k: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
    """The blocks with the largest token score: q [B, T, G, R, Di], k [B, T, Di], bias [B, T, G, R]."""
    batch, tokens, groups, heads, width = q.shape
    size, slots = geometry.selection_block_size, geometry.num_selected_blocks
    blocks = geometry.num_selection_blocks(tokens)
    position = torch.arange(tokens, device=q.device)
    # Scores are q . k / sqrt(Di); a bias is in their unit.
    bias = (bias.float() * width**0.5).contiguous()
    if q.is_cuda:
        # Blocks behind the query's tile are not written: they are masked below.
        best = q.new_empty(batch, tokens, groups, blocks, dtype=torch.float32)
        grid = (triton.cdiv(tokens, 128), batch * groups)
        q, k = q.contiguous(), k.contiguous()
        block_maxima[grid](q, k, bias, best, tokens, blocks, heads, groups, width, size, 128, num_warps=8)
    else:
        scores = torch.einsum("btgrd,bsd->btgrs", q, k).masked_fill(
            (position > position[:, None])[:, None, None], -torch.inf
        )
        best = (by_block(scores, size, -torch.inf).amax(-1) + bias[..., None]).amax(3)
    block, own = torch.arange(blocks, device=q.device), (position // size)[:, None, None]
    best = best.masked_fill(
        (block < geometry.num_initial_blocks) | (block > own - geometry.num_local_blocks), torch.inf
    )
    best = best.masked_fill(block > own, -torch.inf)
    value, index = best.topk(min(slots, blocks), -1)
    index = index.masked_fill(value == -torch.inf, blocks).sort(-1).values
    chosen = index.masked_fill(index == blocks, -1).int()
    return F.pad(chosen, (0, slots - chosen.shape[-1]), value=-1)


class Index(nn.Module):
    """Index queries of each KV head and one index key a token, rotated; their input is detached."""

    def __init__(self, attention: nn.Module, heads: int, seed: int) -> None:
        super().__init__()
        dim = attention.q_proj.in_features
        self.theta, self.groups, self.heads = attention.rope_theta, attention.num_kv_heads, heads
        self.q_proj = nn.Linear(dim, self.groups * heads * INDEX_DIM, bias=False)
        self.k_proj = nn.Linear(dim, INDEX_DIM, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for linear in (self.q_proj, self.k_proj):
            nn.init.normal_(linear.weight, std=dim**-0.5, generator=generator)
        self.bias = nn.Linear(dim, self.groups * heads) if heads > 1 else None
        if self.bias is not None:
            nn.init.zeros_(self.bias.weight)
            nn.init.zeros_(self.bias.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.detach()
        positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = rotary_tables(positions, INDEX_DIM, self.theta, torch.float32)
        q = rotate(self.q_proj(x).unflatten(-1, (self.groups * self.heads, INDEX_DIM)), cos, sin)
        k = rotate(self.k_proj(x)[:, :, None], cos, sin)[:, :, 0]
        q = q.unflatten(2, (self.groups, self.heads))
        bias = q.new_zeros(q.shape[:-1]) if self.bias is None else self.bias(x).view(q.shape[:-1])
        return q, k, bias


class _Chooses:
    """What both layers share: the choice, the loss, the measure."""

    lesson: Lesson
    layer: int
    index: Index | None

    def choose(self, x: Tensor, q: Tensor, k_slc: Tensor, k_cmp: Tensor, length: int) -> Tensor | None:
        lesson, geometry = self.lesson, self.geometry
        blocks = geometry.num_selection_blocks(x.shape[1])
        q_idx = k_idx = bias = None
        if self.index is not None:
            q_idx, k_idx, bias = self.index(x)
        if blocks <= geometry.num_selected_blocks:
            chosen = None
        elif lesson.chooser == "exact":
            chosen = choose_by_mass(q.detach(), k_slc.detach(), geometry)
        elif lesson.chooser == "mass":
            keys = k_idx.detach()[:, :, None].expand(-1, -1, q_idx.shape[2], -1).contiguous()
            chosen = choose_by_mass(q_idx.detach().flatten(2, 3), keys, geometry)
        elif lesson.chooser == "maximum":
            chosen = choose_by_maximum(q_idx.detach(), k_idx.detach(), bias.detach(), geometry)
        elif lesson.measure or isinstance(self, SelectedAttention):
            with torch.no_grad():
                _, lse = compressed_attention(q, k_cmp, k_cmp[..., :16], geometry)
                chosen = select_blocks(q, k_cmp, lse, geometry)
        else:
            chosen = None
        taught = lesson.weight > 0 and torch.is_grad_enabled()
        if (taught or lesson.measure) and blocks > geometry.num_selected_blocks:
            positions = sampled(*x.shape[:2], lesson.stretch, lesson.step, self.layer, x.device)
            free, eligible = free_blocks(positions, blocks, geometry)
            with full_precision(x):
                q_at = at(q.detach(), positions)
                m = teacher_masses(q_at, k_slc.detach(), positions, geometry)
                if lesson.measure:
                    lesson.held.append(held_masses(m, at(chosen, positions), free, eligible, geometry))
            if taught:
                if self.index is None:
                    k_cmp = self.taught_keys(x, length)
                with full_precision(x):
                    if self.index is None:
                        i = compressed_importance(q_at, k_cmp, positions, blocks, geometry)
                    else:
                        asked, biases = at(q_idx, positions), at(bias, positions)
                        i = index_importance(asked, k_idx, biases, positions, free, geometry, lesson.chooser)
                    lesson.losses.append(divergence(m, i, free, eligible))
        return chosen

    def taught_keys(self, x: Tensor, length: int) -> Tensor:
        """Compressed keys whose gradient reaches their projection and φ alone."""
        width = self.num_kv_heads * self.head_dim
        raw = F.linear(x.detach(), self.k_proj.weight[:width]).unflatten(-1, (self.num_kv_heads, -1))
        return self._compressed_keys(raw, None, self.rotary_tables(x))


class Probe(_Chooses, NSAttention):
    """`NSAttention` with another chooser. No documents, no decoding."""

    def forward(self, x: Tensor, *, rotary: Any = None, cu_seqlens: None = None) -> Tensor:
        q, keys, values, [logits] = self._project(x, self.gate.proj)
        gates = self.gate(x, logits)
        (k_cmp, k_slc, k_win), (v_cmp, v_slc, v_win) = keys, values
        q, k_slc, k_win = (rotate(one, rotary.cos, rotary.sin) for one in (q, k_slc, k_win))
        k_cmp, v_cmp = self._compressed_keys(k_cmp, None, rotary), self.v_compressor(v_cmp)
        chosen = self.choose(x, q, k_slc, k_cmp, x.shape[1])
        inputs = (k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
        o = nsa_attention(q, *inputs, gates, self.geometry, selected_blocks=chosen, backend=self.backend)
        return self.o_proj(o.flatten(2))


class ProbeSelected(_Chooses, SelectedAttention):
    """`SelectedAttention` with another chooser. No documents, no decoding."""

    def forward(self, x: Tensor, *, rotary: Any = None, cu_seqlens: None = None) -> Tensor:
        q, [k], [v], _ = self._project(x)
        with torch.no_grad():
            k_cmp = self._compressed_keys(k, None, rotary)
        q, k = (rotate(one, rotary.cos, rotary.sin) for one in (q, k))
        chosen = self.choose(x, q, k, k_cmp, x.shape[1])
        if chosen is None:
            blocks = self.geometry.num_selection_blocks(x.shape[1])
            block = torch.arange(self.geometry.num_selected_blocks, device=x.device, dtype=torch.int32)
            chosen = block.where(block < blocks, -1).expand(*x.shape[:2], self.num_kv_heads, -1)
        return self.o_proj(selected_attention(q, k, v, chosen, self.geometry, backend=self.backend).flatten(2))


def teach(model: DecoderLM, lesson: Lesson, seed: int) -> list[nn.Parameter]:
    """Give each sparse layer of a model the chooser of a lesson; the index parameters, which are new."""
    new: list[nn.Parameter] = []
    for layer, attention in enumerate(model.attention_layers()):
        if isinstance(attention, NSAttention):
            attention.__class__ = Probe
        elif isinstance(attention, SelectedAttention):
            attention.__class__ = ProbeSelected
        else:
            continue
        attention.lesson, attention.layer, attention.index = lesson, layer, None
        if lesson.chooser in ("mass", "maximum"):
            attention.index = Index(attention, lesson.heads, 1000 * seed + layer)
            new += attention.index.parameters()
    return new
