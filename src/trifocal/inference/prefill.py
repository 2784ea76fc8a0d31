"""A chunk of one sequence's prompt: it is written into the caches, and what its queries see is gathered from them.

The first chunk sees itself alone: its keys and values go into attention as they are, as in training. The rings keep
their tokens until a chunk has gone through every layer: one that fails half-way leaves a sequence as it was, since
pages are never read behind its length.

What depends on the sequence is on the device, and shapes depend on where the chunk begins and on its length alone, so
that a chunk can be recorded as a CUDA graph. Its last tokens may be padding: no token in front of them sees them, and
they reach no ring.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trifocal.ops import Geometry, SparseCache
from trifocal.ops.decode.caches import Compress, Rotary


class Place(NamedTuple):
    """Where a sequence lies, on the device.

    Attributes:
        row: Its row of the rings, [1], int64.
        num_new: Tokens of the chunk without padding, [1], int64.
        pages: Its pages, [pages], int64; they hold its past and the chunk. Padding may lie in any page that nobody
            reads.
    """

    row: Tensor
    num_new: Tensor
    pages: Tensor


class _RingPlaces(NamedTuple):
    """What the places of a ring of R tokens hold once a chunk is over: `fresh`, [R], whether a token of the chunk, and
    `source`, [R], which."""

    fresh: Tensor
    source: Tensor


class Chunk:
    """A chunk of tokens of one sequence.

    Args:
        place: Where the sequence lies.
        first: Position of the chunk's first token.
        length: Tokens of the chunk, padding included.
    """

    def __init__(self, place: Place, first: int, length: int) -> None:
        self._place, self.first, self.stop = place, first, first + length
        # Each ring, its row as it was, and what the row gets of the chunk.
        self._rings: list[tuple[Tensor, Tensor, Tensor]] = []
        # Indices that all layers share.
        self._in_pages: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._past_in_ring: dict[tuple[int, int], Tensor] = {}
        self._in_ring: dict[int, _RingPlaces] = {}

    def rotate(self, x: Tensor, rotary: Rotary, first: int | None = None, stride: int = 1) -> Tensor:
        """Rotate queries or keys [1, T, heads, D] at positions `first`, `first + stride`, …; the chunk's if not given.

        The result of `trifocal.nn.rope.rotate` by tables of all positions, in four passes instead of eight and without
        copies in fp32, which only a compiler or gradients would need.
        """
        first = self.first if first is None else first
        cos, sin = (table[first : first + x.shape[1] * stride : stride, None] for table in rotary)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        (a, b), (out_a, out_b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
        torch.addcmul(a * cos, b, sin, value=-1, out=out_a)
        torch.addcmul(b * cos, a, sin, out=out_b)
        return out

    def write(self, tensor: Tensor, x: Tensor, first: int) -> None:
        """Write x [1, n, G, *] into pages [pages, G, rows, *], as rows `first` to `first + n` of the sequence."""
        page_rows, key = tensor.shape[2], (tensor.shape[2], first, x.shape[1])
        if key not in self._in_pages:
            row = torch.arange(first, first + x.shape[1], device=tensor.device)
            self._in_pages[key] = self._place.pages[row // page_rows], row % page_rows
        page, row = self._in_pages[key]
        tensor[page, :, row] = x[0]

    def extend(self, tensor: Tensor, x: Tensor) -> Tensor:
        """Write the chunk's keys or values, [1, T, G, *], into pages; those of all tokens so far, [1, S, G, *]."""
        self.write(tensor, x, self.first)
        return self.gather(tensor, self.stop) if self.first else x

    def gather(self, tensor: Tensor, stop: int, first: int = 0) -> Tensor:
        """Rows `first` up to `stop` of the sequence's pages [pages, G, rows, *], as [1, stop - first, G, *]."""
        used = self._place.pages[: -(-stop // tensor.shape[2])]
        return tensor.transpose(1, 2).index_select(0, used).flatten(0, 1)[None, first:stop]

    def join_ring(self, ring: Tensor, x: Tensor, past: int) -> Tensor:
        """The last `past` tokens of a ring [rows, G, R, *], then the chunk's, [1, past + T, G, *].

        The ring gets the chunk with `write_rings`.
        """
        old = ring.index_select(0, self._place.row)
        # Copied: a view would keep the whole chunk of every layer alive.
        self._rings.append((ring, old, x[0].index_select(0, self._ring_places(ring.shape[2]).source)))
        if not past:
            return x
        last = old[0].index_select(1, self._past_places(ring.shape[2], past))
        return torch.cat((last.transpose(0, 1)[None], x), dim=1)

    def _past_places(self, size: int, past: int) -> Tensor:
        """Where the last tokens before the chunk lie in a ring of a size, [past]."""
        if (size, past) not in self._past_in_ring:
            tokens = torch.arange(self.first - past, self.first, device=self._place.pages.device)
            self._past_in_ring[size, past] = tokens % size
        return self._past_in_ring[size, past]

    def _ring_places(self, size: int) -> _RingPlaces:
        if size not in self._in_ring:
            # A place holds the last token whose position leaves it as the remainder.
            last = self._place.num_new + (self.first - 1)
            token = last - (last - torch.arange(size, device=last.device)) % size - self.first
            self._in_ring[size] = _RingPlaces(token >= 0, token.clamp(min=0))
        return self._in_ring[size]

    def last(self, x: Tensor) -> Tensor:
        """The row of the chunk's last token that is no padding, [T, *] -> [1, *]."""
        return x.index_select(0, self._place.num_new - 1)

    def write_rings(self) -> None:
        """Write what `join_ring` has put aside, once every layer has seen the chunk."""
        for ring, old, x in self._rings:
            fresh = self._ring_places(ring.shape[2]).fresh[:, None]
            ring.index_copy_(0, self._place.row, torch.where(fresh, x.transpose(0, 1), old))
        self._rings.clear()


class Seen(NamedTuple):
    """What the queries of a chunk see, as `nsa_attention` takes it; k_cmp, v_cmp are None where the cache has none."""

    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor


def extend_sparse(
    cache: SparseCache,
    chunk: Chunk,
    raw: tuple[Tensor | None, Tensor | None],
    selected: tuple[Tensor, Tensor],
    window: tuple[Tensor | None, Tensor | None],
    geometry: Geometry,
    compress: tuple[Compress, Compress],
    rotary: Rotary,
) -> Seen:
    """Append a chunk to a sparse layer's caches.

    Args:
        cache: The layer's caches.
        chunk: Where the tokens lie.
        raw: Keys and values of the compressed branch, [1, T, G, D] and [1, T, G, V]; None where the cache has none. No
            key is rotated yet.
        selected: Keys and values of the selected branch.
        window: Keys and values of the window; None where it reads the selected branch's.
        geometry: Block sizes, in tokens.
        compress: φ of keys and of values, [1, S, G, *] -> [1, C, G, *].
        rotary: Tables of all positions.
    """
    length, stride = geometry.compression_block_size, geometry.compression_stride
    before, after = geometry.num_compressed_blocks(chunk.first), geometry.num_compressed_blocks(chunk.stop)
    slot_of_first = length // stride - 1

    def compressed(
        ring: Tensor | None, tensor: Tensor | None, x: Tensor | None, phi: Compress, *, rotates: bool
    ) -> Tensor | None:
        """All compressed keys or values so far, [1, C, G, *]."""
        if ring is None or tensor is None or x is None:
            return None
        # From the start of the first block that is not compressed yet.
        stretch = chunk.join_ring(ring, x, chunk.first - before * stride)
        blocks = x[:, :0]
        if after > before:
            blocks = phi(stretch)
            if rotates:
                blocks = chunk.rotate(blocks, rotary, before * stride, stride)
            chunk.write(tensor, blocks, before + slot_of_first)
        return chunk.gather(tensor, after + slot_of_first, slot_of_first) if before else blocks

    k_cmp = compressed(cache.k_raw, cache.k_cmp, raw[0], compress[0], rotates=True)
    v_cmp = compressed(cache.v_raw, cache.v_cmp, raw[1], compress[1], rotates=False)
    k_slc = chunk.extend(cache.k_slc, chunk.rotate(selected[0], rotary))
    v_slc = chunk.extend(cache.v_slc, selected[1])
    past = min(chunk.first, geometry.window_size - 1)
    k_win, v_win = (x[:, chunk.first - past :] for x in (k_slc, v_slc))
    if cache.k_win is not None and cache.v_win is not None and window[0] is not None and window[1] is not None:
        k_win = chunk.join_ring(cache.k_win, chunk.rotate(window[0], rotary), past)
        v_win = chunk.join_ring(cache.v_win, window[1], past)
    return Seen(k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention of the last T positions over S: q [1, T, H, D], k [1, S, G, D], v [1, S, G, V]."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    q_per_kv = q.shape[2] // k.shape[2]
    # Copied for every head, because not every kernel behind SDPA shares keys between heads.
    k, v = (x.repeat_interleave(q_per_kv, dim=2).transpose(1, 2) for x in (k, v))
    q = q.transpose(1, 2)
    if num_queries == num_keys:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0:
        # `is_causal` of the public function aligns the first query with the first key. FlashAttention aligns the last
        # ones, and its operator is what `torch.nn.attention.bias.causal_lower_right` calls, whose module imports the
        # compiler.
        o = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0]
        return o.transpose(1, 2)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
