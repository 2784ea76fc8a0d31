"""An independent oracle of the attention: float64, one query at a time, straight from the table in DESIGN.md.

It imports nothing of the package. Every quantity is written as in its definition, token by token, with no
thought for speed: the tokens of a block are a `range`, an overlap is the length of an intersection, and the keys that
a query may see are a list of indices. Autograd differentiates through it.

Documents are given as their lengths; `None` means that every row of the batch is one document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trifocal.ops.geometry import Geometry

Lengths = Sequence[int] | None
Visible = Callable[[int, int], list[Any]]


class Span(NamedTuple):
    """A half-open range of absolute tokens, and the document that it lies in."""

    start: int
    end: int
    document: int

    @property
    def tokens(self) -> range:
        return range(self.start, self.end)


def document_spans(num_tokens: int, lengths: Lengths) -> list[Span]:
    spans, start = [], 0
    for document, length in enumerate([num_tokens] if lengths is None else lengths):
        spans.append(Span(start, start + length, document))
        start += length
    assert start == num_tokens, (start, num_tokens)
    return spans


def compression_spans(geometry: Geometry, num_tokens: int, lengths: Lengths = None) -> list[Span]:
    """The tokens of every compressed block, document after document."""
    size, stride = geometry.compression_block_size, geometry.compression_stride
    return [
        Span(first, first + size, document.document)
        for document in document_spans(num_tokens, lengths)
        for first in range(document.start, document.end, stride)
        if first + size <= document.end
    ]


def document_at(position: int, num_tokens: int, lengths: Lengths) -> Span:
    """The document that holds an absolute position."""
    return next(span for span in document_spans(num_tokens, lengths) if position in span.tokens)


def mean_compress(x: Tensor, geometry: Geometry, lengths: Lengths = None) -> Tensor:
    x = x.double()
    blocks = [
        sum((x[:, s] for s in span.tokens), torch.zeros_like(x[:, 0])) / geometry.compression_block_size
        for span in compression_spans(geometry, x.shape[1], lengths)
    ]
    return torch.stack(blocks, 1) if blocks else x[:, :0] * 1.0


def attend(q_HD: Tensor, k_NGD: Tensor, v_NGV: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query over the keys that it may see: o [H, V] and lse [H]; zeros and -inf where there are none."""
    num_heads, num_groups = q_HD.shape[0], k_NGD.shape[1]
    o, lse = [], []
    for head in range(num_heads):
        group = head // (num_heads // num_groups)
        if k_NGD.shape[0] == 0:
            nothing = 0.0 * q_HD[head].sum()
            o.append(nothing.expand(v_NGV.shape[-1]))
            lse.append(nothing - math.inf)
            continue
        score = scale * (k_NGD[:, group] @ q_HD[head])
        top = score.max().detach()
        weight = (score - top).exp()
        o.append((weight / weight.sum()) @ v_NGV[:, group])
        lse.append(weight.sum().log() + top)
    return torch.stack(o), torch.stack(lse)


def attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float | None, visible: Visible) -> tuple[Tensor, Tensor]:
    """Every query over `visible(batch, query)`, which gives one list of key indices, or one list a group."""
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = q.shape[2] // k.shape[2]
    rows_o, rows_lse = [], []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            seen = visible(b, t)
            if not seen or isinstance(seen[0], int):
                seen = [seen] * k.shape[2]
            parts = [
                attend(q[b, t, g * heads : (g + 1) * heads], k[b, seen[g], g : g + 1], v[b, seen[g], g : g + 1], scale)
                for g in range(k.shape[2])
            ]
            rows_o.append(torch.cat([o for o, _ in parts]))
            rows_lse.append(torch.cat([lse for _, lse in parts]))
    o = torch.stack(rows_o).unflatten(0, q.shape[:2])
    return o, torch.stack(rows_lse).unflatten(0, q.shape[:2])


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    geometry: Geometry,
    *,
    num_keys: int | None = None,
    scale: float | None = None,
    lengths: Lengths = None,
) -> tuple[Tensor, Tensor]:
    num_keys = q.shape[1] if num_keys is None else num_keys
    spans = compression_spans(geometry, num_keys, lengths)

    def visible(_: int, t: int) -> list[int]:
        position = num_keys - q.shape[1] + t
        document = document_at(position, num_keys, lengths).document
        return [i for i, span in enumerate(spans) if span.document == document and span.end - 1 <= position]

    return attend_all(q, k_cmp, v_cmp, scale, visible)


def importance(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    geometry: Geometry,
    *,
    num_keys: int | None = None,
    scale: float | None = None,
    lengths: Lengths = None,
) -> list[list[list[list[float]]]]:
    """Importance of every candidate block: [batch][query][group][block], Eq. 9 and 10."""
    q, k_cmp, lse = q.detach().double(), k_cmp.detach().double(), lse.detach().double()
    num_keys = q.shape[1] if num_keys is None else num_keys
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    spans = compression_spans(geometry, num_keys, lengths)
    heads = q.shape[2] // k_cmp.shape[2]
    size = geometry.selection_block_size
    result = []
    for b in range(q.shape[0]):
        rows = []
        for t in range(q.shape[1]):
            position = num_keys - q.shape[1] + t
            document = document_at(position, num_keys, lengths)
            local = position - document.start
            groups = []
            for g in range(k_cmp.shape[2]):
                blocks = [0.0] * (local // size + 1)
                for i, span in enumerate(spans):
                    if span.document != document.document or span.end - 1 > position:
                        continue
                    total = 0.0
                    for h in range(g * heads, (g + 1) * heads):
                        total += math.exp(scale * float(q[b, t, h] @ k_cmp[b, i, g]) - float(lse[b, t, h]))
                    for j in range(len(blocks)):
                        tokens = range(document.start + j * size, document.start + (j + 1) * size)
                        overlap = len(set(tokens) & set(span.tokens))
                        blocks[j] += overlap / geometry.compression_stride * total
                groups.append(blocks)
            rows.append(groups)
        result.append(rows)
    return result


def forced_blocks(local_position: int, geometry: Geometry) -> set[int]:
    """The blocks that a query always takes; `local_position` counts from the start of its document."""
    own = local_position // geometry.selection_block_size
    first = set(range(geometry.num_initial_blocks))
    last = {own - back for back in range(geometry.num_local_blocks)}
    return {block for block in first | last if 0 <= block <= own}


def choose(scores: list[float], local_position: int, geometry: Geometry) -> list[int]:
    """The blocks of one query and group, ascending, from the importance of its candidates."""
    chosen = forced_blocks(local_position, geometry)
    rest = sorted((block for block in range(len(scores)) if block not in chosen), key=lambda j: (-scores[j], j))
    for block in rest:
        if len(chosen) < geometry.num_selected_blocks:
            chosen.add(block)
    return sorted(chosen)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    geometry: Geometry,
    *,
    num_keys: int | None = None,
    scale: float | None = None,
    lengths: Lengths = None,
) -> Tensor:
    num_keys = q.shape[1] if num_keys is None else num_keys
    scores = importance(q, k_cmp, lse, geometry, num_keys=num_keys, scale=scale, lengths=lengths)
    slots = geometry.num_selected_blocks
    shape = (q.shape[0], q.shape[1], k_cmp.shape[2], slots)
    selected = torch.full(shape, -1, dtype=torch.int32)
    for b in range(shape[0]):
        for t in range(shape[1]):
            position = num_keys - q.shape[1] + t
            local = position - document_at(position, num_keys, lengths).start
            for g in range(shape[2]):
                chosen = choose(scores[b][t][g], local, geometry)
                selected[b, t, g, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return selected


def select_blocks_by_index(q_idx: Tensor, k_idx: Tensor, geometry: Geometry, *, lengths: Lengths = None) -> Tensor:
    batch, num_queries, num_groups, _ = q_idx.shape
    num_keys, size = k_idx.shape[1], geometry.selection_block_size
    selected = torch.full((batch, num_queries, num_groups, geometry.num_selected_blocks), -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(num_queries):
            position = num_keys - num_queries + t
            document = document_at(position, num_keys, lengths)
            for g in range(num_groups):
                scores = [
                    float(q_idx[b, t, g].double() @ k_idx[b, s].double())
                    for s in document.tokens[: position - document.start + 1]
                ]
                best = [max(scores[first : first + size]) for first in range(0, len(scores), size)]
                chosen = choose(best, position - document.start, geometry)
                selected[b, t, g, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return selected


def choice_loss(
    q: Tensor,
    k: Tensor,
    queries: list[list[int]],
    geometry: Geometry,
    *,
    q_idx: Tensor,
    k_idx: Tensor,
    lengths: Lengths = None,
) -> Tensor:
    """The loss of the choice, summed over the queries of each row that have more free candidates than free places."""
    num_keys, size = k.shape[1], geometry.selection_block_size
    heads, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    q, k = q.detach(), k.detach()
    loss = q.new_zeros(())
    for b, row in enumerate(queries):
        for t in row:
            document = document_at(t, num_keys, lengths)
            past = range(document.start, t + 1)
            blocks = [past[first : first + size] for first in range(0, len(past), size)]
            free = sorted(set(range(len(blocks))) - forced_blocks(t - document.start, geometry))
            if len(free) <= geometry.num_selected_blocks - geometry.num_initial_blocks - geometry.num_local_blocks:
                continue
            for g in range(k.shape[2]):
                group = range(g * heads, (g + 1) * heads)
                mass = torch.stack([(k[b, list(past), g] @ q[b, t, h] * scale).softmax(0) for h in group]).mean(0)
                m = torch.stack(
                    [mass[block.start - document.start : block.stop - document.start].sum() for block in blocks]
                )
                best = [(k_idx[b, list(blocks[j])] @ q_idx[b, t, g]).max() * q_idx.shape[-1] ** -0.5 for j in free]
                i = torch.stack(best).softmax(0)
                m, i = m[free] / m[free].sum(), (i + 1e-6) / (i + 1e-6).sum()
                loss = loss + (m * (m.log() - i.log())).sum()
    return loss


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected_blocks: Tensor,
    geometry: Geometry,
    *,
    scale: float | None = None,
    lengths: Lengths = None,
) -> Tensor:
    num_keys, size = k.shape[1], geometry.selection_block_size

    def visible(b: int, t: int) -> list[list[int]]:
        position = num_keys - q.shape[1] + t
        document = document_at(position, num_keys, lengths)
        blocks = [[j for j in row if j >= 0] for row in selected_blocks[b, t].tolist()]
        return [
            [s for s in range(document.start, position + 1) if (s - document.start) // size in set(row)]
            for row in blocks
        ]

    return attend_all(q, k, v, scale, visible)[0]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window_size: int, *, scale: float | None = None, lengths: Lengths = None
) -> Tensor:
    num_keys = k.shape[1]

    def visible(_: int, t: int) -> list[int]:
        position = num_keys - q.shape[1] + t
        document = document_at(position, num_keys, lengths)
        return [s for s in document.tokens if position - window_size < s <= position]

    return attend_all(q, k, v, scale, visible)[0]


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
    *,
    scale: float | None = None,
    lengths: Lengths = None,
    selected_blocks: Tensor | None = None,
) -> Tensor:
    num_keys = k_slc.shape[1]
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, geometry, num_keys=num_keys, scale=scale, lengths=lengths)
    if selected_blocks is None:
        selected_blocks = select_blocks(q, k_cmp, lse, geometry, num_keys=num_keys, scale=scale, lengths=lengths)
    o_slc = selected_attention(q, k_slc, v_slc, selected_blocks, geometry, scale=scale, lengths=lengths)
    o_win = window_attention(q, k_win, v_win, geometry.window_size, scale=scale, lengths=lengths)
    gates = gates.double()
    return gates[..., 0:1] * o_cmp + gates[..., 1:2] * o_slc + gates[..., 2:3] * o_win
