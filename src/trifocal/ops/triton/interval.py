"""FlashAttention in which every query sees one interval of keys: the compressed and the window branch.

Query `t` sees keys `begin(t) <= key < end(t)`, and both ends never decrease along the sequence: a sliding window, the
compressed blocks in a query's past, and either of them inside a packed document. Two consequences carry the kernels:
what a tile of rows sees is one range of keys, from its first row's begin to its last row's end; and the tiles in
the middle of the range are seen by every row, so only those at its ends pay for a mask.

Three kernels, as in FlashAttention-2 (arXiv:2307.08691), rows as in `common`:

| kernel | a program holds | it loops over | from memory, per program |
|---|---|---|---|
| forward | a tile of queries, running maximum, sum, o | key tiles | q once, k and v of the range, o and lse out |
| d_q | a tile of queries and d_o, d_q | key tiles | q and d_o once, k and v of the range, d_q out |
| d_k, d_v | a tile of keys and values, d_k, d_v | row tiles of the whole group | k, v once, q and d_o of the rows |

No atomics: every sum has one order, so two runs give equal bits. The compressed branch has few key tiles, and they are
seen by very different numbers of queries: the rows of each are split into `parts` programs, whose sums a small kernel
adds in order.

Masked keys and values are loaded as zeros: what lies in memory that no query sees never reaches a product.
Backward takes the gradient of the mixed output and the branch's gate instead of their product `gate * d_o`, which
would be one more tensor a branch.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.triton.common import (
    Tile,
    choose_tile,
    load_tile,
    multiprocessors,
    split_width,
    store_tile,
    strides,
    unit_stride,
)

# The running maximum starts at a finite low, so that no guard against inf - inf is needed.
LOWEST = tl.constexpr(-1.0e30)
LN_2 = tl.constexpr(math.log(2.0))
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _visible_keys(
    query,
    query_shift,
    window_size,
    ids,
    positions,
    first_blocks,
    COMPRESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The keys that queries see, begin and end."""
    token = query + query_shift
    if COMPRESSED:
        if PACKED:
            begin = tl.load(first_blocks + tl.load(ids + token))
            position = tl.load(positions + token)
        else:
            begin = token * 0
            position = token
        end = begin + tl.maximum(position + 1 - BLOCK + STRIDE, 0) // STRIDE
    else:
        begin = tl.maximum(token + 1 - window_size, 0)
        if PACKED:
            begin = tl.maximum(begin, token - tl.load(positions + token))
        end = token + 1
    return begin, end


@triton.jit
def _seeing_queries(
    key,
    num_queries,
    query_shift,
    window_size,
    query_begin,
    query_end,
    COMPRESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The queries that see keys, begin and end: the inverse of `_visible_keys`."""
    if COMPRESSED:
        if PACKED:
            begin = tl.load(query_begin + key) - query_shift
            end = tl.load(query_end + key) - query_shift
        else:
            begin = key * STRIDE + (BLOCK - 1) - query_shift
            end = key * 0 + num_queries
    else:
        begin = key - query_shift
        end = begin + window_size
        if PACKED:
            end = tl.minimum(end, tl.load(query_end + key) - query_shift)
    begin = tl.minimum(tl.maximum(begin, 0), num_queries)
    return begin, tl.maximum(tl.minimum(end, num_queries), begin)


@triton.jit
def _full_tiles(begin, end, full_begin, full_end, SIZE: tl.constexpr):
    """Cut a range into tiles: how many, and which of them, first to last, lie wholly in the full range."""
    tiles = tl.cdiv(end - begin, SIZE)
    first = tl.minimum(tl.cdiv(tl.maximum(full_begin - begin, 0), SIZE), tiles)
    last = tl.maximum(tl.minimum(tl.maximum(full_end - begin, 0) // SIZE, tiles), first)
    return tiles, first, last


@triton.jit
def _rows(row, num_queries, q_time_stride, q_head_stride, first_query, REP: tl.constexpr):
    """Query, head and offset from the first query of rows; rows behind the last query stand in for it."""
    query = row // REP
    head = row - query * REP
    query = tl.minimum(query, num_queries - 1)
    return query, head, (query - first_query) * q_time_stride + head * q_head_stride


@triton.jit
def _attend(
    o_1,
    o_2,
    running_max,
    running_sum,
    q_1,
    q_2,
    k,
    v,
    k_stride,
    v_stride,
    key_origin,
    key_limit,
    row_begin,
    row_end,
    count,
    split,
    jump,
    score_scale,
    D: tl.constexpr,
    D_1: tl.constexpr,
    D_2: tl.constexpr,
    V: tl.constexpr,
    V_1: tl.constexpr,
    V_2: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take `count` key tiles into the running softmax; tiles from number `split` on lie `jump` tiles further."""
    in_tile = tl.arange(0, KEYS)
    for number in tl.range(0, count):
        first_key = key_origin + (number + tl.where(number >= split, jump, 0)) * KEYS
        key = first_key + in_tile
        keep = key < key_limit
        k_base = k + first_key.to(tl.int64) * k_stride
        v_base = v + first_key.to(tl.int64) * v_stride
        k_1 = load_tile(k_base, in_tile * k_stride, keep, 0, D_1, D, MASKED)
        scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
        if D_2 > 0:
            k_2 = load_tile(k_base, in_tile * k_stride, keep, D_1, D_2, D, MASKED)
            scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
        if MASKED:
            visible = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) * score_scale)
        p = tl.exp2(scores * score_scale - new_max[:, None])
        decay = tl.exp2(running_max - new_max)
        running_max = new_max
        running_sum = running_sum * decay + tl.sum(p, 1)
        v_1 = load_tile(v_base, in_tile * v_stride, keep, 0, V_1, V, MASKED)
        p = p.to(v_1.dtype)
        o_1 = tl.dot(p, v_1, o_1 * decay[:, None], input_precision="ieee")
        if V_2 > 0:
            v_2 = load_tile(v_base, in_tile * v_stride, keep, V_1, V_2, V, MASKED)
            o_2 = tl.dot(p, v_2, o_2 * decay[:, None], input_precision="ieee")
    return o_1, o_2, running_max, running_sum


@triton.jit(do_not_specialize=["num_queries", "query_shift", "window_size"])
def interval_forward_kernel(
    q,
    k,
    v,
    o,
    lse,
    ids,
    positions,
    first_blocks,
    q_batch_stride,
    q_time_stride,
    q_head_stride,
    k_batch_stride,
    k_time_stride,
    k_head_stride,
    v_batch_stride,
    v_time_stride,
    v_head_stride,
    num_queries,
    query_shift,
    window_size,
    score_scale,
    GROUPS: tl.constexpr,
    REP: tl.constexpr,
    D: tl.constexpr,
    D_1: tl.constexpr,
    D_2: tl.constexpr,
    V: tl.constexpr,
    V_1: tl.constexpr,
    V_2: tl.constexpr,
    COMPRESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """o and lse of one tile of rows. Tiles with the longest past start first, so that none is left over at the end."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch = (tl.program_id(1) // GROUPS).to(tl.int64)
    group = tl.program_id(1) % GROUPS
    first_query = first_row // REP
    last_query = tl.minimum((first_row + ROWS - 1) // REP, num_queries - 1)
    row = first_row + tl.arange(0, ROWS)
    query, head, q_offsets = _rows(row, num_queries, q_time_stride, q_head_stride, first_query, REP)
    row_begin, row_end = _visible_keys(
        query, query_shift, window_size, ids, positions, first_blocks, COMPRESSED, BLOCK, STRIDE, PACKED
    )
    begin, full_end = _visible_keys(
        first_query, query_shift, window_size, ids, positions, first_blocks, COMPRESSED, BLOCK, STRIDE, PACKED
    )
    full_begin, end = _visible_keys(
        last_query, query_shift, window_size, ids, positions, first_blocks, COMPRESSED, BLOCK, STRIDE, PACKED
    )
    tiles, first_full, last_full = _full_tiles(begin, end, full_begin, full_end, KEYS)

    q += batch * q_batch_stride + first_query.to(tl.int64) * q_time_stride + group * REP * q_head_stride
    k += batch * k_batch_stride + group * k_head_stride
    v += batch * v_batch_stride + group * v_head_stride
    q_1 = load_tile(q, q_offsets, row >= 0, 0, D_1, D, False)
    q_2 = q_1
    if D_2 > 0:
        q_2 = load_tile(q, q_offsets, row >= 0, D_1, D_2, D, False)
    running_max = tl.full([ROWS], LOWEST, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    o_1 = tl.zeros([ROWS, V_1], tl.float32)
    o_2 = running_sum
    if V_2 > 0:
        o_2 = tl.zeros([ROWS, V_2], tl.float32)
    o_1, o_2, running_max, running_sum = _attend(
        o_1, o_2, running_max, running_sum, q_1, q_2, k, v, k_time_stride, v_time_stride, begin, end,
        row_begin, row_end, last_full - first_full, 0, first_full, score_scale,
        D, D_1, D_2, V, V_1, V_2, KEYS, False,
    )  # fmt: skip
    o_1, o_2, running_max, running_sum = _attend(
        o_1, o_2, running_max, running_sum, q_1, q_2, k, v, k_time_stride, v_time_stride, begin, end,
        row_begin, row_end, tiles - (last_full - first_full), first_full, last_full - first_full, score_scale,
        D, D_1, D_2, V, V_1, V_2, KEYS, True,
    )  # fmt: skip

    sees = running_sum > 0
    inverse = tl.where(sees, 1.0 / tl.where(sees, running_sum, 1.0), 0.0)
    keep = row < num_queries * REP
    # o and lse are contiguous, so one number places a row: ((batch * T + query) * G + group) * R + head.
    first_place = ((batch * num_queries + first_query) * GROUPS + group) * REP
    place = (query - first_query) * (GROUPS * REP) + head
    o += first_place * V
    store_tile(o, place * V, keep, o_1 * inverse[:, None], 0, V_1, V)
    if V_2 > 0:
        store_tile(o, place * V, keep, o_2 * inverse[:, None], V_1, V_2, V)
    natural = tl.where(sees, (running_max + tl.log2(tl.where(sees, running_sum, 1.0))) * LN_2, float("-inf"))
    tl.store(lse + first_place + place, natural, mask=keep)


@triton.jit
def _gather_d_q(
    d_q_1,
    d_q_2,
    q_1,
    q_2,
    d_o_1,
    d_o_2,
    lse,
    delta,
    gate,
    k,
    v,
    k_stride,
    v_stride,
    key_origin,
    key_limit,
    row_begin,
    row_end,
    count,
    split,
    jump,
    score_scale,
    D: tl.constexpr,
    D_1: tl.constexpr,
    D_2: tl.constexpr,
    V: tl.constexpr,
    V_1: tl.constexpr,
    V_2: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Add what `count` key tiles give to d_q; tiles as in `_attend`."""
    in_tile = tl.arange(0, KEYS)
    for number in tl.range(0, count):
        first_key = key_origin + (number + tl.where(number >= split, jump, 0)) * KEYS
        key = first_key + in_tile
        keep = key < key_limit
        k_base = k + first_key.to(tl.int64) * k_stride
        v_base = v + first_key.to(tl.int64) * v_stride
        k_1 = load_tile(k_base, in_tile * k_stride, keep, 0, D_1, D, MASKED)
        scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
        if D_2 > 0:
            k_2 = load_tile(k_base, in_tile * k_stride, keep, D_1, D_2, D, MASKED)
            scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
        v_1 = load_tile(v_base, in_tile * v_stride, keep, 0, V_1, V, MASKED)
        d_p = tl.dot(d_o_1, tl.trans(v_1), input_precision="ieee")
        if V_2 > 0:
            v_2 = load_tile(v_base, in_tile * v_stride, keep, V_1, V_2, V, MASKED)
            d_p = tl.dot(d_o_2, tl.trans(v_2), d_p, input_precision="ieee")
        p = tl.exp2(scores * score_scale - lse[:, None])
        if GATED:
            p = p * gate[:, None]
        d_scores = p * (d_p - delta[:, None])
        if MASKED:
            visible = (key[None, :] >= row_begin[:, None]) & (key[None, :] < row_end[:, None])
            d_scores = tl.where(visible, d_scores, 0.0)
        d_scores = d_scores.to(k_1.dtype)
        d_q_1 = tl.dot(d_scores, k_1, d_q_1, input_precision="ieee")
        if D_2 > 0:
            d_q_2 = tl.dot(d_scores, k_2, d_q_2, input_precision="ieee")
    return d_q_1, d_q_2


@triton.jit(
    do_not_specialize=[
        "num_queries", "query_shift", "window_size", "gate_batch_stride", "gate_time_stride", "gate_head_stride",
    ]
)  # fmt: skip
def interval_d_q_kernel(
    q,
    k,
    v,
    d_o,
    lse,
    delta,
    gate,
    d_q,
    ids,
    positions,
    first_blocks,
    q_batch_stride,
    q_time_stride,
    q_head_stride,
    k_batch_stride,
    k_time_stride,
    k_head_stride,
    v_batch_stride,
    v_time_stride,
    v_head_stride,
    d_o_batch_stride,
    d_o_time_stride,
    d_o_head_stride,
    gate_batch_stride,
    gate_time_stride,
    gate_head_stride,
    num_queries,
    query_shift,
    window_size,
    scale,
    score_scale,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    REP: tl.constexpr,
    D: tl.constexpr,
    D_1: tl.constexpr,
    D_2: tl.constexpr,
    V: tl.constexpr,
    V_1: tl.constexpr,
    V_2: tl.constexpr,
    COMPRESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """d_q of one tile of rows, in the order of the forward kernel."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch = (tl.program_id(1) // GROUPS).to(tl.int64)
    group = tl.program_id(1) % GROUPS
    first_query = first_row // REP
    last_query = tl.minimum((first_row + ROWS - 1) // REP, num_queries - 1)
    row = first_row + tl.arange(0, ROWS)
    query, head, q_offsets = _rows(row, num_queries, q_time_stride, q_head_stride, first_query, REP)
    d_o_offsets = (query - first_query) * d_o_time_stride + head * d_o_head_stride
    row_begin, row_end = _visible_keys(
        query, query_shift, window_size, ids, positions, first_blocks, COMPRESSED, BLOCK, STRIDE, PACKED
    )
    begin, full_end = _visible_keys(
        first_query, query_shift, window_size, ids, positions, first_blocks, COMPRESSED, BLOCK, STRIDE, PACKED
    )
    full_begin, end = _visible_keys(
        last_query, query_shift, window_size, ids, positions, first_blocks, COMPRESSED, BLOCK, STRIDE, PACKED
    )
    tiles, first_full, last_full = _full_tiles(begin, end, full_begin, full_end, KEYS)

    q += batch * q_batch_stride + first_query.to(tl.int64) * q_time_stride + group * REP * q_head_stride
    d_o += batch * d_o_batch_stride + first_query.to(tl.int64) * d_o_time_stride + group * REP * d_o_head_stride
    k += batch * k_batch_stride + group * k_head_stride
    v += batch * v_batch_stride + group * v_head_stride
    q_1 = load_tile(q, q_offsets, row >= 0, 0, D_1, D, False)
    q_2 = q_1
    if D_2 > 0:
        q_2 = load_tile(q, q_offsets, row >= 0, D_1, D_2, D, False)
    d_o_1 = load_tile(d_o, d_o_offsets, row >= 0, 0, V_1, V, False)
    d_o_2 = d_o_1
    if V_2 > 0:
        d_o_2 = load_tile(d_o, d_o_offsets, row >= 0, V_1, V_2, V, False)
    first_place = ((batch * num_queries + first_query) * GROUPS + group) * REP
    place = (query - first_query) * (GROUPS * REP) + head
    row_lse = tl.load(lse + first_place + place) * LOG2_E
    row_delta = tl.load(delta + first_place + place)
    row_gate = row_delta
    if GATED:
        gate += batch * gate_batch_stride + first_query.to(tl.int64) * gate_time_stride
        row_gate = tl.load(
            gate + (query - first_query) * gate_time_stride + (group * REP + head) * gate_head_stride
        ).to(tl.float32)

    d_q_1 = tl.zeros([ROWS, D_1], tl.float32)
    d_q_2 = row_delta
    if D_2 > 0:
        d_q_2 = tl.zeros([ROWS, D_2], tl.float32)
    d_q_1, d_q_2 = _gather_d_q(
        d_q_1, d_q_2, q_1, q_2, d_o_1, d_o_2, row_lse, row_delta, row_gate, k, v, k_time_stride, v_time_stride,
        begin, end, row_begin, row_end, last_full - first_full, 0, first_full, score_scale,
        D, D_1, D_2, V, V_1, V_2, KEYS, False, GATED,
    )  # fmt: skip
    d_q_1, d_q_2 = _gather_d_q(
        d_q_1, d_q_2, q_1, q_2, d_o_1, d_o_2, row_lse, row_delta, row_gate, k, v, k_time_stride, v_time_stride,
        begin, end, row_begin, row_end, tiles - (last_full - first_full), first_full, last_full - first_full,
        score_scale, D, D_1, D_2, V, V_1, V_2, KEYS, True, GATED,
    )  # fmt: skip
    keep = row < num_queries * REP
    d_q += first_place * D
    store_tile(d_q, place * D, keep, d_q_1 * scale, 0, D_1, D)
    if D_2 > 0:
        store_tile(d_q, place * D, keep, d_q_2 * scale, D_1, D_2, D)


@triton.jit
def _gather_d_k_d_v(
    d_k_1,
    d_k_2,
    d_v_1,
    d_v_2,
    k_1,
    k_2,
    v_1,
    v_2,
    q,
    d_o,
    lse,
    delta,
    gate,
    q_time_stride,
    q_head_stride,
    d_o_time_stride,
    d_o_head_stride,
    gate_time_stride,
    gate_head_stride,
    num_queries,
    row_origin,
    key_begin,
    key_end,
    count,
    split,
    jump,
    score_scale,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    REP: tl.constexpr,
    D: tl.constexpr,
    D_1: tl.constexpr,
    D_2: tl.constexpr,
    V: tl.constexpr,
    V_1: tl.constexpr,
    V_2: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add what `count` tiles of rows give to d_k and d_v; tiles from number `split` on lie `jump` further."""
    in_tile = tl.arange(0, ROWS)
    for number in tl.range(0, count):
        first_row = row_origin + (number + tl.where(number >= split, jump, 0)) * ROWS
        first_query = first_row // REP
        row = first_row + in_tile
        query, head, q_offsets = _rows(row, num_queries, q_time_stride, q_head_stride, first_query, REP)
        d_o_offsets = (query - first_query) * d_o_time_stride + head * d_o_head_stride
        q_base = q + first_query.to(tl.int64) * q_time_stride
        d_o_base = d_o + first_query.to(tl.int64) * d_o_time_stride
        place = first_query.to(tl.int64) * (GROUPS * REP) + ((query - first_query) * (GROUPS * REP) + head)

        q_1 = load_tile(q_base, q_offsets, row >= 0, 0, D_1, D, False)
        scores = tl.dot(k_1, tl.trans(q_1), input_precision="ieee")
        if D_2 > 0:
            q_2 = load_tile(q_base, q_offsets, row >= 0, D_1, D_2, D, False)
            scores = tl.dot(k_2, tl.trans(q_2), scores, input_precision="ieee")
        row_lse = tl.load(lse + place) * LOG2_E
        p = tl.exp2(scores * score_scale - row_lse[None, :])
        if GATED:
            row_gate = tl.load(
                gate
                + first_query.to(tl.int64) * gate_time_stride
                + (query - first_query) * gate_time_stride
                + head * gate_head_stride
            ).to(tl.float32)
            p = p * row_gate[None, :]
        if MASKED:
            # By the row's own number: rows behind the last query must not count as that query.
            visible = (row[None, :] >= (key_begin * REP)[:, None]) & (row[None, :] < (key_end * REP)[:, None])
            p = tl.where(visible, p, 0.0)
        d_o_1 = load_tile(d_o_base, d_o_offsets, row >= 0, 0, V_1, V, False)
        d_v_1 = tl.dot(p.to(d_o_1.dtype), d_o_1, d_v_1, input_precision="ieee")
        d_p = tl.dot(v_1, tl.trans(d_o_1), input_precision="ieee")
        if V_2 > 0:
            d_o_2 = load_tile(d_o_base, d_o_offsets, row >= 0, V_1, V_2, V, False)
            d_v_2 = tl.dot(p.to(d_o_2.dtype), d_o_2, d_v_2, input_precision="ieee")
            d_p = tl.dot(v_2, tl.trans(d_o_2), d_p, input_precision="ieee")
        row_delta = tl.load(delta + place)
        d_scores = p * (d_p - row_delta[None, :])
        if MASKED:
            d_scores = tl.where(visible, d_scores, 0.0)
        d_scores = d_scores.to(q_1.dtype)
        d_k_1 = tl.dot(d_scores, q_1, d_k_1, input_precision="ieee")
        if D_2 > 0:
            d_k_2 = tl.dot(d_scores, q_2, d_k_2, input_precision="ieee")
    return d_k_1, d_k_2, d_v_1, d_v_2


@triton.jit(
    do_not_specialize=[
        "num_queries", "num_keys", "query_shift", "window_size",
        "gate_batch_stride", "gate_time_stride", "gate_head_stride", "batches", "parts",
    ]
)  # fmt: skip
def interval_d_k_d_v_kernel(
    q,
    k,
    v,
    d_o,
    lse,
    delta,
    gate,
    d_k,
    d_v,
    query_begin,
    query_end,
    q_batch_stride,
    q_time_stride,
    q_head_stride,
    k_batch_stride,
    k_time_stride,
    k_head_stride,
    v_batch_stride,
    v_time_stride,
    v_head_stride,
    d_o_batch_stride,
    d_o_time_stride,
    d_o_head_stride,
    gate_batch_stride,
    gate_time_stride,
    gate_head_stride,
    batches,
    parts,
    num_queries,
    num_keys,
    query_shift,
    window_size,
    scale,
    score_scale,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    REP: tl.constexpr,
    D: tl.constexpr,
    D_1: tl.constexpr,
    D_2: tl.constexpr,
    V: tl.constexpr,
    V_1: tl.constexpr,
    V_2: tl.constexpr,
    COMPRESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """d_k and d_v of one tile of keys, or one part of its rows: into [parts, B, keys, G, D] and [.., V]."""
    first_key = (tl.program_id(0) // parts) * KEYS
    part = tl.program_id(0) % parts
    batch = (tl.program_id(1) // GROUPS).to(tl.int64)
    group = tl.program_id(1) % GROUPS
    in_tile = tl.arange(0, KEYS)
    last_key = tl.minimum(first_key + KEYS, num_keys) - 1
    key = tl.minimum(first_key + in_tile, last_key)
    key_begin, key_end = _seeing_queries(
        key, num_queries, query_shift, window_size, query_begin, query_end, COMPRESSED, BLOCK, STRIDE, PACKED
    )
    begin, full_end = _seeing_queries(
        first_key, num_queries, query_shift, window_size, query_begin, query_end, COMPRESSED, BLOCK, STRIDE, PACKED
    )
    full_begin, end = _seeing_queries(
        last_key, num_queries, query_shift, window_size, query_begin, query_end, COMPRESSED, BLOCK, STRIDE, PACKED
    )
    part_rows = tl.cdiv(tl.cdiv((end - begin) * REP, parts), ROWS) * ROWS
    row_origin = begin * REP + part * part_rows
    row_limit = tl.minimum(row_origin + part_rows, end * REP)
    tiles, first_full, last_full = _full_tiles(
        row_origin, tl.maximum(row_limit, row_origin), full_begin * REP, full_end * REP, ROWS
    )

    keep = first_key + in_tile < num_keys
    k += batch * k_batch_stride + group * k_head_stride + first_key.to(tl.int64) * k_time_stride
    v += batch * v_batch_stride + group * v_head_stride + first_key.to(tl.int64) * v_time_stride
    k_1 = load_tile(k, in_tile * k_time_stride, keep, 0, D_1, D, True)
    k_2 = k_1
    if D_2 > 0:
        k_2 = load_tile(k, in_tile * k_time_stride, keep, D_1, D_2, D, True)
    v_1 = load_tile(v, in_tile * v_time_stride, keep, 0, V_1, V, True)
    v_2 = v_1
    if V_2 > 0:
        v_2 = load_tile(v, in_tile * v_time_stride, keep, V_1, V_2, V, True)
    q += batch * q_batch_stride + group * REP * q_head_stride
    d_o += batch * d_o_batch_stride + group * REP * d_o_head_stride
    lse += (batch * num_queries * GROUPS + group) * REP
    delta += (batch * num_queries * GROUPS + group) * REP
    if GATED:
        gate += batch * gate_batch_stride + group * REP * gate_head_stride

    d_k_1 = tl.zeros([KEYS, D_1], tl.float32)
    d_k_2 = d_k_1
    if D_2 > 0:
        d_k_2 = tl.zeros([KEYS, D_2], tl.float32)
    d_v_1 = tl.zeros([KEYS, V_1], tl.float32)
    d_v_2 = d_v_1
    if V_2 > 0:
        d_v_2 = tl.zeros([KEYS, V_2], tl.float32)
    d_k_1, d_k_2, d_v_1, d_v_2 = _gather_d_k_d_v(
        d_k_1, d_k_2, d_v_1, d_v_2, k_1, k_2, v_1, v_2, q, d_o, lse, delta, gate,
        q_time_stride, q_head_stride, d_o_time_stride, d_o_head_stride, gate_time_stride, gate_head_stride,
        num_queries, row_origin, key_begin, key_end, last_full - first_full, 0, first_full, score_scale,
        GATED, GROUPS, REP, D, D_1, D_2, V, V_1, V_2, ROWS, False,
    )  # fmt: skip
    d_k_1, d_k_2, d_v_1, d_v_2 = _gather_d_k_d_v(
        d_k_1, d_k_2, d_v_1, d_v_2, k_1, k_2, v_1, v_2, q, d_o, lse, delta, gate,
        q_time_stride, q_head_stride, d_o_time_stride, d_o_head_stride, gate_time_stride, gate_head_stride,
        num_queries, row_origin, key_begin, key_end,
        tiles - (last_full - first_full), first_full, last_full - first_full, score_scale,
        GATED, GROUPS, REP, D, D_1, D_2, V, V_1, V_2, ROWS, True,
    )  # fmt: skip
    first_place = ((part * batches + batch) * num_keys + first_key) * GROUPS + group
    d_k += first_place * D
    d_v += first_place * V
    store_tile(d_k, in_tile * (GROUPS * D), keep, d_k_1 * scale, 0, D_1, D)
    if D_2 > 0:
        store_tile(d_k, in_tile * (GROUPS * D), keep, d_k_2 * scale, D_1, D_2, D)
    store_tile(d_v, in_tile * (GROUPS * V), keep, d_v_1, 0, V_1, V)
    if V_2 > 0:
        store_tile(d_v, in_tile * (GROUPS * V), keep, d_v_2, V_1, V_2, V)


@triton.jit(do_not_specialize=["parts", "count"])
def sum_parts_kernel(summands, total, parts, count, SIZE: tl.constexpr):
    """Add summands [parts, count] in order. Bytes: the summands in, the total out, once."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    keep = place < count
    value = tl.zeros([SIZE], tl.float32)
    for _ in tl.range(0, parts):
        value += tl.load(summands + place, mask=keep, other=0.0)
        summands += count
    tl.store(total + place, value.to(total.dtype.element_ty), mask=keep)


class Branch(NamedTuple):
    """Which interval of keys a query sees.

    Attributes:
        window_size: Keys in the window; 0 for the compressed branch.
        block, stride: Geometry of the compressed branch; 0 for the window.
        query_shift: Token of query 0; for the window, its place among the keys given.
        ids, positions: Documents, as in `trifocal.ops.layout.Documents`; None for one document.
        first_blocks: First compressed block of each document, [documents].
        query_begin, query_end: Tokens whose queries see a key, [keys]; the window needs only the end.
    """

    window_size: int = 0
    block: int = 0
    stride: int = 0
    query_shift: int = 0
    ids: Tensor | None = None
    positions: Tensor | None = None
    first_blocks: Tensor | None = None
    query_begin: Tensor | None = None
    query_end: Tensor | None = None


def _constants(q: Tensor, k: Tensor, v: Tensor, branch: Branch, tile: Tile) -> dict[str, Any]:
    """What all three kernels are compiled for, and how they are launched."""
    d, v_width = split_width(q.shape[3]), split_width(v.shape[3])
    return {
        "GROUPS": k.shape[2],
        "REP": q.shape[2] // k.shape[2],
        "D": d.size,
        "D_1": d.part_1,
        "D_2": d.part_2,
        "V": v_width.size,
        "V_1": v_width.part_1,
        "V_2": v_width.part_2,
        "COMPRESSED": branch.window_size == 0,
        "BLOCK": branch.block,
        "STRIDE": branch.stride,
        "PACKED": branch.ids is not None,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, branch: Branch, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Attend: o [B, T, H, V] in q's type, and lse [B, T, H] in fp32, natural log, -inf where nothing is seen."""
    batch, num_queries, num_heads, _ = q.shape
    tile = tile or choose_tile("forward", q, v)
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    o = q.new_empty(batch, num_queries, num_heads, v.shape[3])
    lse = q.new_empty(batch, num_queries, num_heads, dtype=torch.float32)
    constants = _constants(q, k, v, branch, tile)
    grid = (triton.cdiv(num_queries * constants["REP"], tile.rows), batch * k.shape[2])
    interval_forward_kernel[grid](
        q, k, v, o, lse, branch.ids, branch.positions, branch.first_blocks,
        *strides(q), *strides(k), *strides(v),
        num_queries, branch.query_shift, branch.window_size, scale * LOG2_E.value, **constants,
    )  # fmt: skip
    return o, lse


def launch_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    gate: Tensor | None,
    scale: float,
    branch: Branch,
    d_q_tile: Tile | None = None,
    d_k_d_v_tile: Tile | None = None,
    parts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention.

    Args:
        d_o: Gradient of the branch's output or, with a gate, of the mixed output, [B, T, H, V].
        q, k, v: As in forward.
        lse: From forward, [B, T, H], contiguous.
        delta: Row sums of `d_o * o`, less the gradient of lse if there is one, [B, T, H], fp32, contiguous.
        gate: Weight of this branch in the mixed output, [B, T, H], any strides.
        scale: Factor on the scores.
        branch: What a query sees.
        d_q_tile, d_k_d_v_tile, parts: Configuration instead of the table's, for measurements.

    Returns:
        d_q, d_k, d_v, contiguous, in the types of q, k, v.
    """
    batch, num_queries, _, dim = q.shape
    num_keys, num_groups, value_dim = v.shape[1:]
    q, k, v, d_o = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(d_o)
    gate_strides = (0, 0, 0) if gate is None else gate.stride()
    all_strides = (*strides(q), *strides(k), *strides(v), *strides(d_o), *gate_strides)
    d_q = q.new_empty(q.shape)
    tile = d_q_tile or choose_tile("d_q", q, v)
    constants = _constants(q, k, v, branch, tile)
    grid = (triton.cdiv(num_queries * constants["REP"], tile.rows), batch * num_groups)
    interval_d_q_kernel[grid](
        q, k, v, d_o, lse, delta, gate, d_q, branch.ids, branch.positions, branch.first_blocks, *all_strides,
        num_queries, branch.query_shift, branch.window_size, scale, scale * LOG2_E.value,
        GATED=gate is not None, **constants,
    )  # fmt: skip

    tile = d_k_d_v_tile or choose_tile("d_k_d_v", q, v)
    tiles = triton.cdiv(num_keys, tile.keys)
    split = branch.window_size == 0
    if parts is None:
        parts = choose_parts(q, tiles * batch * num_groups, constants["REP"], tile) if split else 1
    shape = (parts, batch, num_keys, num_groups)
    d_k = k.new_empty(*shape, dim, dtype=torch.float32 if split else k.dtype)
    d_v = v.new_empty(*shape, value_dim, dtype=d_k.dtype)
    if num_keys:
        interval_d_k_d_v_kernel[(tiles * parts, batch * num_groups)](
            q, k, v, d_o, lse, delta, gate, d_k, d_v, branch.query_begin, branch.query_end, *all_strides,
            batch, parts, num_queries, num_keys, branch.query_shift, branch.window_size, scale, scale * LOG2_E.value,
            GATED=gate is not None, **_constants(q, k, v, branch, tile),
        )  # fmt: skip
    if not split:
        return d_q, d_k[0], d_v[0]
    return d_q, _sum_parts(d_k, k.dtype), _sum_parts(d_v, v.dtype)


def _sum_parts(summands: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.empty_like(summands[0], dtype=dtype)
    count = total.numel()
    if count:
        sum_parts_kernel[(triton.cdiv(count, 1024),)](summands, total, summands.shape[0], count, SIZE=1024)
    return total


def choose_parts(q: Tensor, programs: int, heads_per_group: int, tile: Tile) -> int:
    """Into how many programs the rows of a key tile are split, so that no multiprocessor waits long for another.

    Sixteen programs a multiprocessor, half of them long; but each with at least four tiles of rows, and no more
    than 32, since each writes sums of its own.
    """
    wanted = triton.cdiv(16 * multiprocessors(q.device), max(1, programs))
    return max(1, min(32, wanted, q.shape[1] * heads_per_group // (4 * tile.rows)))
