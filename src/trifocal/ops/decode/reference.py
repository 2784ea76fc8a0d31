"""The specification of decoding in plain PyTorch: pages are gathered, and everything invisible is masked.

The number of operations and all shapes are fixed by the tensors' shapes; nothing looks at the data on the host.

Shape suffixes as in `ops.reference`; M pages of a sequence, L tokens of a block.
"""

import torch
from torch import Tensor
from torch.nn import functional

from trifocal.ops.decode.caches import (
    DecodeBatch,
    DenseCache,
    Index,
    LearnedCompressor,
    NewRows,
    Place,
    Rotary,
    SparseCache,
    WindowCache,
)
from trifocal.ops.geometry import Geometry
from trifocal.ops.reference import accumulator, choose_blocks, chosen_mask, full_precision, importance

NewTokens = tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]


def append_sparse(
    cache: SparseCache,
    batch: DecodeBatch,
    new: NewTokens,
    geometry: Geometry,
    rotary: Rotary,
    compress: tuple[LearnedCompressor, LearnedCompressor | None] | None,
    index: Index | None,
) -> Tensor | None:
    """See `trifocal.ops.append_sparse`; `new`: keys and values of cmp, slc and win."""
    k_raw, v_raw, k_slc, v_slc, k_win, v_win = new
    position_BT, exists_BT = _positions(batch, k_slc)
    k_slc = _rotate(k_slc, rotary, position_BT)
    page_BT, place_BT = _in_pages(batch, position_BT, cache.k_slc.shape[2])
    _write(cache.k_slc, page_BT, place_BT, k_slc, exists_BT)
    _write(cache.v_slc, page_BT, place_BT, v_slc, exists_BT)
    scores = None
    if index is not None and cache.k_idx is not None:
        _write(cache.k_idx, page_BT, place_BT, _rotate(index.k[:, :, None], index.rotary, position_BT), exists_BT)
        if not batch.takes_all:
            k_idx = _gather_pages(cache.k_idx, batch)
            sees_BTS = torch.arange(k_idx.shape[2], device=k_idx.device) <= position_BT[..., None]
            scores_BGTS = _index_scores(_rotate(index.q, index.rotary, position_BT), k_idx, sees_BTS)
            num_blocks = geometry.num_selection_blocks(k_idx.shape[2])
            scores = scores_BGTS.unflatten(-1, (num_blocks, -1)).amax(-1).transpose(1, 2)
    k_win = None if k_win is None else _rotate(k_win, rotary, position_BT)
    rings = ((cache.k_win, k_win), (cache.v_win, v_win), (cache.k_raw, k_raw), (cache.v_raw, v_raw))
    _write_rings(batch, position_BT, exists_BT, *rings)
    if cache.k_cmp is None or cache.k_raw is None:
        return scores

    # T tokens can end this many blocks at most; keep those that they do end.
    stride, length = geometry.compression_stride, geometry.compression_block_size
    before_B = _num_compressed(batch.lengths, geometry)
    after_B = _num_compressed(batch.lengths + batch.num_new, geometry)
    most = -(-k_slc.shape[1] // stride)
    block_BC = before_B[:, None] + torch.arange(most, device=before_B.device)
    due_BC = block_BC < after_B[:, None]
    page_BC, place_BC = _in_pages(batch, block_BC + (length // stride - 1), cache.k_cmp.shape[2])
    phi_k, phi_v = compress or (None, None)
    k_cmp_BCGD = _compress(cache.k_raw, batch, block_BC, geometry, phi_k)
    _write(cache.k_cmp, page_BC, place_BC, _rotate(k_cmp_BCGD, rotary, block_BC * stride), due_BC)
    if cache.v_cmp is not None and cache.v_raw is not None:
        _write(cache.v_cmp, page_BC, place_BC, _compress(cache.v_raw, batch, block_BC, geometry, phi_v), due_BC)
    return scores


def append_dense(cache: DenseCache | WindowCache, batch: DecodeBatch, k: Tensor, v: Tensor, rotary: Rotary) -> None:
    """See `trifocal.ops.append_dense`."""
    position_BT, exists_BT = _positions(batch, k)
    k = _rotate(k, rotary, position_BT)
    if isinstance(cache, WindowCache):
        _write_rings(batch, position_BT, exists_BT, (cache.k_win, k), (cache.v_win, v))
        return
    page_BT, place_BT = _in_pages(batch, position_BT, cache.k.shape[2])
    _write(cache.k, page_BT, place_BT, k, exists_BT)
    _write(cache.v, page_BT, place_BT, v, exists_BT)


def append_rows(new: NewRows, place: Place, first: int, zero: int, stride: int) -> Tensor:
    """See `ops.decode.api.append_chunk`, for the rows of one name."""
    x, num_rows, device = new.x, new.x.shape[1], new.x.device
    if new.rotary is not None:
        x = _rotate_rows(x, new.rotary, (first - zero) * stride, stride)
    if new.pages is not None:
        row, page_rows = torch.arange(first, first + num_rows, device=device), new.pages.shape[2]
        new.pages[place.pages[row // page_rows], :, row % page_rows] = x[0]
        if new.begin < first:
            used = place.pages[: -(-(first + num_rows) // page_rows)]
            held = new.pages.transpose(1, 2).index_select(0, used).flatten(0, 1)
            return held[None, new.begin : first + num_rows]
    if new.ring is not None and new.ring_end is not None:
        size, old = new.ring.shape[2], new.ring.index_select(0, place.row)
        # A place holds the last token whose position leaves it as the remainder.
        last = place.num_new + (first - 1)
        token = last - (last - torch.arange(size, device=device)) % size - first
        fresh = x[0].index_select(0, token.clamp(min=0)).transpose(0, 1)
        new.ring_end.copy_(torch.where((token >= 0)[:, None], fresh, old))
        if new.begin < first:
            past = old[0].index_select(1, torch.arange(new.begin, first, device=device) % size)
            return torch.cat((past.transpose(0, 1)[None], x), dim=1)
    return x


def decode_attention(
    q: Tensor,
    gates: Tensor | None,
    cache: SparseCache,
    batch: DecodeBatch,
    geometry: Geometry,
    rotary: Rotary,
    window: bool,
    scale: float,
    scores: Tensor | None,
) -> Tensor:
    """See `trifocal.ops.decode_attention`."""
    position_BT, exists_BT = _positions(batch, q)
    q_BGTRD = _grouped_queries(q, cache.k_slc.shape[1], rotary, position_BT, scale)
    position_BT1 = position_BT[..., None]

    stride, length = geometry.compression_stride, geometry.compression_block_size
    first_stripe = length // stride - 1
    if cache.k_cmp is not None:
        k_cmp_BGCD = _gather_pages(cache.k_cmp, batch)[:, :, first_stripe:]
        last_token_C = torch.arange(k_cmp_BGCD.shape[2], device=q.device) * stride + (length - 1)
        sees_cmp = (last_token_C <= position_BT1)[:, None]
        p_BGTRC = _probabilities(q_BGTRD, k_cmp_BGCD, sees_cmp)

    k_slc_BGSD, v_slc_BGSV = _gather_pages(cache.k_slc, batch), _gather_pages(cache.v_slc, batch)
    token_S = torch.arange(k_slc_BGSD.shape[2], device=q.device)
    num_blocks = geometry.num_selection_blocks(len(token_S))
    if scores is not None:
        # Kernels write none of a sequence whose blocks are all taken.
        importance_BGTJ = scores[..., :num_blocks].nan_to_num().transpose(1, 2)
    elif cache.k_cmp is not None:
        # Heads side by side in memory, so that those of every block are added in the same order.
        importance_BGTJ = importance(p_BGTRC.transpose(3, 4).contiguous().sum(-1), geometry, num_blocks)
    else:
        importance_BGTJ = q.new_zeros(len(q), k_slc_BGSD.shape[1], q.shape[1], num_blocks)
    own_block = (position_BT1 // geometry.selection_block_size)[:, None]
    selected_blocks = choose_blocks(importance_BGTJ, own_block, geometry)
    chosen_BGTJ = chosen_mask(selected_blocks, num_blocks).transpose(1, 2)
    past_BTS = token_S <= position_BT1
    sees_slc = chosen_BGTJ[..., token_S // geometry.selection_block_size] & past_BTS[:, None]
    o = _weighted(_probabilities(q_BGTRD, k_slc_BGSD, sees_slc), v_slc_BGSV, sees_slc)

    if gates is not None and cache.v_cmp is not None:
        v_cmp_BGCV = _gather_pages(cache.v_cmp, batch)[:, :, first_stripe:]
        o_cmp = _weighted(p_BGTRC, v_cmp_BGCV, sees_cmp)
        gate_cmp, gate_slc, gate_win = _grouped(gates.to(o.dtype), o.shape[1]).unsqueeze(-2).unbind(-1)
        o = gate_cmp * o_cmp + gate_slc * o
        if window:
            k_win_BGSD, v_win_BGSV, token_BS = k_slc_BGSD, v_slc_BGSV, token_S
            if cache.k_win is not None and cache.v_win is not None:
                k_win_BGSD, v_win_BGSV, token_BS = _rings(batch, cache.k_win, cache.v_win)
            sees_win = _in_window(token_BS, position_BT1, geometry.window_size)
            o = o + gate_win * _weighted(_probabilities(q_BGTRD, k_win_BGSD, sees_win), v_win_BGSV, sees_win)
    return _finished(o, exists_BT, q)


def decode_dense_attention(
    q: Tensor,
    cache: DenseCache | WindowCache,
    batch: DecodeBatch,
    rotary: Rotary,
    window_size: int | None,
    scale: float,
) -> Tensor:
    """See `trifocal.ops.decode_dense_attention`."""
    position_BT, exists_BT = _positions(batch, q)
    if isinstance(cache, WindowCache):
        assert window_size is not None
        k_BGSD, v_BGSV, token_BS = _rings(batch, cache.k_win, cache.v_win)
        sees = _in_window(token_BS, position_BT[..., None], window_size)
    else:
        k_BGSD, v_BGSV = _gather_pages(cache.k, batch), _gather_pages(cache.v, batch)
        sees = (torch.arange(k_BGSD.shape[2], device=q.device) <= position_BT[..., None])[:, None]
    q_BGTRD = _grouped_queries(q, k_BGSD.shape[1], rotary, position_BT, scale)
    o = _weighted(_probabilities(q_BGTRD, k_BGSD, sees), v_BGSV, sees)
    return _finished(o, exists_BT, q)


def _positions(batch: DecodeBatch, x: Tensor) -> tuple[Tensor, Tensor]:
    """Position of each new token of x [B, T, heads, *], -1 where the sequence has none, and whether it has it."""
    new_T = torch.arange(x.shape[1], device=x.device)
    exists_BT = new_T < batch.num_new[:, None]
    return (batch.lengths.long()[:, None] + new_T).where(exists_BT, -1), exists_BT


def _num_compressed(lengths: Tensor, geometry: Geometry) -> Tensor:
    """Tensor version of `Geometry.num_compressed_blocks`."""
    stride = geometry.compression_stride
    return ((lengths.long() - geometry.compression_block_size) // stride + 1).clamp(min=0)


def _rotate(x: Tensor, rotary: Rotary, position_BT: Tensor) -> Tensor:
    """Rotate x [B, T, heads, D] half-split, in the tables' type; as `trifocal.nn.rope.rotate`."""
    position_BT = position_BT.clamp(0, rotary[0].shape[0] - 1)
    cos, sin = (table[position_BT][:, :, None] for table in rotary)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _rotate_rows(x: Tensor, rotary: Rotary, first: int, stride: int) -> Tensor:
    """Rotate x [1, n, heads, D] at positions `first`, `first + stride`, … as `trifocal.nn.rope.rotate`, in four passes
    instead of eight and without copies in fp32, which a compiler or gradients would need.
    """
    cos, sin = (table[first : first + x.shape[1] * stride : stride, None] for table in rotary)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (a, b), (out_a, out_b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.addcmul(a * cos, b, sin, value=-1, out=out_a)
    torch.addcmul(b * cos, a, sin, out=out_b)
    return out


def _in_pages(batch: DecodeBatch, index: Tensor, page_rows: int) -> tuple[Tensor, Tensor]:
    """Page, and row in it, of indices [B, *] into the sequences; anything where the table ends before."""
    column = (index // page_rows).clamp(0, batch.block_table.shape[1] - 1)
    return batch.block_table.long().gather(1, column), index % page_rows


def _write(cache: Tensor, first: Tensor, row: Tensor, x: Tensor, exists: Tensor) -> None:
    """`cache[first, :, row] = x` where it exists: cache [pages or rows, G, *, width], x [B, T, G, width]. As many
    entries are always written: the others repeat the first one, or write back what is there.
    """
    view = cache.transpose(1, 2)
    first, row, exists, x = (part.flatten(0, 1) for part in (first.long(), row.long(), exists, x.to(cache.dtype)))
    some, any_exists = exists.int().argmax().reshape(1), exists.any()
    other_first, other_row = (index.index_select(0, some).where(any_exists, 0) for index in (first, row))
    other_x = x.index_select(0, some).where(any_exists, view[:1, 0])
    view.index_put_(
        (first.where(exists, other_first), row.where(exists, other_row)), x.where(exists[:, None, None], other_x)
    )


def _compress(
    ring: Tensor, batch: DecodeBatch, block_BC: Tensor, geometry: Geometry, phi: LearnedCompressor | None
) -> Tensor:
    """Compressed keys or values of blocks whose tokens lie in a ring, [B, C, G, *]."""
    tokens_L = torch.arange(geometry.compression_block_size, device=ring.device)
    token_BCL = block_BC[..., None] * geometry.compression_stride + tokens_L
    windows = ring.transpose(1, 2)[batch.rows[:, None, None], token_BCL % ring.shape[2]]
    windows = windows.flatten(0, 1)
    blocks = windows.mean(1, dtype=accumulator(windows)).to(windows.dtype)
    if phi is not None:
        # Block by block: the order of a sum in a library depends on the number of rows.
        blocks = blocks + torch.cat([_learned(window, phi) for window in windows.split(1)])
    return blocks.unflatten(0, block_BC.shape)


def _learned(windows: Tensor, phi: LearnedCompressor) -> Tensor:
    """What a learned φ adds to the mean: [N, l, G, D] -> [N, G, D]."""
    positions, up, down = (weight.to(windows.dtype) for weight in phi)
    placed = (windows + positions[:, None]).transpose(1, 2).flatten(2)
    return functional.linear(functional.silu(functional.linear(placed, up)), down)


def _gather_pages(pages: Tensor, batch: DecodeBatch) -> Tensor:
    """All rows of each sequence's pages in order, [B, G, rows, *]; those that the table does not name hold anything."""
    table_BM = batch.block_table.clamp(0, pages.shape[0] - 1)
    # Pages of one token stay a view; a product copies that of two sequences and not that of one, and rounds otherwise.
    return pages[table_BM].transpose(1, 2).flatten(2, 3).contiguous()


def _write_rings(
    batch: DecodeBatch, position_BT: Tensor, exists_BT: Tensor, *rings: tuple[Tensor | None, Tensor | None]
) -> None:
    """Write new tokens [B, T, G, width] into rings [rows, G, R, width], where there are both."""
    for ring, x in rings:
        if ring is not None and x is not None:
            _write(ring, batch.rows[:, None].expand_as(position_BT), position_BT % ring.shape[2], x, exists_BT)


def _rings(batch: DecodeBatch, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rings of each sequence, [B, G, R, *], and the token in each place, [B, 1, R]; negative where none is yet."""
    last_B1 = (batch.lengths.long() + batch.num_new - 1)[:, None]
    token_BS = last_B1 - (last_B1 - torch.arange(k.shape[2], device=k.device)) % k.shape[2]
    return k[batch.rows], v[batch.rows], token_BS[:, None]


def _in_window(token_BS: Tensor, position_BT1: Tensor, window_size: int) -> Tensor:
    """Whether a query at a position sees tokens, [B, 1, T, S]."""
    sees_BTS = (token_BS <= position_BT1) & (token_BS > position_BT1 - window_size) & (token_BS >= 0)
    return sees_BTS[:, None]


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    """[B, T, H, *] -> [B, G, T, R, *]."""
    return x.unflatten(2, (num_groups, -1)).transpose(1, 2)


def _grouped_queries(q: Tensor, num_groups: int, rotary: Rotary, position_BT: Tensor, scale: float) -> Tensor:
    """Rotated and scaled queries in the accumulator's type, [B, G, T, R, D]."""
    return _grouped(_rotate(q, rotary, position_BT), num_groups).to(accumulator(q)) * scale


def _probabilities(q_BGTRD: Tensor, k_BGSD: Tensor, sees: Tensor) -> Tensor:
    """Softmax over what each query sees, [B, G, T, R, S]; zero where it sees nothing. `sees`: [B, G or 1, T, S]."""
    with full_precision(q_BGTRD):
        scores_BGXS = _aligned(q_BGTRD.flatten(2, 3)) @ _aligned(k_BGSD.to(q_BGTRD.dtype)).transpose(-1, -2)
    hidden = ~sees[:, :, :, None]
    scores_BGTRS = scores_BGXS.unflatten(2, q_BGTRD.shape[2:4]).masked_fill(hidden, -torch.inf)
    return scores_BGTRS.softmax(-1).masked_fill(hidden, 0.0)


def _index_scores(q_BTGD: Tensor, k_B1SD: Tensor, sees_BTS: Tensor) -> Tensor:
    """Scores of the tokens that each query sees, [B, G, T, S]; -inf of the others."""
    rows_B1XD = q_BTGD.transpose(1, 2).flatten(1, 2)[:, None].to(accumulator(q_BTGD))
    with full_precision(q_BTGD):
        scores_B1XS = _aligned(rows_B1XD) @ _aligned(k_B1SD.to(rows_B1XD.dtype)).transpose(-1, -2)
    scores_BGTS = scores_B1XS[:, 0].unflatten(1, (q_BTGD.shape[2], -1))
    return scores_BGTS.masked_fill(~sees_BTS[:, None], -torch.inf)


def _weighted(p_BGTRS: Tensor, v_BGSV: Tensor, sees: Tensor) -> Tensor:
    """o [B, G, T, R, V]. A probability of 0 does not stop a NaN: values that no query sees are zero."""
    value_dim = v_BGSV.shape[-1]
    v_BGSV = _aligned(v_BGSV.to(p_BGTRS.dtype).where(sees.any(2)[..., None], 0.0))
    with full_precision(p_BGTRS):
        return (p_BGTRS.flatten(2, 3) @ v_BGSV)[..., :value_dim].unflatten(2, p_BGTRS.shape[2:4])


def _aligned(x: Tensor) -> Tensor:
    """x with zeros behind, up to whole 16 bytes: on a CPU the bits of a product depend on where a matrix begins."""
    missing = -x.shape[-1] % 4
    return functional.pad(x, (0, missing)) if missing else x


def _finished(o_BGTRV: Tensor, exists_BT: Tensor, q: Tensor) -> Tensor:
    """[B, T, H, V] in the type of q, zero where there is no token."""
    return o_BGTRV.transpose(1, 2).flatten(2, 3).where(exists_BT[..., None, None], 0.0).to(q.dtype)
