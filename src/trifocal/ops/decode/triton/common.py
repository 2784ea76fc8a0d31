"""Shared by the decoding kernels: rows, pages, and a softmax over keys whose bits do not depend on who adds it up.

Keys are taken in tiles, tiles in units of 256 keys, units in groups of four (`tiles`); a group adds its units and a row
its groups one after the other. A program takes one unit or, with many sequences, a whole group: the same bits in both,
and in any batch. For that the running maximum is rounded up to a whole number: weights between partial results are
powers of two, and nothing but the additions rounds. The probability of a score `s` is `2**(s - floor(s))` times
`2**(floor(s) - maximum)`: equal scores of different tiles stay equal in every bit. Exponents are to base 2.
"""

import triton
import triton.language as tl

from trifocal.ops.tiles import DECODE_GROUP, DECODE_UNIT
from trifocal.ops.triton.common import LOWEST, store_tile

UNIT_KEYS = tl.constexpr(DECODE_UNIT)
GROUP_UNITS = tl.constexpr(DECODE_GROUP)


@triton.jit
def power_of_2(exponent):
    """2**exponent for whole numbers up to 0; 0 below -126."""
    return ((tl.maximum(exponent, -127.0) + 127.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def place_rows(first_row, length, num_new, Q_PER_KV: tl.constexpr, ROWS: tl.constexpr):
    """Token, head of the group and position of rows `token * Q_PER_KV + head`, and whether the sequence has them."""
    row = first_row + tl.arange(0, ROWS)
    token = row // Q_PER_KV
    return token, row % Q_PER_KV, length + token, token < num_new


@triton.jit
def load_rotated(q, offsets, position, keep, cos, sin, FIRST: tl.constexpr, PART: tl.constexpr, D: tl.constexpr):
    """Columns FIRST to FIRST + PART of rows of q, rotated by their positions, in the type of q; zero past D."""
    HALF: tl.constexpr = D // 2
    column = FIRST + tl.arange(0, PART)
    is_first = (column < HALF)[None, :]
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    angle = tl.where(column < HALF, column, column - HALF)
    mask = keep[:, None] & (column < D)[None, :]
    x = tl.load(q + offsets[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(q + offsets[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    table = position.to(tl.int64)[:, None] * HALF + angle[None, :]
    cosine = tl.load(cos + table, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sin + table, mask=mask, other=0.0).to(tl.float32)
    return (x * cosine + tl.where(is_first, -y, y) * sine).to(q.dtype.element_ty)


@triton.jit
def load_once(base, offsets, keep, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr):
    """Masked `common.load_tile` for keys and values that a step reads once: they need not stay in a cache."""
    column = FIRST + tl.arange(0, PART)
    mask = keep[:, None]
    if FIRST + PART > SIZE:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(base + offsets[:, None] + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_rotated_parts(
    q, offsets, position, keep, cos, sin, D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr
):  # fmt: skip
    """Load and rotate all columns, in one or two parts."""
    q_1 = load_rotated(q, offsets, position, keep, cos, sin, 0, D_1, D)
    q_2 = q_1
    if D_2 > 0:
        q_2 = load_rotated(q, offsets, position, keep, cos, sin, D_1, D_2, D)
    return q_1, q_2


@triton.jit
def load_keys(
    k, v, k_offsets, v_offsets, exists,
    D: tl.constexpr, D_1: tl.constexpr, D_2: tl.constexpr, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr,
    HAS_V: tl.constexpr,
):  # fmt: skip
    """A tile of keys and their values, in one or two parts each. All of it is asked for before any is used."""
    k_1 = load_once(k, k_offsets, exists, 0, D_1, D)
    k_2 = k_1
    if D_2 > 0:
        k_2 = load_once(k, k_offsets, exists, D_1, D_2, D)
    v_1 = k_1
    v_2 = k_1
    if HAS_V:
        v_1 = load_once(v, v_offsets, exists, 0, V_1, V)
        if V_2 > 0:
            v_2 = load_once(v, v_offsets, exists, V_1, V_2, V)
    return k_1, k_2, v_1, v_2


@triton.jit
def attend_tile(
    queries, keys, visible, score_scale, softmax, D_2: tl.constexpr, V_2: tl.constexpr, HAS_V: tl.constexpr
):
    """Take a tile of keys into the running softmax of queries; also its probabilities, relative to the new maximum."""
    q_1, q_2 = queries
    k_1, k_2, v_1, v_2 = keys
    maximum, total, o_1, o_2 = softmax
    scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
    if D_2 > 0:
        scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
    # Rounded here: drawn into the subtraction below, the product would not be.
    scores = tl.where(visible, tl.fma(scores, score_scale, 0.0), LOWEST)
    new_maximum = tl.maximum(maximum, tl.ceil(tl.max(scores, 1)))
    whole = tl.floor(scores)
    p = tl.exp2(scores - whole) * power_of_2(whole - new_maximum[:, None])
    p = tl.where(visible, p, 0.0)
    decay = power_of_2(maximum - new_maximum)
    total = total * decay + tl.sum(p, 1)
    if HAS_V:
        weights = p.to(v_1.dtype)
        o_1 = tl.dot(weights, v_1, o_1 * decay[:, None], input_precision="ieee")
        if V_2 > 0:
            o_2 = tl.dot(weights, v_2, o_2 * decay[:, None], input_precision="ieee")
    return (new_maximum, total, o_1, o_2), p


@triton.jit
def prefetch_rows(base, offsets, SIZE: tl.constexpr):
    """Bring rows into the L2 cache: a hint that no result depends on. Every offset must be that of a row."""
    LINE: tl.constexpr = 512 // base.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(SIZE, LINE))
    column = tl.minimum(tl.arange(0, LINES) * LINE, SIZE - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [base + offsets[:, None] + column[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def nothing_yet(ROWS: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr, HAS_V: tl.constexpr):
    """A softmax over no key: a tuple of maximum, sum, and o in one or two parts."""
    total = tl.zeros([ROWS], tl.float32)
    o_1 = total
    o_2 = total
    if HAS_V:
        o_1 = tl.zeros([ROWS, V_1], tl.float32)
        if V_2 > 0:
            o_2 = tl.zeros([ROWS, V_2], tl.float32)
    return tl.full([ROWS], LOWEST, tl.float32), total, o_1, o_2


@triton.jit
def add_softmax(softmax, other, V_2: tl.constexpr, HAS_V: tl.constexpr):
    """Two partial results as one. Weights are powers of two: in any compiled code the sums are the same."""
    maximum, total, o_1, o_2 = softmax
    other_maximum, other_total, other_1, other_2 = other
    new_maximum = tl.maximum(maximum, other_maximum)
    weight, other_weight = power_of_2(maximum - new_maximum), power_of_2(other_maximum - new_maximum)
    total = total * weight + other_total * other_weight
    if HAS_V:
        o_1 = o_1 * weight[:, None] + other_1 * other_weight[:, None]
        if V_2 > 0:
            o_2 = o_2 * weight[:, None] + other_2 * other_weight[:, None]
    return new_maximum, total, o_1, o_2


@triton.jit
def begin_tile(
    tile, UNIT_TILES, whole, softmax, ROWS: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr, HAS_V: tl.constexpr
):
    """In front of a unit's first tile: the unit before it goes into the whole, and the running softmax begins anew."""
    if tile % UNIT_TILES == 0:
        whole = add_softmax(whole, softmax, V_2, HAS_V)
        softmax = nothing_yet(ROWS, V_1, V_2, HAS_V)
    return whole, softmax


@triton.jit
def store_part(parts, place, keep, softmax, V: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr):
    """Write a partial result; `place` counts rows and their parts, [B, T, H, parts]."""
    part_maximum, part_total, part_o = parts
    maximum, total, o_1, o_2 = softmax
    tl.store(part_maximum + place, maximum, mask=keep)
    tl.store(part_total + place, total, mask=keep)
    store_tile(part_o, place * V, keep, o_1, 0, V_1, V)
    if V_2 > 0:
        store_tile(part_o, place * V, keep, o_2, V_1, V_2, V)


def stages_of_pages(stages: int) -> int:
    """Depth of a pipeline whose keys are found through a table: half of it is spent on the table."""
    return 2 * stages
