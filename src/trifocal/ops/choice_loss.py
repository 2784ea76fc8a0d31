"""The loss that teaches an index to choose blocks: it follows the selected branch's own attention over the whole past.

On a sample of the queries, the teacher m is the attention of the selected branch's queries and keys over every token of
the past, summed by selection block; the student i is the softmax over the scores by which the index chooses. Both are
shares of the free candidates: of the blocks in the past that are not forced. The teacher has no gradient.

    KL( m / sum m  ||  (i + 1e-6) / sum (i + 1e-6) )

Shape letters as in DESIGN.md, and M: sampled queries of a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trifocal.ops import operators
from trifocal.ops.dispatch import resolve
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, compressed_layout, longest_document
from trifocal.ops.reference import accumulator, block_grid, chosen_mask, full_precision, importance

FLOOR = 1e-6
"""Added to the student's importance: a block without a visible compressed key has none."""
LEAST_MASS = 1e-9
"""A query with less mass on its free candidates teaches nothing."""
# Numbers of the largest tensor that exist at a time: scores of a teacher or student, or blocks of both.
_MAX_NUMBERS = 2**28
# Tensors of one number a query, group and block that exist beside one another on the kernels.
_TENSORS_OF_BLOCKS = 2
_MASK = 2**32 - 1
# 2**32 over the golden ratio, as a signed number of 32 bits: the compiler multiplies places by it in no more.
_GOLDEN = 0x9E3779B9 - 2**32


class Sample(NamedTuple):
    """Sampled queries of a layer; from `sample_queries` those of all, with one dimension more in front.

    Attributes:
        tokens: Their tokens, [B, M], int64, ascending; no two eligible ones are the same.
        starts: The first token of each one's document, [B, M].
        eligible: Whether a query has more free candidates than free places, [B, M]; the others teach nothing.
    """

    tokens: Tensor
    starts: Tensor
    eligible: Tensor


def stretch_keys(tokens: Tensor, row_length: int, stretch: int) -> Tensor:
    """A number for each stretch of each row, tokens [B, T] -> [rows, stretches], int64, from its tokens and their
    places: whatever batch the rows of `row_length` are in. A row's last stretch may be shorter.
    """
    places = hash_numbers(torch.arange(row_length, device=tokens.device))
    mixed = hash_numbers(tokens.reshape(-1, row_length).long() + places)
    return torch.nn.functional.pad(mixed, (0, -row_length % stretch)).unflatten(-1, (-1, stretch)).sum(-1) & _MASK


def sample_queries(
    tokens: Tensor,
    positions: Tensor,
    step: Tensor | int,
    layers: int,
    geometry: Geometry,
    row_length: int,
    stretch: int,
) -> Sample:
    """Draw one query of each stretch for every layer: by a hash of the stretch, the training step and the layer.

    `tokens` are as in `stretch_keys`. `positions`, of each token in its document, are [T], the same for all rows, or
    those of all rows laid end to end; `step` is a scalar on the device, so that recorded graphs draw anew in each. The
    result is [layers, rows, stretches], or [layers, 1, rows * stretches] with positions of several rows.
    """
    keys = stretch_keys(tokens, row_length, stretch)
    first = torch.arange(0, row_length, stretch, device=keys.device)
    layer = torch.arange(1, layers + 1, device=keys.device)[:, None, None]
    drawn = hash_numbers(keys + hash_numbers(layer * _GOLDEN) + hash_numbers(first[:1] + step))
    place = first + drawn % stretch
    exists = place < row_length
    place = place.clamp(max=row_length - 1)
    if positions.shape[0] != row_length:
        place = (place + row_length * torch.arange(len(keys), device=keys.device)[:, None]).view(layers, 1, -1)
        exists = exists.view(layers, 1, -1)
    return _sample_at(place, exists, positions, geometry)


def draw_queries(positions: Tensor, rows: int, layers: int, geometry: Geometry, stretch: int) -> Sample:
    """Draw one query of each stretch for every layer, by PyTorch's generator: [layers, rows, stretches]; `positions`,
    of each token in its document, are [T], the same for all rows.
    """
    row_length = len(positions)
    first = torch.arange(0, row_length, stretch, device=positions.device)
    place = first + torch.randint(stretch, (layers, rows, len(first)), device=positions.device)
    return _sample_at(place.clamp(max=row_length - 1), place < row_length, positions, geometry)


def _sample_at(place: Tensor, exists: Tensor, positions: Tensor, geometry: Geometry) -> Sample:
    """The queries at places of a row, which lie at these positions in their documents."""
    position = positions.long()[place]
    own = position // geometry.selection_block_size
    eligible = exists & (num_free(own, geometry) > free_places(geometry))
    return Sample(place, place - position, eligible)


def num_free(own_block: Tensor, geometry: Geometry) -> Tensor:
    """Candidates that are not forced, of queries in these blocks."""
    return (own_block + 1 - geometry.num_local_blocks - geometry.num_initial_blocks).clamp(min=0)


def free_places(geometry: Geometry) -> int:
    """Blocks that a query chooses beside the forced ones."""
    return geometry.num_selected_blocks - geometry.num_initial_blocks - geometry.num_local_blocks


def choice_loss(
    q: Tensor,
    k: Tensor,
    sample: Sample,
    geometry: Geometry,
    documents: Documents | None = None,
    *,
    q_idx: Tensor,
    k_idx: Tensor,
    backend: str = "auto",
) -> Tensor:
    """The loss and the recall of the choice, each summed over eligible sampled queries and groups: [2], fp32 (fp64 for
    fp64).

    The teacher is the layer's rotated queries q [B, T, H, D], the last T positions of the S keys, and the rotated keys
    of the selected branch k [B, S, G, D]. The student is an index, q_idx [B, T, G, Di] and k_idx [B, S, Di]: the
    gradient of the loss reaches these and nothing else. The recall of a query is the mass of the free blocks that the
    student would choose, as a share of what the teacher would choose; its gradient is zero.
    """
    q, k = q.detach(), k.detach()
    batch, num_queries = sample.tokens.shape
    kernels = resolve("choice_loss", backend, q, k, geometry) == "triton"
    widest = q.shape[2] * k.shape[1]
    if kernels:
        widest = _TENSORS_OF_BLOCKS * k.shape[2] * num_blocks(k.shape[1], geometry, documents)
    parts = -(-batch * num_queries * widest // _MAX_NUMBERS)

    args = (geometry, documents, kernels, q, k, q_idx, k_idx)
    if parts == 1:
        return _loss_of(sample, *args)
    cut = zip(*(field.chunk(parts, dim=1) for field in sample), strict=True)
    # What backward needs is made again there, so that it exists for one part at a time.
    figures = [checkpoint(_loss_of, Sample(*part), *args, use_reentrant=False) for part in cut]
    return torch.stack(figures).sum(0)


def _loss_of(
    sample: Sample,
    geometry: Geometry,
    documents: Documents | None,
    kernels: bool,
    q: Tensor,
    k: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
) -> Tensor:
    blocks = num_blocks(k.shape[1], geometry, documents)
    if kernels:
        rules = (geometry, blocks, FLOOR, LEAST_MASS, documents)
        return operators.index_loss(q_idx, k_idx, q, k, *sample, *rules)[0].sum((1, 2, 3))
    with full_precision(q):
        free = free_blocks(sample, geometry, blocks)
        mass = teacher_masses(q, k, sample, geometry, documents)
        # An index chooses by its scores: many shares may be 0, and equal.
        scores = index_scores(q_idx, k_idx, sample, geometry, documents)
        # A share of the free candidates: what lies in forced blocks is not the index's to find.
        student = scores.masked_fill(~free[:, :, None], torch.finfo(scores.dtype).min).softmax(-1)
        loss = divergence(mass, student, free, sample.eligible)
        return torch.stack((loss, recall(mass, scores.detach(), free, sample.eligible, geometry)))


def divergence(mass: Tensor, student: Tensor, free: Tensor, eligible: Tensor) -> Tensor:
    """KL of the teacher's mass and the student's importance [B, M, G, J] over free blocks [B, M, J], summed over
    eligible queries [B, M] and groups.
    """
    free = free[:, :, None]
    mass, student = mass.where(free, 0), (student + FLOOR).where(free, 0)
    total = mass.sum(-1, keepdim=True)
    counts = eligible[:, :, None] & (total[..., 0] > LEAST_MASS)
    mass = mass / total.clamp(min=LEAST_MASS)
    student = student / student.sum(-1, keepdim=True).clamp(min=FLOOR)
    # Blocks that are not free have no mass: their terms are 0, and so is the gradient of their logarithm.
    terms = torch.xlogy(mass, mass) - mass * student.where(free, 1).log()
    return terms.sum(-1).where(counts, 0).sum()


def recall(mass: Tensor, ranked: Tensor, free: Tensor, eligible: Tensor, geometry: Geometry) -> Tensor:
    """Recall of the choice by `ranked` [B, M, G, J], importance or scores, summed; the rest as in `divergence`."""
    places = min(free_places(geometry), mass.shape[-1])
    # Stable: of equal ones the lower, as the choice takes it.
    order = ranked.where(free[:, :, None], -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    chosen = order[..., :places]
    return choice_shares(mass, chosen, free, eligible, geometry)[0].sum()


def choice_shares(
    mass: Tensor, chosen: Tensor, free: Tensor, eligible: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Mass of the free blocks that a choice holds, and that the exact choice, of most mass, holds, as shares of the
    latter's sum, by block, [B, M, G, J]: the first add up to the recall, the second to 1; all are 0 for a query that
    is not eligible, or has no mass there. Of `chosen`, [B, M, G, N], those not free do not count; the rest as in
    `divergence`.
    """
    blocks = mass.shape[-1]
    mass = mass.where(free[:, :, None], 0)
    best = mass * chosen_mask(mass.topk(min(free_places(geometry), blocks), -1).indices, blocks)
    total = best.sum(-1, keepdim=True)
    counts = eligible[:, :, None, None] & (total > LEAST_MASS)
    held, best = (
        (x / total.clamp(min=LEAST_MASS)).where(counts, 0) for x in (mass * chosen_mask(chosen, blocks), best)
    )
    return held, best


def num_blocks(num_tokens: int, geometry: Geometry, documents: Documents | None) -> int:
    """Selection blocks that a document can have."""
    return geometry.num_selection_blocks(longest_document(num_tokens, documents))


def free_blocks(sample: Sample, geometry: Geometry, blocks: int) -> Tensor:
    """Candidates that are not forced, by their numbers in each query's document, [B, M, J]."""
    own = (sample.tokens - sample.starts)[..., None] // geometry.selection_block_size
    block = torch.arange(blocks, device=own.device)
    return (block >= geometry.num_initial_blocks) & (block <= own - geometry.num_local_blocks)


@torch.no_grad()
def teacher_masses(q: Tensor, k: Tensor, sample: Sample, geometry: Geometry, documents: Documents | None) -> Tensor:
    """Attention over the whole past by selection block, the mean over a group's heads: [B, M, G, J]."""
    q_at = _sampled(q, k.shape[1], sample).unflatten(2, (k.shape[2], -1))
    scores = _token_scores(q_at, k, sample, geometry, documents)
    mass = scores.flatten(-2).softmax(-1).mean(2).unflatten(-1, scores.shape[-2:]).sum(-1)
    return _own_blocks(mass.transpose(1, 2), sample, geometry, documents, k.shape[1])


def index_scores(
    q_idx: Tensor, k_idx: Tensor, sample: Sample, geometry: Geometry, documents: Documents | None
) -> Tensor:
    """The largest scaled token score of each block, [B, M, G, J]; the first such token gets the gradient."""
    k = k_idx[:, :, None].expand(-1, -1, q_idx.shape[2], -1)
    scores = _token_scores(_sampled(q_idx, k_idx.shape[1], sample)[:, :, :, None], k, sample, geometry, documents)
    return _own_blocks(scores[:, :, 0].max(-1).values.transpose(1, 2), sample, geometry, documents, k.shape[1])


def compressed_importance(
    q: Tensor, k_cmp: Tensor, sample: Sample, geometry: Geometry, documents: Documents | None, num_tokens: int
) -> Tensor:
    """Importance by the compressed keys of `num_tokens` tokens, the mean over a group's heads: [B, M, G, J]."""
    exact, position = accumulator(q), sample.tokens - sample.starts
    q_at = _sampled(q, num_tokens, sample).unflatten(2, (k_cmp.shape[2], -1)).to(exact)
    scores = torch.einsum("bmgrd,bcgd->bgrmc", q_at, k_cmp.to(exact)) * q.shape[-1] ** -0.5
    block = torch.arange(k_cmp.shape[1], device=q.device)
    last_token = block * geometry.compression_stride + (geometry.compression_block_size - 1)
    unseen = last_token > position[..., None]
    if documents is not None:
        layout, ids = compressed_layout(documents, k_cmp.shape[1], geometry), documents.ids[sample.tokens]
        last_token = layout.starts + (geometry.compression_block_size - 1)
        unseen = (last_token > position[..., None]) | (layout.ids != ids[..., None])
    # A finite number: a query that sees no block is not eligible, and its gradient must not be NaN.
    p = scores.masked_fill(unseen[:, None, None], torch.finfo(exact).min).softmax(-1).mean(2)
    if documents is not None:
        own = torch.arange(geometry.num_compressed_blocks(longest_document(num_tokens, documents)), device=q.device)
        p = _gather(p, layout.first_blocks[ids][..., None] + own)
    return importance(p, geometry, num_blocks(num_tokens, geometry, documents)).transpose(1, 2)


def _sampled(q: Tensor, num_tokens: int, sample: Sample) -> Tensor:
    """Queries of a sample, [B, M, ...], of q [B, T, ...], the last T of `num_tokens`."""
    rows = torch.arange(q.shape[0], device=q.device)[:, None]
    return q[rows, sample.tokens - (num_tokens - q.shape[1])]


def _token_scores(q: Tensor, k: Tensor, sample: Sample, geometry: Geometry, documents: Documents | None) -> Tensor:
    """Scaled scores of keys [B, S, G, D] by sampled queries [B, M, G, R, D]: [B, G, R, M, blocks, l'], with the blocks
    of all documents one after the other, and -inf where a query does not see a key.
    """
    grid = block_grid(k.shape[1], geometry.selection_block_size, documents, k.device)
    exact = accumulator(q)
    scores = torch.einsum("bmgrd,bjlgd->bgrmjl", q.to(exact), k[:, grid.tokens].to(exact)) * q.shape[-1] ** -0.5
    tokens, starts = sample.tokens[..., None, None], sample.starts[..., None, None]
    seen = grid.filled & (grid.tokens >= starts) & (grid.tokens <= tokens)
    return scores.masked_fill(~seen[:, None, None], -torch.inf)


def _own_blocks(x: Tensor, sample: Sample, geometry: Geometry, documents: Documents | None, num_tokens: int) -> Tensor:
    """From the blocks of all documents, [B, M, G, blocks], to those of each query's own, [B, M, G, J]."""
    if documents is None:
        return x
    grid = block_grid(num_tokens, geometry.selection_block_size, documents, x.device)
    own = torch.arange(num_blocks(num_tokens, geometry, documents), device=x.device)
    # What lies behind the document is not free.
    blocks = grid.first_blocks[documents.ids[sample.tokens]][..., None] + own
    return _gather(x.transpose(1, 2), blocks).transpose(1, 2)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """[B, G, M, C] and [B, M, K] -> [B, G, M, K]; 0 for an index behind the last column."""
    inside = index < x.shape[-1]
    return x.gather(-1, index.where(inside, 0)[:, None].expand(-1, x.shape[1], -1, -1)).where(inside[:, None], 0)


def hash_numbers(x: Tensor) -> Tensor:
    """Mix the low 32 bits of int64 numbers: the finalizer of MurmurHash3."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
