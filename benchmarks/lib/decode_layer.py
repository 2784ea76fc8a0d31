"""Whether one layer's attention in a decode step is right: append and attend, beside the reference."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lib.recorder import Refused, Unavailable
from trifocal.nn.attention_base import INDEX_DIM
from trifocal.nn.rope import rotary_tables
from trifocal.ops import (
    DecodeBatch,
    DenseCache,
    Geometry,
    SparseCache,
    WindowCache,
    append_dense,
    append_sparse,
    decode_attention,
    decode_dense_attention,
)
from trifocal.ops.decode.caches import Index
from trifocal.testing.tolerances import allowed, error

_PAGE_SIZE = 256
# Left free beside the caches: partial results, and what flushes the L2 cache.
_SPARE_BYTES = 2**31


class LayerShape(NamedTuple):
    """Sequences, tokens of each with the new one, query heads, KV heads, and the dims of keys and values."""

    sequences: int
    tokens: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int


def _step(
    attention: str, shape: LayerShape, geometry: Geometry, device: torch.device, dtype: torch.dtype, backend: str
) -> Callable[[], Tensor]:
    """Random caches and new tokens; the step that appends and attends, the same each time it is called."""
    sequences, tokens, heads, groups, dim, value_dim = shape
    size = max(_PAGE_SIZE, geometry.selection_block_size)
    columns = -(-tokens // size)
    window, block = geometry.window_size, geometry.compression_block_size
    # Every token once for the selected branch, a stride's share for the compressed one, rings.
    rows = sequences * groups * (columns * size * (1 + 1 / geometry.compression_stride) + window + block)
    check_memory(int(rows * (dim + value_dim)) * dtype.itemsize, device)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

    def keys_and_values(*sizes: int) -> tuple[Tensor, Tensor]:
        return draw(*sizes, dim), draw(*sizes, value_dim)

    def numbers(values: Tensor) -> Tensor:
        return values.to(device, torch.int32)

    order = torch.randperm(sequences * columns, generator=torch.Generator().manual_seed(0))
    batch = DecodeBatch(
        rows=numbers(torch.arange(sequences)),
        lengths=numbers(torch.full((sequences,), tokens - 1)),
        num_new=numbers(torch.ones(sequences)),
        block_table=numbers(order.view(sequences, columns)),
    )
    rotary = rotary_tables(torch.arange(tokens, device=device), dim, 10000.0, torch.promote_types(dtype, torch.float32))
    q, k, v = draw(sequences, 1, heads, dim), draw(sequences, 1, groups, dim), draw(sequences, 1, groups, value_dim)
    pages = keys_and_values(sequences * columns, groups, size)
    if attention == "dense":
        dense = DenseCache(*pages)

        def attend_dense() -> Tensor:
            append_dense(dense, batch, k, v, rotary, backend)
            return decode_dense_attention(q, dense, batch, rotary, backend=backend)

        return attend_dense
    if attention == "window":
        rings = WindowCache(*keys_and_values(sequences, groups, window))

        def attend_window() -> Tensor:
            append_dense(rings, batch, k, v, rotary, backend)
            return decode_dense_attention(q, rings, batch, rotary, window_size=window, backend=backend)

        return attend_window
    if attention == "selected":
        indexed = SparseCache(*pages, *[None] * 6, k_idx=draw(sequences * columns, 1, size, INDEX_DIM))
        tables = rotary_tables(torch.arange(tokens, device=device), INDEX_DIM, 10000.0, rotary[0].dtype)
        index = Index(draw(sequences, 1, groups, INDEX_DIM), draw(sequences, 1, INDEX_DIM), tables)

        def attend_selected() -> Tensor:
            new = None, None, k, v, None, None
            scores = append_sparse(indexed, batch, *new, geometry, rotary, backend=backend, index=index)
            return decode_attention(
                q, None, indexed, batch, geometry, rotary, window=False, backend=backend, scores=scores
            )

        return attend_selected
    cache = SparseCache(
        *pages,
        *keys_and_values(sequences * columns, groups, size // geometry.compression_stride),
        *keys_and_values(sequences, groups, window),
        *keys_and_values(sequences, groups, block),
    )
    gates = draw(sequences, 1, heads, 3).float().sigmoid()

    def attend() -> Tensor:
        append_sparse(cache, batch, k, v, k, v, k, v, geometry, rotary, backend=backend)
        return decode_attention(q, gates, cache, batch, geometry, rotary, window=True, backend=backend)

    return attend


def check_step(attention: str, shape: LayerShape, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> None:
    """Compare a small step with the reference; all blocks are chosen, so that no choice depends on rounding."""
    tokens = min(shape.tokens, geometry.selected_tokens - 1)
    small = shape._replace(sequences=2, tokens=tokens)
    o, expected = (_step(attention, small, geometry, device, dtype, backend)() for backend in ("auto", "reference"))
    found, bound = error(o, expected), allowed(dtype, device)
    if not found <= bound:
        raise Refused(f"a step is off by {found:.3g} at {tokens} tokens, allowed is {bound:.3g}")


def check_memory(needed: int, device: torch.device) -> None:
    """Refuse caches that do not fit beside what is there."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if needed + _SPARE_BYTES > free:
            raise Unavailable(f"the caches take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
