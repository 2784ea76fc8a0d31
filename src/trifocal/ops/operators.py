"""The operators that the dispatcher sees: `torch.ops.trifocal.*`, with all that compilers and checkpoint policies need.

An operator is opaque: `torch.compile` neither looks into it nor breaks the graph at it, and a policy of activation
checkpointing can keep its result. So each has a fake implementation, which gives shapes alone, and a backward that
is an operator too. Bodies are the Triton kernels, imported when they first run; `select_blocks`, which has no backward
and is watched by telemetry, is one operator for both backends.

The stages of the whole attention are these operators too, called without gradients, in front of one boundary of
autograd: `trifocal.ops.pipeline`.

Geometry travels as a list of its sizes, documents as their three tensors or three times None.
"""

import functools
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from trifocal.ops import reference
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents

ANY_STRIDES = (torch.Tag.flexible_layout,)
"""Tags of operators that accept any strides: without them the compiler copies q once for each of them."""

DocumentTensors = tuple[Tensor | None, Tensor | None, Tensor | None]


def sizes_of(geometry: Geometry) -> list[int]:
    """A geometry as operators take it."""
    # Not `astuple`, which deep-copies every number: slow, and PyTorch 2.11 cannot compile it on Python 3.11.
    return [getattr(geometry, field.name) for field in fields(geometry)]


def geometry_of(sizes: list[int]) -> Geometry:
    """The geometry behind `sizes_of`; made and checked once."""
    return _geometry(tuple(sizes))


@functools.cache
def _geometry(sizes: tuple[int, ...]) -> Geometry:
    return Geometry(*sizes)


def tensors_of(documents: Documents | None) -> DocumentTensors:
    """Documents as operators take them."""
    return (None, None, None) if documents is None else documents[:3]


def documents_of(cu_seqlens: Tensor | None, ids: Tensor | None, positions: Tensor | None) -> Documents | None:
    """Documents from an operator's arguments; None when there are none."""
    if cu_seqlens is None or ids is None or positions is None:
        return None
    return Documents(cu_seqlens, ids, positions)


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _empty_o(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]))


def _contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("trifocal::mean_compress", mutates_args=(), tags=ANY_STRIDES)
def mean_compress(
    x: Tensor,
    geometry: list[int],
    num_blocks: int,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """Means of the compressed blocks, [B, C, G, D]; see `trifocal.ops.mean_compress`."""
    from trifocal.ops.triton.mean_compression import mean_compress_forward

    documents = documents_of(cu_seqlens, ids, positions)
    with torch.cuda.device_of(x):
        return mean_compress_forward(x, geometry_of(geometry), num_blocks, documents)


@mean_compress.register_fake
def _(x: Tensor, geometry: list[int], num_blocks: int, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], num_blocks, *x.shape[2:]))


@torch.library.custom_op("trifocal::mean_compress_backward", mutates_args=(), tags=ANY_STRIDES)
def mean_compress_backward(
    d_x_cmp: Tensor,
    geometry: list[int],
    num_tokens: int,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """Gradient of the tokens, [B, S, G, D]."""
    from trifocal.ops.triton.mean_compression import mean_compress_backward as backward

    documents = documents_of(cu_seqlens, ids, positions)
    with torch.cuda.device_of(d_x_cmp):
        return backward(d_x_cmp, geometry_of(geometry), num_tokens, documents)


@mean_compress_backward.register_fake
def _(d_x_cmp: Tensor, geometry: list[int], num_tokens: int, *_: Any) -> Tensor:
    return d_x_cmp.new_empty((d_x_cmp.shape[0], num_tokens, *d_x_cmp.shape[2:]))


def _save_mean(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.geometry, _, *documents = inputs
    ctx.num_tokens = x.shape[1]
    ctx.save_for_backward(*documents)


def _mean_gradients(ctx: Any, d_x_cmp: Tensor) -> tuple[Tensor | None, ...]:
    d_x = mean_compress_backward(d_x_cmp, ctx.geometry, ctx.num_tokens, *ctx.saved_tensors)
    return d_x, *(None,) * 5


mean_compress.register_autograd(_mean_gradients, setup_context=_save_mean)


@torch.library.custom_op("trifocal::select_blocks", mutates_args=(), tags=ANY_STRIDES)
def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    geometry: list[int],
    num_keys: int,
    scale: float,
    cu_seqlens: Tensor | None,
    backend: str,
    ids: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The choice of blocks, [B, T, G, N]; see `trifocal.ops.select_blocks`."""
    documents = documents_of(cu_seqlens, ids, positions)
    if documents is None and cu_seqlens is not None:
        documents = Documents.from_checked(cu_seqlens, num_keys)
    if backend == "reference":
        return reference.select_blocks(q, k_cmp, lse, geometry_of(geometry), num_keys, scale, documents)
    from trifocal.ops.triton.scoring import select_blocks_forward

    with torch.cuda.device_of(q):
        return select_blocks_forward(q, k_cmp, lse.to(torch.float32), geometry_of(geometry), num_keys, scale, documents)


@select_blocks.register_fake
def _(q: Tensor, k_cmp: Tensor, lse: Tensor, geometry: list[int], *_: Any) -> Tensor:
    num_slots = Geometry(*geometry).num_selected_blocks
    return q.new_empty((q.shape[0], q.shape[1], k_cmp.shape[2], num_slots), dtype=torch.int32)


@torch.library.custom_op("trifocal::select_blocks_by_index", mutates_args=(), tags=ANY_STRIDES)
def select_blocks_by_index(
    q_idx: Tensor,
    k_idx: Tensor,
    geometry: list[int],
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
    backend: str,
) -> Tensor:
    """The choice of blocks, [B, T, G, N]; see `trifocal.ops.select_blocks_by_index`."""
    documents = documents_of(cu_seqlens, ids, positions)
    if backend == "reference":
        return reference.select_blocks_by_index(q_idx, k_idx, geometry_of(geometry), documents)
    from trifocal.ops.triton.index_scoring import select_blocks_by_index_forward

    with torch.cuda.device_of(q_idx):
        return select_blocks_by_index_forward(q_idx, k_idx, geometry_of(geometry), k_idx.shape[1], documents)


@select_blocks_by_index.register_fake
def _(q_idx: Tensor, k_idx: Tensor, geometry: list[int], *_: Any) -> Tensor:
    return q_idx.new_empty((*q_idx.shape[:3], Geometry(*geometry).num_selected_blocks), dtype=torch.int32)


@torch.library.custom_op("trifocal::teacher_masses", mutates_args=(), tags=ANY_STRIDES)
def teacher_masses(
    q: Tensor,
    k: Tensor,
    tokens: Tensor,
    starts: Tensor,
    geometry: list[int],
    num_blocks: int,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """Attention of sampled queries over the whole past by block, [B, M, G, J]; see `trifocal.ops.choice_loss`."""
    from trifocal.ops.triton.choice_loss import teacher_masses_forward

    documents = documents_of(cu_seqlens, ids, positions)
    with torch.cuda.device_of(q):
        return teacher_masses_forward(q, k, tokens, starts, geometry_of(geometry), num_blocks, documents)


@teacher_masses.register_fake
def _(q: Tensor, k: Tensor, tokens: Tensor, starts: Tensor, geometry: list[int], num_blocks: int, *_: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], k.shape[2], num_blocks), dtype=torch.float32)


@torch.library.custom_op("trifocal::index_scores", mutates_args=(), tags=ANY_STRIDES)
def index_scores(
    q_idx: Tensor,
    k_idx: Tensor,
    tokens: Tensor,
    starts: Tensor,
    geometry: list[int],
    num_blocks: int,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The largest index score of each block of sampled queries' pasts and its token, both [B, M, G, J]."""
    from trifocal.ops.triton.choice_loss import index_scores_forward

    documents = documents_of(cu_seqlens, ids, positions)
    with torch.cuda.device_of(q_idx):
        return index_scores_forward(q_idx, k_idx, tokens, geometry_of(geometry), num_blocks, documents)


@index_scores.register_fake
def _(
    q_idx: Tensor, k_idx: Tensor, tokens: Tensor, starts: Tensor, geometry: list[int], num_blocks: int, *_: Any
) -> tuple[Tensor, Tensor]:
    shape = (*q_idx.shape[:3], num_blocks)
    return q_idx.new_empty(shape, dtype=torch.float32), q_idx.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("trifocal::index_scores_backward", mutates_args=(), tags=ANY_STRIDES)
def index_scores_backward(
    d_scores: Tensor,
    places: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    tokens: Tensor,
    starts: Tensor,
    geometry: list[int],
) -> tuple[Tensor, Tensor]:
    """Gradients of the index queries and keys."""
    from trifocal.ops.triton.choice_loss import index_scores_backward as backward

    with torch.cuda.device_of(q_idx):
        return backward(d_scores, places, q_idx, k_idx, tokens, starts, geometry_of(geometry))


@index_scores_backward.register_fake
def _(d_scores: Tensor, places: Tensor, q_idx: Tensor, k_idx: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _contiguous(q_idx), _contiguous(k_idx)


def _save_index_scores(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_idx, k_idx, tokens, starts, ctx.geometry, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], q_idx, k_idx, tokens, starts)


def _index_scores_gradients(ctx: Any, d_scores: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *index_scores_backward(d_scores, *ctx.saved_tensors, ctx.geometry), *(None,) * 7


index_scores.register_autograd(_index_scores_gradients, setup_context=_save_index_scores)


@torch.library.custom_op("trifocal::compressed_attention", mutates_args=(), tags=ANY_STRIDES)
def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    geometry: list[int],
    num_keys: int,
    scale: float,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """o and lse over the compressed blocks."""
    from trifocal.ops.triton.interval.compressed import compressed_forward

    documents = documents_of(cu_seqlens, ids, positions)
    with torch.cuda.device_of(q):
        return compressed_forward(q, k_cmp, v_cmp, geometry_of(geometry), num_keys, scale, documents)


@compressed_attention.register_fake
def _(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_o(q, v_cmp), _empty_lse(q)


@torch.library.custom_op("trifocal::compressed_attention_backward", mutates_args=(), tags=ANY_STRIDES)
def compressed_attention_backward(
    d_o: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    o: Tensor,
    lse: Tensor,
    geometry: list[int],
    num_keys: int,
    scale: float,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k_cmp and v_cmp."""
    from trifocal.ops.triton.interval.compressed import compressed_backward

    documents = documents_of(cu_seqlens, ids, positions)
    with torch.cuda.device_of(q):
        return compressed_backward(
            d_o, q, k_cmp, v_cmp, o, lse, geometry_of(geometry), num_keys, scale, documents, d_lse=d_lse
        )


@compressed_attention_backward.register_fake
def _(
    d_o: Tensor, d_lse: Tensor | None, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _contiguous(q), _contiguous(k_cmp), _contiguous(v_cmp)


def _save_compressed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k_cmp, v_cmp, ctx.geometry, ctx.num_keys, ctx.scale, *documents = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k_cmp, v_cmp, *output, *documents)


def _compressed_gradients(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k_cmp, v_cmp, o, lse, *documents = ctx.saved_tensors
    d_o = torch.zeros_like(o) if d_o is None else d_o
    gradients = compressed_attention_backward(
        d_o, d_lse, q, k_cmp, v_cmp, o, lse, ctx.geometry, ctx.num_keys, ctx.scale, *documents
    )
    return (*gradients, *(None,) * 6)


compressed_attention.register_autograd(_compressed_gradients, setup_context=_save_compressed)


@torch.library.custom_op("trifocal::selected_attention", mutates_args=(), tags=ANY_STRIDES)
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected_blocks: Tensor,
    geometry: list[int],
    scale: float,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """o and lse over the tokens of the chosen blocks; lse is not differentiable."""
    from trifocal.ops.triton.selected.forward import selected_forward

    documents = documents_of(cu_seqlens, ids, positions)
    with torch.cuda.device_of(q):
        return selected_forward(q, k, v, selected_blocks, geometry_of(geometry), scale, documents)


@selected_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_o(q, v), _empty_lse(q)


@torch.library.custom_op("trifocal::selected_attention_backward", mutates_args=(), tags=ANY_STRIDES)
def selected_attention_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    selected_blocks: Tensor,
    geometry: list[int],
    scale: float,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    from trifocal.ops.triton.selected.backward import selected_backward

    documents = documents_of(cu_seqlens, ids, positions)
    with torch.cuda.device_of(q):
        return selected_backward(d_o, q, k, v, o, lse, selected_blocks, geometry_of(geometry), scale, documents)


@selected_attention_backward.register_fake
def _(d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _contiguous(q), _contiguous(k), _contiguous(v)


def _save_selected(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, selected_blocks, ctx.geometry, ctx.scale, *documents = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, selected_blocks, *documents)


def _selected_gradients(ctx: Any, d_o: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, selected_blocks, *documents = ctx.saved_tensors
    gradients = selected_attention_backward(d_o, q, k, v, o, lse, selected_blocks, ctx.geometry, ctx.scale, *documents)
    return (*gradients, *(None,) * 6)


selected_attention.register_autograd(_selected_gradients, setup_context=_save_selected)


@torch.library.custom_op("trifocal::window_attention", mutates_args=(), tags=ANY_STRIDES)
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: int,
    scale: float,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """o and lse over the window; lse is not differentiable."""
    from trifocal.ops.triton.interval.window import window_forward

    with torch.cuda.device_of(q):
        return window_forward(q, k, v, window_size, scale, documents_of(cu_seqlens, ids, positions))


@window_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_o(q, v), _empty_lse(q)


@torch.library.custom_op("trifocal::window_attention_backward", mutates_args=(), tags=ANY_STRIDES)
def window_attention_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    window_size: int,
    scale: float,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    from trifocal.ops.triton.interval.window import window_backward

    with torch.cuda.device_of(q):
        return window_backward(d_o, q, k, v, o, lse, window_size, scale, documents_of(cu_seqlens, ids, positions))


@window_attention_backward.register_fake
def _(d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _contiguous(q), _contiguous(k), _contiguous(v)


def _save_window(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.window_size, ctx.scale, *documents = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *documents)


def _window_gradients(ctx: Any, d_o: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, *documents = ctx.saved_tensors
    gradients = window_attention_backward(d_o, q, k, v, o, lse, ctx.window_size, ctx.scale, *documents)
    return (*gradients, *(None,) * 5)


window_attention.register_autograd(_window_gradients, setup_context=_save_window)
