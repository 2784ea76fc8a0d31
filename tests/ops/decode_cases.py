"""Sequences, caches full of NaN, and the attention of whole sequences that decoding must equal."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tests.ops.cases import ODD, ONE_SIZE, STRIDE_ONE, USUAL, geometry
from trifocal import Geometry, nsa_attention
from trifocal.nn.rope import rotary_tables, rotate
from trifocal.ops import (
    DecodeBatch,
    DenseCache,
    SparseCache,
    WindowCache,
    append_dense,
    append_sparse,
    compressed_attention,
    decode_attention,
    decode_dense_attention,
    select_blocks,
    select_blocks_by_index,
    selected_attention,
    window_attention,
)
from trifocal.ops.decode.caches import Index, LearnedCompressor

FOUR_A_BLOCK = geometry(16, 4, 16, 3, 1, 1, 21)


@dataclass(frozen=True)
class Case:
    """One set of shapes; `why` says what only it covers.

    `window`: "own" keys, "shared" ones, or none. `index`: width of an index that chooses; 0: compressed keys do.
    """

    why: str
    geometry: Geometry
    heads: int = 4
    groups: int = 2
    dim: int = 8
    value_dim: int = 8
    page_blocks: int = 1
    window: str = "own"
    selected_only: bool = False
    learned: bool = False
    index: int = 0

    @property
    def compresses(self):
        return not (self.selected_only and self.index)

    @property
    def page_size(self):
        return self.page_blocks * self.geometry.selection_block_size


CASES = (
    Case("the paper's proportions, 3 heads a group, V < D", USUAL, 6, 2, 8, 6),
    Case("one head a group, V > D, no power of two", ODD, 3, 3, 6, 10, page_blocks=2),
    Case("7 heads, pages of three blocks", USUAL, 7, 1, page_blocks=3),
    Case("everything shared", USUAL, 4, 1, window="shared"),
    Case("the selected branch alone", USUAL, 4, 2, 8, 4, window="none", selected_only=True),
    Case("no window", USUAL, 2, 1, window="none"),
    Case("learned compression", USUAL, 4, 2, 8, 6, learned=True),
    Case("an index for three branches", ODD, 6, 3, 6, 10, learned=True, index=12),
    Case("an index alone", USUAL, 4, 2, 8, 6, page_blocks=3, window="none", selected_only=True, index=8),
    Case("a compressed block at every token", STRIDE_ONE, 2, 1, page_blocks=2),
    Case("l = d = l', a window of one key", ONE_SIZE, 8, 1),
    Case("blocks of four strides", FOUR_A_BLOCK, 4, 2),
)


class Tokens(NamedTuple):
    """Of B sequences, [B, S, heads, *]; keys and queries not rotated."""

    q: Tensor
    gates: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor
    q_idx: Tensor
    k_idx: Tensor

    def part(self, sequence, stop):
        return Tokens(*(x[sequence : sequence + 1, :stop] for x in self))


def draw(case, batch, length, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(heads, width):
        return torch.randn(batch, length, heads, width, generator=generator, dtype=torch.float64).to(device, dtype)

    k, v = (case.groups, case.dim), (case.groups, case.value_dim)
    tokens = Tokens(
        normal(case.heads, case.dim), normal(case.heads, 3).sigmoid(), *(normal(*size) for size in (k, v, k, v, k, v)),
        normal(case.groups, case.index), normal(1, case.index),
    )  # fmt: skip
    return tokens._replace(k_win=tokens.k_slc, v_win=tokens.v_slc) if case.window == "shared" else tokens


def tables(case, length, like, dim=0):
    dtype = torch.promote_types(like.dtype, torch.float32)
    return rotary_tables(torch.arange(length, device=like.device), dim or case.dim, 10000.0, dtype)


def compressor(width, geometry, like):
    """A learned φ; its hidden units are no multiple of what a program of the kernels makes."""
    generator = torch.Generator().manual_seed(width)
    length, hidden = geometry.compression_block_size, 2 * width + 3

    def draw(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
        return x.to(like.device, like.dtype)

    return LearnedCompressor(draw(length, width), draw(hidden, length * width), draw(width, hidden))


def compressed(case, x):
    """[1, S, G, *] -> [1, C, G, *] by the case's φ; keys are not rotated."""
    rules = case.geometry
    if x.shape[1] < rules.compression_block_size:
        return x[:, :0]
    windows = x[0].unfold(0, rules.compression_block_size, rules.compression_stride).movedim(-1, 1)
    mean = windows.mean(1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)[None]
    if not case.learned:
        return mean
    positions, up, down = compressor(x.shape[-1], rules, x)
    placed = (windows + positions[:, None]).transpose(1, 2).flatten(2)
    return mean + functional.silu(placed @ up.T) @ down.T


def whole(case, tokens):
    """Attention of one whole sequence, [1, S, H, V], by the reference."""
    rules, length = case.geometry, tokens.q.shape[1]
    cos, sin = tables(case, length, tokens.q)
    q, k_slc, k_win = (rotate(x, cos, sin) for x in (tokens.q, tokens.k_slc, tokens.k_win))
    k_cmp, v_cmp = compressed(case, tokens.k_cmp), compressed(case, tokens.v_cmp)
    starts = torch.arange(k_cmp.shape[1], device=q.device) * rules.compression_stride
    k_cmp = rotate(k_cmp, cos[starts], sin[starts])
    chosen = None
    if case.index:
        q_idx, k_idx = (rotate(x, *tables(case, length, x, case.index)) for x in (tokens.q_idx, tokens.k_idx))
        chosen = select_blocks_by_index(q_idx, k_idx[:, :, 0], rules, backend="reference")
    if case.window != "none":
        inputs = (q, k_cmp, v_cmp, k_slc, tokens.v_slc, k_win, tokens.v_win, tokens.gates)
        return nsa_attention(*inputs, rules, selected_blocks=chosen, backend="reference")
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, rules, backend="reference")
    if chosen is None:
        chosen = select_blocks(q, k_cmp, lse, rules, backend="reference")
    o_slc = selected_attention(q, k_slc, tokens.v_slc, chosen, rules, backend="reference")
    if case.selected_only:
        return o_slc
    return tokens.gates[..., :1] * o_cmp + tokens.gates[..., 1:2] * o_slc


class Decoder:
    """Caches of a batch of sequences in shuffled pages, NaN wherever nothing was written.

    Args:
        case: Shapes.
        tokens: All tokens of the sequences; decoding goes through them.
        most_new: T.
        backend: Of every call.
        spare_pages: Columns of the block table that nobody needs; their entries are no pages.
        seed: Of the order of pages and rows.
        length: Tokens of the longest sequence, where `tokens` are fewer, which follow again and again.

    Attributes:
        spared: What its batches say of themselves, `takes_all` and `ends_block`.
    """

    def __init__(self, case, tokens, most_new, backend, spare_pages=1, seed=0, length=0):
        self.case, self.tokens, self.most_new, self.backend = case, tokens, most_new, backend
        self.spared, self.scores = {}, None
        rules, device, dtype = case.geometry, tokens.q.device, tokens.q.dtype
        batch, length = len(tokens.q), length or tokens.q.shape[1]
        self.rotary = tables(case, length, tokens.q)
        self.rotary_idx = tables(case, length, tokens.q, case.index) if case.index else None
        columns = -(-length // case.page_size)
        pages, rows = batch * columns + 1, batch + 1
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(pages, generator=generator)[: batch * columns].view(batch, columns)
        table = torch.cat((order, torch.full((batch, spare_pages), -(2**30))), 1)
        self.table = table.to(device, torch.int32)
        self.rows = torch.randperm(rows, generator=generator)[:batch].to(device, torch.int32)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        # Made once: a recorded step may not copy from the host.
        widths = (case.dim, case.value_dim) if case.learned else ()
        self.phi = tuple(compressor(width, rules, tokens.q) for width in widths) or None

        def empty(first, size, width, groups=case.groups):
            return torch.full((first, groups, size, width), torch.nan, device=device, dtype=dtype)

        def ring(reach, width):
            return empty(rows, reach - 1 + most_new, width)

        slots = case.page_size // rules.compression_stride
        own, values = case.window == "own", not case.selected_only
        self.cache = SparseCache(
            k_slc=empty(pages, case.page_size, case.dim),
            v_slc=empty(pages, case.page_size, case.value_dim),
            k_cmp=empty(pages, slots, case.dim) if case.compresses else None,
            v_cmp=empty(pages, slots, case.value_dim) if values else None,
            k_win=ring(rules.window_size, case.dim) if own else None,
            v_win=ring(rules.window_size, case.value_dim) if own else None,
            k_raw=ring(rules.compression_block_size, case.dim) if case.compresses else None,
            v_raw=ring(rules.compression_block_size, case.value_dim) if values else None,
            k_idx=empty(pages, case.page_size, case.index, 1) if case.index else None,
        )
        self.dense = DenseCache(self.cache.k_slc.clone(), self.cache.v_slc.clone())
        self.rings = None

    def fill(self, lengths):
        """Put the first tokens of each sequence where they belong, one by one, without `append_sparse`."""
        case, rules, cache = self.case, self.case.geometry, self.cache
        stride, late = rules.compression_stride, rules.compression_block_size // rules.compression_stride - 1
        for sequence, length in enumerate(lengths):
            past = self.tokens.part(sequence, length)
            cos, sin = (table[:length] for table in self.rotary)
            k_slc, k_win = rotate(past.k_slc, cos, sin), rotate(past.k_win, cos, sin)
            k_idx = past.k_idx
            if self.rotary_idx is not None:
                k_idx = rotate(k_idx, *(table[:length] for table in self.rotary_idx))
            k_cmp, v_cmp = compressed(case, past.k_cmp), compressed(case, past.v_cmp)
            k_cmp = rotate(k_cmp, cos[: k_cmp.shape[1] * stride : stride], sin[: k_cmp.shape[1] * stride : stride])
            for pages, x, before in (
                (cache.k_slc, k_slc, 0), (cache.v_slc, past.v_slc, 0), (self.dense.k, k_slc, 0),
                (self.dense.v, past.v_slc, 0), (cache.k_cmp, k_cmp, late), (cache.v_cmp, v_cmp, late),
                (cache.k_idx, k_idx, 0),
            ):  # fmt: skip
                if pages is not None:
                    index = torch.arange(x.shape[1], device=x.device) + before
                    page = self.table[sequence, index // pages.shape[2]].long()
                    pages.transpose(1, 2)[page, index % pages.shape[2]] = x[0]
            row = self.rows[sequence]
            for held, x in (
                (cache.k_win, k_win), (cache.v_win, past.v_win),
                (cache.k_raw, past.k_cmp), (cache.v_raw, past.v_cmp),
            ):  # fmt: skip
                if held is not None:
                    index = torch.arange(max(0, length - held.shape[2]), length, device=x.device)
                    held.transpose(1, 2)[row, index % held.shape[2]] = x[0, index]
        self.lengths.copy_(torch.tensor(lengths))

    def randomise(self, lengths):
        """Random numbers everywhere in the caches: for lengths that `fill` would take too long for."""
        generator = torch.Generator(self.lengths.device).manual_seed(7)
        for x in (*vars(self.cache).values(), self.dense.k, self.dense.v):
            if x is not None:
                x.normal_(generator=generator)
        self.lengths.copy_(torch.tensor(lengths))

    def batch(self, num_new):
        new = torch.tensor(num_new, dtype=torch.int32, device=self.lengths.device)
        return DecodeBatch(self.rows, self.lengths.clone(), new, self.table, **self.spared)

    def new_tokens(self, num_new):
        """The next T tokens of each sequence, NaN past its new ones."""
        index = self.lengths.long()[:, None] + torch.arange(self.most_new, device=self.lengths.device)
        exists = index < (self.lengths + torch.tensor(num_new, device=self.lengths.device))[:, None]
        index = index.where(exists, 0) % self.tokens.q.shape[1]
        rows = torch.arange(len(num_new), device=index.device)[:, None]
        return Tokens(*(x[rows, index].where(exists[..., None, None], torch.nan) for x in self.tokens))

    def append(self, num_new):
        """Put the next tokens of each sequence into the caches; `lengths` stay as they are."""
        new, batch = self.new_tokens(num_new), self.batch(num_new)
        self.append_tokens(new, batch)
        return new, batch

    def append_tokens(self, new, batch):
        case = self.case
        own, values = case.window == "own", not case.selected_only
        self.scores = append_sparse(
            self.cache, batch, new.k_cmp if case.compresses else None, new.v_cmp if values else None,
            new.k_slc, new.v_slc, new.k_win if own else None, new.v_win if own else None, case.geometry, self.rotary,
            compress=self.phi, backend=self.backend,
            index=self.rotary_idx and Index(new.q_idx, new.k_idx[:, :, 0], self.rotary_idx),
        )  # fmt: skip

    def step(self, num_new):
        """Append the next tokens of each sequence and attend: o [B, T, H, V]."""
        new, batch = self.append(num_new)
        o = self.attend(new, batch)
        self.lengths += batch.num_new
        return o

    def attend(self, new, batch):
        case = self.case
        return decode_attention(
            new.q, None if case.selected_only else new.gates, self.cache, batch, case.geometry, self.rotary,
            window=case.window != "none", backend=self.backend, scores=self.scores,
        )  # fmt: skip

    def windows(self, window_size):
        """Rings of the last tokens, made when they are first asked for."""
        if self.rings is None:
            size, rings = window_size - 1 + self.most_new, []
            for pages in vars(self.dense).values():
                shape = len(self.rows) + 1, pages.shape[1], size, pages.shape[3]
                rings.append(pages.new_full(shape, torch.nan))
                for row, table, length in zip(self.rows.tolist(), self.table, self.lengths.tolist(), strict=True):
                    token = torch.arange(max(0, length - size), length, device=pages.device)
                    page = table[token // self.case.page_size].long()
                    rings[-1][row, :, token % size] = pages[page, :, token % self.case.page_size].transpose(0, 1)
            self.rings = WindowCache(*rings)
        return self.rings

    def step_dense(self, num_new, window_size=None):
        """As `step`, for full attention over the selected branch's keys, or for the last tokens alone."""
        new, batch = self.new_tokens(num_new), self.batch(num_new)
        cache = self.dense if window_size is None else self.windows(window_size)
        append_dense(cache, batch, new.k_slc, new.v_slc, self.rotary, backend=self.backend)
        o = decode_dense_attention(new.q, cache, batch, self.rotary, window_size=window_size, backend=self.backend)
        self.lengths += batch.num_new
        return o


def whole_dense(case, tokens, window_size=None):
    cos, sin = tables(case, tokens.q.shape[1], tokens.q)
    q, k = rotate(tokens.q, cos, sin), rotate(tokens.k_slc, cos, sin)
    return window_attention(q, k, tokens.v_slc, window_size or tokens.q.shape[1], backend="reference")
