"""Tensors on the meta device, and one step of decoding and one chunk of a prompt there, for the compile tests."""

from unittest import mock

import torch

from trifocal.ops import DecodeBatch, DenseCache, Documents, Geometry, SparseCache, WindowCache, dispatch


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="meta", dtype=dtype)


def meta_documents(length, packed):
    return Documents(*(empty(size, dtype=torch.int32) for size in (4, length, length))) if packed else None


def num_compressed(geometry, length, packed):
    return length // geometry.compression_stride if packed else geometry.num_compressed_blocks(length)


def decode_step(heads, groups, dim, value_dim, new=1, pages=16, learned=False, selected=16):
    """Launch every kernel: of layers of three branches, also with an index, with that alone, dense, and of a window."""
    from trifocal.ops.decode.caches import Index, LearnedCompressor
    from trifocal.ops.decode.triton import append, attention

    geometry, size, batch = Geometry(num_selected_blocks=selected), 256, 64

    def both(*shape):
        return empty(*shape, dim), empty(*shape, value_dim)

    k_slc, v_slc = both(batch * pages, groups, size)
    k_cmp, v_cmp = both(batch * pages, groups, size // geometry.compression_stride)
    rings = *both(batch, groups, 520), *both(batch, groups, 40)
    cache = SparseCache(k_slc, v_slc, k_cmp, v_cmp, *rings)
    counts = (empty(batch, dtype=torch.int32) for _ in range(3))
    sequences = DecodeBatch(*counts, empty(batch, pages, dtype=torch.int32))
    rotary = (empty(4096, dim // 2, dtype=torch.float32),) * 2
    tokens = [x for _ in range(3) for x in both(batch, new, groups)]
    q, gates = empty(batch, new, heads, dim), empty(batch, new, heads, 3, dtype=torch.float32)
    length = geometry.compression_block_size
    phi = tuple(
        LearnedCompressor(empty(length, width), empty(2 * width, length * width), empty(width, 2 * width))
        for width in (dim, value_dim)
    )
    phi = phi if learned else None
    index_rotary = (empty(4096, 32, dtype=torch.float32),) * 2
    indexed = SparseCache(k_slc, v_slc, *[None] * 6, k_idx=empty(batch * pages, 1, size, 64))
    index = Index(empty(batch, new, groups, 64), empty(batch, new, 64), index_rotary)
    slc = (None, None, *tokens[2:4], None, None)
    # Scores in the launch that writes, or in their own.
    for together in (True, False):
        with mock.patch.object(dispatch, "decode_append_scores", return_value=together):
            scores = append.append_sparse(indexed, sequences, slc, geometry, rotary, None, index)
    attention.decode_attention(q, None, indexed, sequences, geometry, rotary, False, 0.1, scores)
    append.append_sparse(cache, sequences, tuple(tokens), geometry, rotary, phi, None)
    attention.decode_attention(q, gates, cache, sequences, geometry, rotary, True, 0.1, None)
    cache = SparseCache(k_slc, v_slc, k_cmp, v_cmp, *rings, k_idx=indexed.k_idx)
    attention.decode_attention(q, gates, cache, sequences, geometry, rotary, True, 0.1, scores)
    dense = DenseCache(k_slc, v_slc)
    append.append_dense(dense, sequences, *tokens[:2], rotary)
    attention.decode_dense_attention(q, dense, sequences, rotary, None, 0.1)
    window = WindowCache(*rings[:2])
    append.append_dense(window, sequences, *tokens[:2], rotary)
    attention.decode_dense_attention(q, window, sequences, rotary, 300, 0.1)


def prompt_chunk(heads, groups, dim, value_dim):
    """Append a chunk with a past and one without, of all branches and an index, and compressed blocks."""
    from trifocal.ops.decode.caches import NewRows, Place
    from trifocal.ops.decode.triton import append_chunk as kernels

    def rotary(width):
        return (empty(4096, width // 2, dtype=torch.float32),) * 2

    place, length = Place(*(empty(size, dtype=torch.int64) for size in (1, 1, 16))), 1024
    for first in (0, length):
        rows = {"q": NewRows(empty(1, length, heads, dim), first, rotary(dim))}
        blocks = {}
        for letter, width, tables in (("k", dim, rotary(dim)), ("v", value_dim, None)):
            x = empty(1, length, groups, width)
            rows[letter] = NewRows(x, 0, tables, empty(16, groups, 256, width))
            blocks[letter] = NewRows(x[:, :64], 1, tables, empty(16, groups, 16, width))
            for name, size in (("win", 519), ("raw", 39)):
                ring = empty(64, groups, size, width)
                used = tables if name == "win" else None
                rows[f"{letter}_{name}"] = NewRows(x, max(0, first - 16), used, ring=ring, ring_end=ring[:1])
        rows["q_idx"] = NewRows(empty(1, length, groups, 64), first, rotary(64))
        rows["k_idx"] = NewRows(empty(1, length, 1, 64), 0, rotary(64), empty(16, 1, 256, 64))
        kernels.append_chunk(rows, place, first, 0, 1)
        kernels.append_chunk({name: rows[name] for name in ("q", "k_win", "v_win")}, place, first, 0, 1)
        kernels.append_chunk(blocks, place, first // 16 + 1, 1, 16)
