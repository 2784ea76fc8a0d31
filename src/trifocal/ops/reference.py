"""The specification: Native Sparse Attention in plain PyTorch, on any device, in any float type.

Every branch is the same masked attention: a key is visible to the queries of its document from position `first` to
position `last`. Backward keeps q, k, v, o and the log-sum-exp, linear in length, and makes masks and probabilities
again: two tiles of scores, [B, H, T, keys] in fp32, forward and three backward. The arguments were checked by `api`.

Shape suffixes: B batch, T queries, S keys of any branch, G groups, R heads of a group, X rows (heads of a group ×
queries), D and V dims, C compressed and J selection blocks, K taps.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import (
    Documents,
    Rows,
    compressed_counts,
    compressed_layout,
    longest_document,
    place_compressed_blocks,
    take,
)

ALWAYS = torch.iinfo(torch.int32).max


class Visibility(NamedTuple):
    """Which query sees which key; a few integers a token instead of a mask, the same for a whole batch or for each row.

    Attributes:
        query_ids, query_positions: Document of each query and position in it, [1 or B, T].
        key_ids: Document of each key, [1 or B, S]; -1 is nobody's.
        key_first, key_last: Positions from which and up to which a key is seen, [1 or B, S].
        key_blocks: Selection block of each key in its document, [1 or B, S]; with `selected_blocks`.
        selected_blocks: The queries' choice, [B, T, G, N], -1 pads; None for a branch without choice.
        num_blocks: Selection blocks that a document can have.
    """

    query_ids: Tensor
    query_positions: Tensor
    key_ids: Tensor
    key_first: Tensor
    key_last: Tensor
    key_blocks: Tensor | None = None
    selected_blocks: Tensor | None = None
    num_blocks: int = 0

    def mask(self) -> Tensor:
        """Make the mask, [1 or B, 1, 1, T, S] or, with a choice, [B, G, 1, T, S]; True where a query sees a key."""
        position_BT1 = self.query_positions[..., None]
        mask_BTS = (self.query_ids[..., None] == self.key_ids[:, None]) & (self.key_first[:, None] <= position_BT1)
        mask_BTS &= position_BT1 <= self.key_last[:, None]
        if self.selected_blocks is None or self.key_blocks is None:
            return mask_BTS[:, None, None]
        chosen_BJGT = chosen_mask(self.selected_blocks, self.num_blocks).permute(0, 3, 2, 1)
        batch, num_blocks = chosen_BJGT.shape[:2]
        block_BS = self.key_blocks + torch.arange(batch, device=self.key_blocks.device)[:, None] * num_blocks
        chosen_BSGT = chosen_BJGT.flatten(0, 1).index_select(0, block_BS.flatten()).unflatten(0, block_BS.shape)
        return (chosen_BSGT.permute(0, 2, 3, 1) & mask_BTS[:, None])[:, :, None]

    def cut(self, rows: Rows, keys: Tensor) -> "Visibility":
        """The same in rows of a pack, by `keys` from `Rows.keys`."""
        chosen, blocks = self.selected_blocks, self.key_blocks
        return Visibility(
            rows.cut(self.query_ids, padding=-2),
            rows.cut(self.query_positions),
            take(self.key_ids, keys, padding=-1),
            take(self.key_first, keys),
            take(self.key_last, keys),
            None if blocks is None else take(blocks, keys),
            None if chosen is None else rows.cut(chosen),
            self.num_blocks,
        )


def mean_compress(x: Tensor, geometry: Geometry, documents: Documents | None, num_blocks: int) -> Tensor:
    """Mean over each compressed block's tokens; see `trifocal.ops.mean_compress`."""
    return compression_windows(x, geometry, documents, num_blocks).mean(2, dtype=accumulator(x)).to(x.dtype)


def compression_windows(x: Tensor, geometry: Geometry, documents: Documents | None, num_blocks: int) -> Tensor:
    """The tokens of each compressed block, [B, S, G, D] -> [B, C, l, G, D]; zeros in slots that no document fills."""
    block, stride, num_tokens = geometry.compression_block_size, geometry.compression_stride, x.shape[1]
    if num_blocks == 0:
        return x[:, :0, None].expand(-1, -1, block, -1, -1)
    if documents is None and not x.requires_grad:
        # A view: there is no gradient whose terms need an order.
        return x.unfold(1, block, stride).movedim(-1, 2)
    if documents is None:
        start_C = torch.arange(num_blocks, device=x.device, dtype=torch.int32) * stride
        position_S = torch.arange(num_tokens, device=x.device, dtype=torch.int32)
        first_S, count_S = torch.zeros_like(position_S), torch.full_like(position_S, num_blocks)
    else:
        first_blocks, (last_C, _) = place_compressed_blocks(documents, num_blocks, geometry)
        start_C = (last_C - (block - 1)).where(last_C < num_tokens, -1)
        position_S = documents.positions
        first_S, count_S = first_blocks[documents.ids], compressed_counts(documents, geometry)[documents.ids]
    return _CompressionWindows.apply(x, start_C, position_S, first_S, count_S, block, stride)  # type: ignore[no-untyped-call, return-value]


class _CompressionWindows(torch.autograd.Function):
    """Gathers tokens into blocks, and in backward gradients from blocks: sums of `l / d` terms in a fixed order, where
    the gradient of indexing would add in any order.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        start_C: Tensor,
        position_S: Tensor,
        first_S: Tensor,
        count_S: Tensor,
        block: int,
        stride: int,
    ) -> Tensor:
        """`start_C`: first token of each slot, -1 where none; of each token: position, first slot, slots."""
        ctx.save_for_backward(position_S, first_S, count_S)
        ctx.block, ctx.stride = block, stride
        filled_C1 = (start_C >= 0)[:, None]
        token_CL = start_C[:, None] + torch.arange(block, device=x.device, dtype=torch.int32)
        return x[:, token_CL.where(filled_C1, 0)].where(filled_C1[..., None, None], 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_windows: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        position_S, first_S, count_S = ctx.saved_tensors
        block, stride = ctx.block, ctx.stride
        before_K = torch.arange(block // stride, device=d_windows.device, dtype=torch.int32)
        number_SK = (position_S // stride)[:, None] - before_K
        holds_SK = (number_SK >= 0) & (number_SK < count_S[:, None])
        place_SK = (position_S % stride)[:, None] + before_K * stride
        row_SK = ((first_S[:, None] + number_SK) * block + place_SK).where(holds_SK, 0)
        terms = d_windows.flatten(1, 2)[:, row_SK].where(holds_SK[..., None, None], 0)
        d_x = terms.sum(2, dtype=accumulator(d_windows)).to(d_windows.dtype)
        return d_x, *[None] * 6


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    geometry: Geometry,
    num_keys: int,
    scale: float,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """Attention over compressed blocks; see `trifocal.ops.compressed_attention`."""
    visibility = _compressed_visibility(q, k_cmp, geometry, num_keys, documents)
    return _masked_attention(q, k_cmp, v_cmp, scale, visibility, documents, geometry.compression_stride)


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, geometry: Geometry, num_keys: int, scale: float, documents: Documents | None
) -> Tensor:
    """The choice of selection blocks; see `trifocal.ops.select_blocks`."""
    visibility = _compressed_visibility(q, k_cmp, geometry, num_keys, documents)
    cut = _rows(visibility, documents, geometry.compression_stride)
    first_slot: Tensor | int = 0
    if cut is not None:
        rows, slots = cut
        first_slot = slots[:, :1]
        q, lse, k_cmp, visibility = rows.cut(q), rows.cut(lse), take(k_cmp, slots), visibility.cut(rows, slots)
    scores_BGRTC = _scores(q, k_cmp, scale, visibility.mask())
    p_BGRTC = _normalise(scores_BGRTC, _group_heads(lse, k_cmp.shape[2]))
    # Heads side by side in memory: summed across it, the last blocks' heads would be added in another order than those
    # of the blocks that fill whole vectors, and ties would break.
    p_BGTC = p_BGRTC.movedim(2, -1).contiguous().sum(-1)
    if documents is not None:
        # From slots of the whole pack, or of a row of it, to slots of the query's own document.
        first_block_BT = compressed_layout(documents, 0, geometry).first_blocks[visibility.query_ids.clamp(min=0)]
        num_keys = longest_document(num_keys, documents)
        local_C = torch.arange(geometry.num_compressed_blocks(num_keys), device=q.device)
        # Not under 0: padding counts as a query of the first document.
        slots_BTC = (first_block_BT - first_slot).clamp(min=0)[..., None] + local_C
        inside_BTC = slots_BTC < k_cmp.shape[1]
        slots_BTC = slots_BTC.where(inside_BTC, 0)[:, None]
        p_BGTC = p_BGTC.gather(-1, slots_BTC.expand(*p_BGTC.shape[:3], -1)) if k_cmp.shape[1] else p_BGTC[..., :0]
        p_BGTC = p_BGTC.where(inside_BTC[:, None, :, : p_BGTC.shape[-1]], 0)

    importance_BGTJ = importance(p_BGTC, geometry, geometry.num_selection_blocks(num_keys))
    own_B1T1 = visibility.query_positions[:, None, :, None] // geometry.selection_block_size
    chosen = choose_blocks(importance_BGTJ, own_B1T1, geometry)
    return chosen if cut is None else rows.join(chosen)


# Scores of an index that exist at a time.
_MAX_INDEX_SCORES = 2**27


def select_blocks_by_index(q_idx: Tensor, k_idx: Tensor, geometry: Geometry, documents: Documents | None) -> Tensor:
    """The choice by the largest token score of each block; see `trifocal.ops.select_blocks_by_index`."""
    batch, num_queries, num_groups, _ = q_idx.shape
    num_keys = k_idx.shape[1]
    query_positions = _token_positions(q_idx, num_keys, documents)[1][0]
    query_tokens = torch.arange(num_keys - num_queries, num_keys, device=q_idx.device)
    grid = block_grid(num_keys, geometry.selection_block_size, documents, q_idx.device)
    keys_BDK = k_idx[:, grid.tokens.flatten()].transpose(1, 2)
    num_blocks = geometry.num_selection_blocks(longest_document(num_keys, documents))
    chunk = max(1, _MAX_INDEX_SCORES // (batch * num_groups * keys_BDK.shape[2]))
    chosen = []
    for first in range(0, num_queries, chunk):
        q, position_T, token_T = (
            x[..., first : first + chunk, :, :] if x.ndim == 4 else x[first : first + chunk]
            for x in (q_idx, query_positions, query_tokens)
        )
        rows_BXD = q.transpose(1, 2).flatten(1, 2)
        with full_precision(q):
            if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
                # As the matrix units add them: rounded to their inputs' type, many maxima would be equal.
                scores_BXK = torch.bmm(rows_BXD, keys_BDK, out_dtype=torch.float32)
            else:
                scores_BXK = rows_BXD.to(accumulator(q)) @ keys_BDK.to(accumulator(q))
        scores_BGTJL = scores_BXK.unflatten(1, (num_groups, -1)).unflatten(-1, grid.tokens.shape)
        first_T11 = (token_T - position_T)[:, None, None]
        seen_TJL = grid.filled & (grid.tokens >= first_T11) & (grid.tokens <= token_T[:, None, None])
        best_BGTJ = scores_BGTJL.masked_fill_(~seen_TJL, -torch.inf).amax(-1)
        if documents is not None:
            # From blocks of all documents to those of the query's own.
            slots_TJ = grid.first_blocks[documents.ids[token_T]][:, None] + torch.arange(num_blocks, device=q.device)
            slots_TJ = slots_TJ.clamp(max=best_BGTJ.shape[-1] - 1)
            best_BGTJ = best_BGTJ.gather(-1, slots_TJ.expand(*best_BGTJ.shape[:2], -1, -1))
        chosen.append(choose_blocks(best_BGTJ, position_T[:, None] // geometry.selection_block_size, geometry))
    return torch.cat(chosen, dim=1)


class BlockGrid(NamedTuple):
    """Where the tokens of selection blocks lie, of all documents one after the other: [blocks, l'], int64, any token
    where it is not `filled`; and each document's first block, [documents].
    """

    tokens: Tensor
    filled: Tensor
    first_blocks: Tensor


def block_grid(num_tokens: int, block_size: int, documents: Documents | None, device: torch.device) -> BlockGrid:
    """Place selection blocks; no look at the data, so there are more of them than packed documents fill."""
    inside = torch.arange(block_size, device=device)
    if documents is None:
        tokens = torch.arange(-(-num_tokens // block_size), device=device)[:, None] * block_size + inside
        return BlockGrid(tokens.clamp(max=num_tokens - 1), tokens < num_tokens, inside[:1])
    boundaries = documents.cu_seqlens.long()
    counts = (boundaries.diff() + (block_size - 1)) // block_size
    ends = counts.cumsum(0)
    blocks = torch.arange(num_tokens // block_size + counts.numel(), device=device)
    ids = torch.searchsorted(ends, blocks, right=True)
    own = ids.clamp(max=counts.numel() - 1)
    tokens = (boundaries[own] + (blocks - (ends - counts)[own]) * block_size)[:, None] + inside
    filled = (ids < counts.numel())[:, None] & (tokens < boundaries[own + 1][:, None])
    return BlockGrid(tokens.clamp(max=num_tokens - 1), filled, ends - counts)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected_blocks: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
) -> Tensor:
    """Attention over the tokens of the chosen blocks; see `trifocal.ops.selected_attention`."""
    query_ids, query_positions, key_ids, key_positions = _token_positions(q, k.shape[1], documents)
    visibility = Visibility(
        query_ids,
        query_positions,
        key_ids,
        key_first=key_positions,
        key_last=torch.full_like(key_positions, ALWAYS),
        key_blocks=key_positions // geometry.selection_block_size,
        selected_blocks=selected_blocks,
        num_blocks=geometry.num_selection_blocks(longest_document(k.shape[1], documents)),
    )
    return _masked_attention(q, k, v, scale, visibility, documents)[0]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window_size: int, scale: float, documents: Documents | None
) -> Tensor:
    """Attention over the last `window_size` keys; see `trifocal.ops.window_attention`."""
    query_ids, query_positions, key_ids, key_positions = _token_positions(q, k.shape[1], documents)
    # In 64 bits: the sum may pass what 32 hold.
    key_last = (key_positions.long() + (window_size - 1)).clamp(max=ALWAYS).int()
    visibility = Visibility(query_ids, query_positions, key_ids, key_positions, key_last)
    return _masked_attention(q, k, v, scale, visibility, documents)[0]


def nsa_attention(
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
    selected_blocks: Tensor,
    o_cmp: Tensor,
) -> Tensor:
    """Selected and window attention, mixed with the compressed branch's result by the gates."""
    o_slc = selected_attention(q, k_slc, v_slc, selected_blocks, geometry, scale, documents)
    o_win = window_attention(q, k_win, v_win, geometry.window_size, scale, documents)
    gate_cmp, gate_slc, gate_win = gates.to(accumulator(q)).unsqueeze(-1).unbind(3)
    return (gate_cmp * o_cmp + gate_slc * o_slc + gate_win * o_win).to(q.dtype)


class _MaskedAttention(torch.autograd.Function):
    """Attention under a visibility rule that keeps no score, no mask and no copy of a key for backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, *visibility: Any
    ) -> tuple[Tensor, Tensor]:
        mask = Visibility(*visibility).mask()
        scores_BGRTS = _scores(q, k, scale, mask)
        lse_BGRT = scores_BGRTS.logsumexp(-1)
        p_BGRTS = _normalise(scores_BGRTS, lse_BGRT)
        with full_precision(q):
            o_BGXV = p_BGRTS.flatten(2, 3) @ _seen(v, mask)
        o = _ungroup(o_BGXV, q.shape)
        if o.dtype != q.dtype:
            # Not always: compiled by PyTorch 2.11, an output that is a conversion to its own type has no gradient.
            o = o.to(q.dtype)
        lse = lse_BGRT.permute(0, 3, 1, 2).flatten(2)
        ctx.save_for_backward(q, k, v, o, lse, *(part for part in visibility if isinstance(part, Tensor)))
        ctx.scale = scale
        ctx.visibility = [... if isinstance(part, Tensor) else part for part in visibility]
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        remaining = iter(tensors)
        visibility = Visibility(*(next(remaining) if part is ... else part for part in ctx.visibility))
        mask = visibility.mask()
        p_BGRTS = _normalise(_scores(q, k, ctx.scale, mask), _group_heads(lse, k.shape[2]))
        with full_precision(q):
            # The gradient of a softmax: each score moves by its own share of (dp - what the row gives back).
            returned_BTH = (d_o.to(lse.dtype) * o).sum(-1) - d_lse
            d_o_BGXV = _group_heads_as_rows(d_o, k.shape[2])
            d_scores_BGRTS = (d_o_BGXV @ _seen(v, mask).transpose(-1, -2)).view(p_BGRTS.shape)
            d_scores_BGRTS -= _group_heads(returned_BTH, k.shape[2])[..., None]
            d_scores_BGRTS *= p_BGRTS
            d_scores_BGXS = d_scores_BGRTS.flatten(2, 3) * ctx.scale
            d_q = _ungroup(d_scores_BGXS @ _seen(k, mask), q.shape)
            # The heads of a group are rows of one product, which sums their gradients for the keys they share.
            d_k = (d_scores_BGXS.transpose(-1, -2) @ _group_heads_as_rows(q, k.shape[2])).transpose(1, 2)
            d_v = (p_BGRTS.flatten(2, 3).transpose(-1, -2) @ d_o_BGXV).transpose(1, 2)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, *([None] * len(visibility))


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visibility: Visibility, documents: Documents | None, spacing: int = 1
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, T, H, D] over its visible keys: o [B, T, H, V] in q's type, lse [B, T, H] in fp32 or fp64."""
    cut = _rows(visibility, documents, spacing)
    if cut is None:
        return _MaskedAttention.apply(q, k, v, scale, *visibility)  # type: ignore[no-untyped-call, return-value]
    rows, keys = cut
    q, k, v, visibility = rows.cut(q), take(k, keys), take(v, keys), visibility.cut(rows, keys)
    o, lse = _MaskedAttention.apply(q, k, v, scale, *visibility)  # type: ignore[no-untyped-call]
    return rows.join(o), rows.join(lse)


def _rows(visibility: Visibility, documents: Documents | None, spacing: int) -> tuple[Rows, Tensor] | None:
    """The rows that a pack is cut into, and the keys of each, `spacing` tokens apart at least. None where that saves
    nothing, for the last queries of a pack, and in compiled code, which is to fit any pack.
    """
    if documents is None or torch.compiler.is_compiling():
        return None
    rows, key_ids = Rows.of(documents), visibility.key_ids[0]
    if rows.reach >= rows.num_tokens or len(key_ids) == 0 or visibility.query_ids.shape[1] < rows.num_tokens:
        return None
    tokens = documents.cu_seqlens[key_ids.clamp(min=0)] + visibility.key_first[0]
    return rows, rows.keys(tokens.where(key_ids >= 0, rows.num_tokens), spacing)


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Scaled scores, [B, G, R, T, S], in the accumulator's type; -inf where a query does not see a key."""
    batch, num_queries, num_heads = q.shape[:3]
    num_groups = k.shape[2]
    with full_precision(q):
        rows_BGXD, keys_BGSD = _group_heads_as_rows(q, num_groups) * scale, _per_group(k)
        # Not `@`, whose result hides from selective checkpointing, which may keep it, that it is overwritten.
        scores = torch.bmm(rows_BGXD.flatten(0, 1), keys_BGSD.flatten(0, 1).transpose(-1, -2))
    scores_BGRTS = scores.view(batch, num_groups, num_heads // num_groups, num_queries, k.shape[1])
    return scores_BGRTS.masked_fill_(~mask, -torch.inf)


def _normalise(scores_BGRTS: Tensor, lse_BGRT: Tensor) -> Tensor:
    """Probabilities from scores, in place; all zero where a query sees nothing."""
    finite_lse = lse_BGRT.masked_fill(lse_BGRT == -torch.inf, 0.0)
    return scores_BGRTS.sub_(finite_lse[..., None]).exp_()


def _compressed_visibility(
    q: Tensor, k_cmp: Tensor, geometry: Geometry, num_keys: int, documents: Documents | None
) -> Visibility:
    query_ids, query_positions, _, _ = _token_positions(q, num_keys, documents)
    if documents is None:
        starts = torch.arange(k_cmp.shape[1], device=q.device, dtype=torch.int32)[None] * geometry.compression_stride
        ids = torch.zeros_like(starts)
    else:
        layout = compressed_layout(documents, k_cmp.shape[1], geometry)
        ids, starts = layout.ids[None], layout.starts[None]
    last_token = starts + (geometry.compression_block_size - 1)
    return Visibility(query_ids, query_positions, ids, last_token, torch.full_like(starts, ALWAYS))


def _token_positions(q: Tensor, num_keys: int, documents: Documents | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Documents and positions of queries [1, T] and keys [1, S]; without documents the queries are the last T."""
    first_query = num_keys - q.shape[1]
    if documents is not None:
        ids, positions = documents.ids[None], documents.positions[None]
    else:
        positions = torch.arange(num_keys, device=q.device, dtype=torch.int32)[None]
        ids = torch.zeros_like(positions)
    return ids[:, first_query:], positions[:, first_query:], ids, positions


def choose_blocks(importance_BGTJ: Tensor, own_block: Tensor, geometry: Geometry) -> Tensor:
    """The forced blocks, then the most important: [B, T, G, N], int32, ascending, -1 pads; `own_block` by query."""
    num_blocks = importance_BGTJ.shape[-1]
    block_J = torch.arange(num_blocks, device=importance_BGTJ.device)
    forced = (block_J < geometry.num_initial_blocks) | (block_J > own_block - geometry.num_local_blocks)
    importance_BGTJ = importance_BGTJ.masked_fill(forced, torch.inf)
    importance_BGTJ = importance_BGTJ.masked_fill(block_J > own_block, -torch.inf)

    # A stable sort keeps the order of what is equal: the lower index first.
    ranked, order = importance_BGTJ.sort(dim=-1, descending=True, stable=True)
    num_slots = geometry.num_selected_blocks
    order = order[..., :num_slots].masked_fill(ranked[..., :num_slots] == -torch.inf, num_blocks)
    order = order.sort(dim=-1).values
    chosen = order.masked_fill(order == num_blocks, -1).to(torch.int32)
    chosen = torch.nn.functional.pad(chosen, (0, num_slots - chosen.shape[-1]), value=-1)
    return chosen.transpose(1, 2).contiguous()


def importance(p_BGTC: Tensor, geometry: Geometry, num_blocks: int) -> Tensor:
    """Importance of each selection block by overlap (Eq. 9), [B, G, T, J], all summed in one order: ties stay ties."""
    stencil = geometry.overlap_stencil()
    before = geometry.compression_block_size // geometry.compression_stride - 1
    step = geometry.selection_block_size // geometry.compression_stride
    after = (num_blocks - 1) * step + len(stencil) - before - p_BGTC.shape[-1]
    taps_BGTJK = torch.nn.functional.pad(p_BGTC, (before, after)).unfold(-1, len(stencil), step)
    # Weights as numbers: a tensor of them would be copied from the host, which no CUDA graph records.
    importance_BGTJ = stencil[0] * taps_BGTJK[..., 0]
    for tap in range(1, len(stencil)):
        importance_BGTJ = importance_BGTJ + stencil[tap] * taps_BGTJK[..., tap]
    return importance_BGTJ


def chosen_mask(selected_blocks: Tensor, num_blocks: int) -> Tensor:
    """Membership [B, T, G, J] from indices [B, T, G, N]; what is no block of the document falls off the end."""
    no_block = (selected_blocks < 0) | (selected_blocks >= num_blocks)
    index = selected_blocks.long().masked_fill(no_block, num_blocks)
    chosen = torch.zeros(*index.shape[:3], num_blocks + 1, dtype=torch.bool, device=index.device)
    return chosen.scatter_(-1, index, True)[..., :num_blocks]


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Keep an outer autocast from lowering the products inside; the meta device knows none."""
    if x.device.type == "meta":
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _group_heads(x: Tensor, num_groups: int) -> Tensor:
    """[B, T, H] -> [B, G, R, T]."""
    return x.unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1)


def _group_heads_as_rows(x: Tensor, num_groups: int) -> Tensor:
    """[B, T, H, D] -> [B, G, R*T, D] in the accumulator's type: one product a group, without copies of its keys."""
    return x.unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).to(accumulator(x))


def _ungroup(x: Tensor, shape: torch.Size) -> Tensor:
    """[B, G, R*T, D] -> [B, T, H, D], where `shape` is that of the queries, [B, T, H, *]."""
    return x.unflatten(2, (-1, shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _per_group(x: Tensor) -> Tensor:
    """[B, S, G, D] -> [B, G, S, D] in the accumulator's type."""
    return x.transpose(1, 2).to(accumulator(x))


def _seen(x: Tensor, mask: Tensor) -> Tensor:
    """Keys per group, zero where no query sees one: those may be NaN, which a probability of 0 does not stop."""
    seen_BGS = mask.any(-2).squeeze(2)
    return _per_group(x).where(seen_BGS[..., None], 0)
