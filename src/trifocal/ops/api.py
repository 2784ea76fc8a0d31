"""The public operations: arguments are checked here, a backend is chosen here, and nothing is computed here."""

from torch import Tensor

from trifocal.ops import operators, pipeline, reference
from trifocal.ops.dispatch import resolve
from trifocal.ops.geometry import LARGEST_SIZE, Geometry
from trifocal.ops.layout import Documents, num_compressed_slots, num_packed_compressed_blocks
from trifocal.ops.validation import (
    check_attention_arguments,
    check_beside,
    check_branches,
    check_compressed_count,
    check_floats,
    check_geometry,
    check_index_tensors,
    check_queries_and_keys,
    check_rank,
    check_selected_blocks,
    check_whole_number,
    check_window_keys,
    resolve_documents,
    resolve_scale,
)


def mean_compress(
    x: Tensor, geometry: Geometry, *, cu_seqlens: Tensor | Documents | None = None, backend: str = "auto"
) -> Tensor:
    """Compress keys or values by the mean over each block: the simplest φ.

    Args:
        x: Keys or values, [B, S, G, D].
        geometry, cu_seqlens, backend: See `trifocal.ops`.

    Returns:
        [B, C, G, D] in the type of x, summed in fp32 (fp64 for fp64). With a `Documents` instead of a tensor, C is the
            padded count `S // d`, known without a look at the data; slots past the documents' own are zero.

    Raises:
        ValueError: If x has another rank, or the boundaries do not fit.

    Source: arXiv:2502.11089, Eq. 7, with the mean for φ.
    """
    check_geometry(geometry)
    check_rank("x", x, "[B, S, G, D]")
    check_floats("x", x)
    num_tokens = x.shape[1]
    documents = resolve_documents(cu_seqlens, x, num_tokens)
    if documents is None or isinstance(cu_seqlens, Documents):
        num_blocks = num_compressed_slots(num_tokens, geometry, documents)
    else:
        num_blocks = num_packed_compressed_blocks(documents, geometry)
    # No heads, no scores, no selection: only device, type and width count.
    if resolve("mean_compress", backend, x, x, None) == "triton":
        return operators.mean_compress(x, geometry, num_blocks, documents)
    return reference.mean_compress(x, geometry, documents, num_blocks)


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    geometry: Geometry,
    *,
    num_keys: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | Documents | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend to the compressed blocks that lie wholly in each query's past.

    Args:
        q: Queries, [B, T, H, D].
        k_cmp, v_cmp: Compressed keys and values, [B, C, G, D] and [B, C, G, V].
        geometry, num_keys, scale, cu_seqlens, backend: See `trifocal.ops`.

    Returns:
        o, [B, T, H, V], in the type of q, zero where a query sees no block; and the log-sum-exp of the scores,
            [B, T, H], natural log, fp32 (fp64 for fp64), -inf where a query sees no block.

    Raises:
        ValueError: If an argument does not fit; see `trifocal.ops`.

    Both results are differentiable. Source: arXiv:2502.11089, Eq. 5 to 8.
    """
    check_geometry(geometry)
    check_attention_arguments(q, k_cmp, v_cmp, names=("k_cmp", "v_cmp"), keys="C")
    num_keys = _num_keys(num_keys, q)
    documents = resolve_documents(cu_seqlens, q, num_keys)
    check_compressed_count(k_cmp, geometry, num_keys, documents)
    scale = resolve_scale(scale, q)
    if resolve("compressed_attention", backend, q, v_cmp, geometry, scale) == "triton":
        return operators.compressed_attention(q, k_cmp, v_cmp, geometry, num_keys, scale, documents)
    return reference.compressed_attention(q, k_cmp, v_cmp, geometry, num_keys, scale, documents)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    geometry: Geometry,
    *,
    num_keys: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | Documents | None = None,
    backend: str = "auto",
) -> Tensor:
    """Choose the selection blocks that each query group attends to.

    Importance is the compressed attention's probability, spread over selection blocks by overlap and summed over the
    heads of a group, so that the group shares its choice.

    Args:
        q: Queries, [B, T, H, D].
        k_cmp: Compressed keys, [B, C, G, D].
        lse: Log-sum-exp of the compressed scores, [B, T, H], natural log; -inf where no block is visible.
        geometry, num_keys, scale, cu_seqlens, backend: See `trifocal.ops`.

    Returns:
        Block indices, [B, T, G, N], int32, ascending, then -1 where there are fewer than N candidates.

    Raises:
        ValueError: If C is not what the geometry gives for S keys, or another argument does not fit.

    Not differentiable. Ties: the lower index. Source: arXiv:2502.11089, Eq. 8 to 11.
    """
    check_geometry(geometry)
    check_queries_and_keys(q, k_cmp, name="k_cmp", keys="C")
    check_beside("lse", lse, "[B, T, H]", q.shape[:3], q)
    num_keys = _num_keys(num_keys, q)
    documents = resolve_documents(cu_seqlens, q, num_keys)
    check_compressed_count(k_cmp, geometry, num_keys, documents)
    scale = resolve_scale(scale, q)
    chosen = resolve("select_blocks", backend, q, k_cmp, geometry, scale)
    inputs = (q.detach(), k_cmp.detach(), lse.detach())
    return operators.select_blocks(*inputs, geometry, num_keys, scale, documents, chosen)


def select_blocks_by_index(
    q_idx: Tensor,
    k_idx: Tensor,
    geometry: Geometry,
    *,
    num_keys: int | None = None,
    cu_seqlens: Tensor | Documents | None = None,
    backend: str = "auto",
) -> Tensor:
    """Choose selection blocks by an index: small queries and keys that only choose.

    The importance of a block is the largest `q_idx . k_idx` of its tokens up to the query's own.

    Args:
        q_idx: One index query a group, [B, T, G, Di].
        k_idx: One index key a token, for all groups, [B, S, Di].
        num_keys: S; the number of index keys when not given.
        geometry, cu_seqlens, backend: See `trifocal.ops`.

    Returns:
        Block indices as of `select_blocks`, [B, T, G, N].

    Raises:
        ValueError: If an argument does not fit; see `trifocal.ops`.

    Not differentiable; `trifocal.ops.choice_loss` teaches an index. Ties: the lower index.
    """
    check_geometry(geometry)
    check_index_tensors(q_idx, k_idx)
    if num_keys is not None and num_keys != k_idx.shape[1]:
        raise ValueError(f"k_idx [B, S, Di] must have num_keys = {num_keys} keys, got {list(k_idx.shape)}")
    documents = resolve_documents(cu_seqlens, q_idx, k_idx.shape[1])
    chosen = resolve("select_blocks_by_index", backend, q_idx, k_idx[:, :, None], geometry)
    return operators.select_blocks_by_index(q_idx.detach(), k_idx.detach(), geometry, documents, chosen)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected_blocks: Tensor,
    geometry: Geometry,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Documents | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend to every token, up to the query's own, of the blocks that the query's group chose.

    Args:
        q: Queries, [B, T, H, D].
        k, v: Keys and values, [B, S, G, D] and [B, S, G, V].
        selected_blocks: The choice, [B, T, G, N].
        geometry, scale, cu_seqlens, backend: See `trifocal.ops`, also for selected_blocks.

    Returns:
        o, [B, T, H, V], in the type of q; zero where nothing was chosen.

    Raises:
        ValueError: If an argument does not fit; see `trifocal.ops`.

    Source: arXiv:2502.11089, Section 3.3.2.
    """
    check_geometry(geometry)
    check_attention_arguments(q, k, v, names=("k", "v"), keys="S")
    documents = resolve_documents(cu_seqlens, q, k.shape[1])
    check_selected_blocks(selected_blocks, q, k)
    scale = resolve_scale(scale, q)
    if resolve("selected_attention", backend, q, v, geometry, scale) == "triton":
        return operators.selected_attention(q, k, v, selected_blocks, geometry, scale, documents)[0]
    return reference.selected_attention(q, k, v, selected_blocks, geometry, scale, documents)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: int,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Documents | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend to the last `window_size` tokens, the query's own included.

    Args:
        q: Queries, [B, T, H, D].
        k, v: Keys and values, [B, S, G, D] and [B, S, G, V].
        window_size: Keys that a query sees, from 1 to 2**31 - 1.
        scale, cu_seqlens, backend: See `trifocal.ops`.

    Returns:
        o, [B, T, H, V], in the type of q.

    Raises:
        ValueError: If an argument does not fit; see `trifocal.ops`.

    Source: arXiv:2502.11089, Section 3.3.3.
    """
    check_whole_number("window_size", window_size, 1, LARGEST_SIZE)
    check_attention_arguments(q, k, v, names=("k", "v"), keys="S")
    documents = resolve_documents(cu_seqlens, q, k.shape[1])
    scale = resolve_scale(scale, q)
    if resolve("window_attention", backend, q, v, None, scale) == "triton":
        return operators.window_attention(q, k, v, window_size, scale, documents)[0]
    return reference.window_attention(q, k, v, window_size, scale, documents)


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
    cu_seqlens: Tensor | Documents | None = None,
    selected_blocks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Native Sparse Attention: compressed, selected and window attention, mixed by gates.

    Args:
        q: Queries, [B, T, H, D].
        k_cmp, v_cmp: Compressed keys and values, [B, C, G, D] and [B, C, G, V].
        k_slc, v_slc: Keys and values of the selected branch, [B, S, G, D] and [B, S, G, V].
        k_win, v_win: Keys and values of the window branch; the last min(S, T + w - 1) tokens are enough.
        gates: Weights of the branches in the order cmp, slc, win, [B, T, H, 3].
        selected_blocks: The choice, [B, T, G, N], to use instead of `select_blocks`.
        geometry, scale, cu_seqlens, backend: See `trifocal.ops`, also for selected_blocks.

    Returns:
        o, [B, T, H, V], in the type of q.

    Raises:
        ValueError: If an argument does not fit; see `trifocal.ops`.

    Source: arXiv:2502.11089, Eq. 5.
    """
    check_geometry(geometry)
    check_attention_arguments(q, k_cmp, v_cmp, names=("k_cmp", "v_cmp"), keys="C")
    check_attention_arguments(q, k_slc, v_slc, names=("k_slc", "v_slc"), keys="S")
    check_attention_arguments(q, k_win, v_win, names=("k_win", "v_win"), keys="S")
    check_branches(v_cmp, v_slc, v_win)
    num_keys = k_slc.shape[1]
    documents = resolve_documents(cu_seqlens, q, num_keys)
    check_compressed_count(k_cmp, geometry, num_keys, documents)
    check_window_keys(q, k_win, num_keys, geometry.window_size, packed=documents is not None)
    check_beside("gates", gates, "[B, T, H, 3]", (*q.shape[:3], 3), q)
    if selected_blocks is not None:
        check_selected_blocks(selected_blocks, q, k_slc)
    scale = resolve_scale(scale, q)
    if resolve("nsa_attention", backend, q, v_slc, geometry, scale) == "triton":
        inputs = (k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
        return pipeline.nsa_attention(q, inputs, gates, geometry, scale, documents, selected_blocks)
    o_cmp, lse = reference.compressed_attention(q, k_cmp, v_cmp, geometry, num_keys, scale, documents)
    if selected_blocks is None:
        detached = (q.detach(), k_cmp.detach(), lse.detach())
        selected_blocks = operators.select_blocks(*detached, geometry, num_keys, scale, documents, "reference")
    return reference.nsa_attention(
        q, k_slc, v_slc, k_win, v_win, gates, geometry, scale, documents, selected_blocks, o_cmp
    )


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    geometry: Geometry,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Documents | None = None,
    backend: str = "auto",
) -> Tensor:
    """Native Sparse Attention with the same keys and values in all branches, compressed by their mean.

    `nsa_attention` takes other keys for each branch, and any compressor.

    Args:
        q: Queries, [B, T, H, D].
        k, v: Keys and values, [B, S, G, D] and [B, S, G, V].
        gates: Weights of the branches in the order cmp, slc, win, [B, T, H, 3].
        geometry, scale, cu_seqlens, backend: See `trifocal.ops`.

    Returns:
        o, [B, T, H, V], in the type of q.

    Raises:
        ValueError: If an argument does not fit; see `trifocal.ops`.

    Source: arXiv:2502.11089, Eq. 5, with the mean for φ.
    """
    check_attention_arguments(q, k, v, names=("k", "v"), keys="S")
    k_cmp, v_cmp = (mean_compress(x, geometry, cu_seqlens=cu_seqlens, backend=backend) for x in (k, v))
    return nsa_attention(
        q, k_cmp, v_cmp, k, v, k, v, gates, geometry, scale=scale, cu_seqlens=cu_seqlens, backend=backend
    )


def _num_keys(num_keys: int | None, q: Tensor) -> int:
    if num_keys is None:
        return q.shape[1]
    check_whole_number("num_keys", num_keys, 1)
    return num_keys
