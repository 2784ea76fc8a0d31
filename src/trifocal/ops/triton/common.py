"""Shared by every kernel: constants, strides, loads and stores of tiles, sums without loss.

Rows. The heads of a group read the same keys, so a tile's rows are (query, head of the group) pairs: row
`r` is query `r // R`, head `r % R`, with R heads a group. A key or value tile is then loaded once for all of them,
whatever R is, and no row is padding except behind the last query.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

# Exponentials are to base 2: scores are multiplied by this.
LOG2_E = math.log2(math.e)
LOG2_E_KERNEL = tl.constexpr(LOG2_E)
LN_2 = tl.constexpr(math.log(2.0))
# A running maximum starts at a finite low, so that no guard against inf - inf is needed.
LOWEST = tl.constexpr(-1.0e30)


def unit_stride(x: Tensor) -> Tensor:
    """x, copied if it is not contiguous along its last dimension, or its heads lie further apart than 32 bits count."""
    *_, head_stride, feature_stride = x.stride()
    if (feature_stride == 1 or x.shape[-1] == 1) and head_stride * x.shape[-2] < 2**31:
        return x
    return x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, position and head. One batch has none: its value would only force a compilation."""
    batch, time, head = x.stride()[:3]
    return (0 if x.shape[0] == 1 else batch), time, head


@triton.jit
def load_tile(base, offsets, keep, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Load columns FIRST to FIRST + PART of the rows at `offsets`; zero past SIZE and, if MASKED, where not `keep`."""
    columns = FIRST + tl.arange(0, PART)
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED:
        mask = keep[:, None]
        if FIRST + PART > SIZE:
            mask = mask & (columns < SIZE)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif FIRST + PART > SIZE:
        tile = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(base, offsets, keep, values, FIRST: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr):
    """Store a tile's columns FIRST to FIRST + PART, those under SIZE, of the rows to keep."""
    columns = FIRST + tl.arange(0, PART)
    pointers = base + offsets[:, None] + columns[None, :]
    mask = keep[:, None]
    if FIRST + PART > SIZE:
        mask = mask & (columns < SIZE)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_parts(
    base, offsets, keep, SIZE: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """All columns of the rows at `offsets`, a tuple of two parts; the first again for one that is 0."""
    part_1 = load_tile(base, offsets, keep, 0, PART_1, SIZE, MASKED)
    part_2 = part_1
    if PART_2 > 0:
        part_2 = load_tile(base, offsets, keep, PART_1, PART_2, SIZE, MASKED)
    return part_1, part_2


@triton.jit
def load_and_multiply(
    held, base, offsets, keep, SIZE: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Products of held rows and of rows as `load_parts` loads them, [held, loaded], and the latter."""
    part_1 = load_tile(base, offsets, keep, 0, PART_1, SIZE, MASKED)
    part_2 = part_1
    product = tl.dot(held[0], tl.trans(part_1), input_precision="ieee")
    if PART_2 > 0:
        part_2 = load_tile(base, offsets, keep, PART_1, PART_2, SIZE, MASKED)
        product = tl.dot(held[1], tl.trans(part_2), product, input_precision="ieee")
    return product, (part_1, part_2)


@triton.jit
def load_and_multiply_left(
    held, base, offsets, keep, SIZE: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr
):  # fmt: skip
    """The same, masked, as [loaded, held]."""
    part_1 = load_tile(base, offsets, keep, 0, PART_1, SIZE, True)
    part_2 = part_1
    product = tl.dot(part_1, tl.trans(held[0]), input_precision="ieee")
    if PART_2 > 0:
        part_2 = load_tile(base, offsets, keep, PART_1, PART_2, SIZE, True)
        product = tl.dot(part_2, tl.trans(held[1]), product, input_precision="ieee")
    return product, (part_1, part_2)


@triton.jit
def store_parts(
    base, offsets, keep, factor, parts, SIZE: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr
):  # fmt: skip
    """Store all columns of the rows to keep, times a factor."""
    store_tile(base, offsets, keep, parts[0] * factor, 0, PART_1, SIZE)
    if PART_2 > 0:
        store_tile(base, offsets, keep, parts[1] * factor, PART_1, PART_2, SIZE)


@triton.jit
def zeros_in_parts(ROWS: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr):
    """Sums in fp32 to begin with, in two parts; the first again for one that is 0."""
    part_1 = tl.zeros([ROWS, PART_1], tl.float32)
    part_2 = part_1
    if PART_2 > 0:
        part_2 = tl.zeros([ROWS, PART_2], tl.float32)
    return part_1, part_2


@triton.jit
def nothing_yet(ROWS: tl.constexpr, V_1: tl.constexpr, V_2: tl.constexpr):
    """A running softmax over no key: a tuple of both parts of o, maximum and sum."""
    o_1, o_2 = zeros_in_parts(ROWS, V_1, V_2)
    return o_1, o_2, tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def nothing_lost(total, a):
    """The rounding error of a sum of products of `a` before its first addition: zero; see `add_product`."""
    # One return: a second one is compiled even where the first is taken.
    lost = 0.0
    if a.dtype == tl.float32:
        lost = tl.zeros_like(total)
    return lost


@triton.jit
def add_product(total, lost, a, b):
    """total + a @ b, and its rounding error, for sums over the rows of many tiles.

    In fp32 a chain of additions as long as all rows of all tiles would err more than PyTorch's attention. There a
    tile's products are added up by themselves, and the tiles with Kahan's compensation.
    """
    if a.dtype == tl.float32:
        # Were this an addition to a product, the compiler would draw it into the product.
        product = tl.fma(tl.dot(a, b, input_precision="ieee"), 1.0, -lost)
        larger = total + product
        lost = (larger - total) - product
        total = larger
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total, lost
