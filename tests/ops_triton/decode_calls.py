"""One step of decoding on the meta device, for the compile tests."""

import torch

from trifocal.ops import DecodeBatch, DenseCache, Geometry, SparseCache


def decode_step(
    heads, groups, dim, value_dim, new=1, dtype=torch.bfloat16, batch=64, pages=16, learned=False, selected=16,
    index_queries=1,
):  # fmt: skip
    """Launch every kernel: of layers of three branches, with an index alone, dense, and with a window alone."""
    from trifocal.ops.decode.triton import append, attention

    geometry, size = Geometry(num_selected_blocks=selected), 256

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, device="meta", dtype=dtype)

    def both(*shape):
        return empty(*shape, dim), empty(*shape, value_dim)

    k_slc, v_slc = both(batch * pages, groups, size)
    k_cmp, v_cmp = both(batch * pages, groups, size // geometry.compression_stride)
    cache = SparseCache(k_slc, v_slc, k_cmp, v_cmp, *both(batch, groups, 520), *both(batch, groups, 40))
    counts = (empty(batch, dtype=torch.int32) for _ in range(3))
    sequences = DecodeBatch(*counts, empty(batch, pages, dtype=torch.int32))
    rotary = (empty(4096, dim // 2, dtype=torch.float32),) * 2
    tokens = [x for _ in range(3) for x in both(batch, new, groups)]
    q, gates = empty(batch, new, heads, dim), empty(batch, new, heads, 3, dtype=torch.float32)
    phi = (lambda windows: windows[:, 0],) * 2 if learned else None
    append.append_sparse(cache, sequences, tuple(tokens), geometry, rotary, phi, None)
    attention.decode_attention(q, gates, cache, sequences, geometry, rotary, True, 0.1, None)
    index_rotary = (empty(4096, 32, dtype=torch.float32),) * 2
    indexed = SparseCache(k_slc, v_slc, *[None] * 6, k_idx=empty(batch * pages, 1, size, 64))
    keys = empty(batch, new, 64), index_rotary
    append.append_sparse(indexed, sequences, (None, None, *tokens[2:4], None, None), geometry, rotary, None, keys)
    queries = empty(batch, new, groups * index_queries, 64), index_rotary
    attention.decode_attention(q, None, indexed, sequences, geometry, rotary, False, 0.1, queries)
    dense = DenseCache(k_slc, v_slc)
    append.append_dense(dense, sequences, *tokens[:2], rotary)
    for window in (None, 300):
        attention.decode_dense_attention(q, dense, sequences, rotary, window, 0.1)
