"""Products of a few rows with a layer's weights, for decoding: a row's bits do not depend on the other rows.

A program has 16 columns of the result and takes 8 rows at a time, or up to 32 of many. Tiles of any number of rows
compute a row alike: warps split K in the same way and pass their part to instructions of 16 columns and 8 rows in the
same order; all other sums are added pair by pair in the code itself; no product is fused with a sum but in the same
thread. Reading the weights takes the time, so they are loaded before the wait for inputs (`dependent_launch`). The
kernel that writes the residual stream also writes what the next norm needs: the sum of squares of each of its tiles,
and the row times the norm's weight; the next kernel scales its product by the root.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.common import add_product, nothing_lost, unit_stride
from trifocal.ops.triton.dependent_launch import dependent_launch, release_next, wait_for_inputs
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.validation import check_contiguous

_FEWEST_ROWS = 8
_MAX_ROWS = 32
_COLUMNS = 16
# Programs share the rows up to this number of programs: two for each multiprocessor of the largest devices.
_ENOUGH_PROGRAMS = 264
# Numbers along K that a warp takes at a time: a thread's load has 16 bytes; operands in fp32 take more registers.
_STEP = 32
# Bytes of weights that a program holds at a time, of one product and of two: 88, 64 registers of a thread of 8 warps.
_MAX_BYTES = {1: 90112, 2: 65536}
# Two programs a multiprocessor.
_MAX_REGISTERS = 128
_MAX_WARPS = 8
# A norm's weight, [N], and the type of the products behind it.
NextNorm = tuple[Tensor, torch.dtype]
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def beside(a, b):
    """[T, A] and [T, A] as [T, 2 * A]: both of a row stay in the registers of one thread."""
    return tl.reshape(tl.permute(tl.join(a, b), 0, 2, 1), a.shape[0], 2 * a.shape[1])


@triton.jit
def load_lanes(pointers, k, COUNT: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr):
    """COUNT numbers along K from each thread's pointer on, which is at k: [T, COUNT]; if MASKED, zero beyond K."""
    number = tl.arange(0, COUNT)[None, :]
    if MASKED:
        tile = tl.load(pointers[:, None] + number, mask=k[:, None] + number < K, other=0.0)
    else:
        tile = tl.load(pointers[:, None] + number)
    return tile


@triton.jit
def lanes_of_row(x, k, LANE: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr):
    """LANE numbers of each thread's row of x, in loads of 16 bytes: [T, LANE]."""
    COUNT: tl.constexpr = min(LANE, 128 // x.dtype.element_ty.primitive_bitwidth)
    tile = load_lanes(x, k, COUNT, K, MASKED)
    if LANE > COUNT:
        tile = beside(tile, load_lanes(x + COUNT, k + COUNT, COUNT, K, MASKED))
    tl.static_assert(LANE <= 2 * COUNT)
    return tile


@triton.jit
def lanes_of_rows(
    x, k, row, num_rows, x_stride, ROWS: tl.constexpr, LANE: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr
):
    """As `lanes_of_row` of every eighth row of ROWS: [T, ROWS / 8 * LANE]."""
    parts = ()
    for first in tl.static_range(0, ROWS, 8):
        known_row = tl.minimum(row + first, num_rows - 1).to(tl.int64)
        parts += (lanes_of_row(x + known_row * x_stride + k, k, LANE, K, MASKED),)
    if ROWS == 32:
        tile = beside(beside(parts[0], parts[1]), beside(parts[2], parts[3]))
    elif ROWS == 16:
        tile = beside(parts[0], parts[1])
    else:
        tile = parts[0]
    return tile


@triton.jit
def columns_of_operand(tiles, SPLIT: tl.constexpr, LANE: tl.constexpr):
    """The first operand [SPLIT, 16, 4 * LANE] of what threads hold, [T, 2 * LANE], without moving a number.

    Of an operand a thread holds LANE / 2 neighbours of K, its three neighbours the next ones, and so twice. So a sum
    takes a thread's LANE numbers in two parts; `rows_of_operand` orders those of x alike.
    """
    tile = beside(tiles[0], tiles[1])
    tile = tl.reshape(tile, SPLIT, 8, 4, 2, 2, LANE // 2)
    return tl.reshape(tl.permute(tile, 0, 3, 1, 4, 2, 5), SPLIT, 16, 4 * LANE)


@triton.jit
def rows_of_operand(tile, SPLIT: tl.constexpr, LANE: tl.constexpr, ROWS: tl.constexpr):
    """The second operand, [SPLIT, 4 * LANE, ROWS], of what threads hold; see `columns_of_operand`."""
    tile = tl.reshape(tile, SPLIT, 8, 4, ROWS // 8, 2, LANE // 2)
    return tl.reshape(tl.permute(tile, 0, 4, 2, 5, 3, 1), SPLIT, 4 * LANE, ROWS)


@triton.jit
def load_turn(
    weight, column, other_column, k, TURN: tl.constexpr, BLOCK: tl.constexpr, INSIDE: tl.constexpr,
    LANE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A turn's parts of W, pairs of [T, LANE]: every thread's two columns; the first INSIDE parts need no mask."""
    tiles = ()
    for part in tl.static_range(TURN):
        at = k + part * BLOCK
        first = load_lanes(weight + column + at, at, LANE, K, part >= INSIDE)
        tiles += ((first, load_lanes(weight + other_column + at, at, LANE, K, part >= INSIDE)),)
    return tiles


@triton.jit
def add_turn(
    total, lost, total_up, lost_up, tiles, ups, x, k, row, num_rows, x_stride, BLOCK: tl.constexpr,
    INSIDE: tl.constexpr, LANE: tl.constexpr, K: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """The sums with the products of a turn's parts of W and rows of x, and with those of its second half."""
    SPLIT: tl.constexpr = total.shape[0]
    ROWS: tl.constexpr = total.shape[2]
    for part in tl.static_range(len(tiles)):
        rows = lanes_of_rows(x, k + part * BLOCK, row, num_rows, x_stride, ROWS, LANE, K, part >= INSIDE)
        rows = rows_of_operand(rows, SPLIT, LANE, ROWS)
        total, lost = add_product(total, lost, columns_of_operand(tiles[part], SPLIT, LANE), rows)
        if UP > 0:
            up = columns_of_operand(ups[part], SPLIT, LANE)
            total_up, lost_up = add_product(total_up, lost_up, up, rows)
    return total, lost, total_up, lost_up


@triton.jit
def load_squares(squares, row, SQUARES: tl.constexpr, LEVELS: tl.constexpr):
    """The sums of squares of rows, [ROWS, 2**LEVELS]."""
    part = tl.arange(0, 2**LEVELS)
    return tl.load(squares + row[:, None] * SQUARES + part[None, :], mask=(part < SQUARES)[None, :], other=0.0)


@triton.jit
def sum_of_warps(x):
    """x [SPLIT, COLUMNS, ROWS] summed over its first dimension, pair by pair: one exchange between the warps."""
    SPLIT: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = x.shape[2]
    # Numbers that come from other warps are better split than summed as below: they are exchanged once.
    parts = tl.permute(x, 1, 2, 0)
    for level in tl.static_range(1, 4):
        if 2**level <= SPLIT:
            even, odd = tl.split(tl.reshape(parts, COLUMNS, ROWS, SPLIT // 2**level, 2))
            parts = even + odd
    return tl.reshape(parts, COLUMNS, ROWS)


@triton.jit
def sum_of_pairs(x, LEVELS: tl.constexpr):
    """x [ROWS, 2**LEVELS] summed over its last dimension, neighbours first: any layout gives the same bits."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, x.shape[0], x.shape[1] // 2, 2), 2)
    return tl.reshape(x, x.shape[0])


@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def decode_linear_kernel(
    x, squares, weight, bias, residual, next_norm, out, normed, sigmoids, out_squares, x_stride, num_rows, eps,
    K: tl.constexpr, N: tl.constexpr, SIGMOIDS_FROM: tl.constexpr, SQUARES: tl.constexpr, SQUARES_LEVELS: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, NEXT_NORM: tl.constexpr,
    DEPENDENT: tl.constexpr, LOOPS: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, SPLIT: tl.constexpr,
    STEP: tl.constexpr, TURN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """2**LEVELS columns of `x W^T`, with SWIGLU of both halves of W, for every n-th tile of ROWS rows.

    Products are in `dtype`. Tiles of W and x are [SPLIT, columns or ROWS, STEP]: warp s of SPLIT adds up its own part
    of K. TURN of them are asked for at a time.
    """
    COLUMNS: tl.constexpr = 2**LEVELS
    BLOCK: tl.constexpr = SPLIT * STEP
    STRIDE: tl.constexpr = BLOCK * TURN
    MASKED: tl.constexpr = K % STRIDE > 0
    UP: tl.constexpr = N * K if SWIGLU else 0
    release_next(DEPENDENT)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_exists = column < N
    # Short code starts sooner: what does not exist reads a neighbour instead of being masked, and is not stored.
    known_column = tl.minimum(column, N - 1)
    LANE: tl.constexpr = STEP // 4
    thread = tl.arange(0, SPLIT * 32)
    thread_k = thread // 32 * STEP + thread % 4 * LANE
    thread_row = thread // 4 % 8
    thread_column = tl.program_id(1) * COLUMNS + thread_row
    other_columns = tl.minimum(thread_column + 8, N - 1).to(tl.int64) * K
    thread_column = tl.minimum(thread_column, N - 1).to(tl.int64) * K
    INSIDE: tl.constexpr = 0 if MASKED else TURN
    tiles = load_turn(weight, thread_column, other_columns, thread_k, TURN, BLOCK, K // BLOCK, LANE, K)
    ups = tiles
    if SWIGLU:
        ups = load_turn(weight + UP, thread_column, other_columns, thread_k, TURN, BLOCK, K // BLOCK, LANE, K)
    if BIAS:
        added = tl.load(bias + known_column).to(tl.float32)
    if NEXT_NORM:
        next_scale = tl.load(next_norm + known_column).to(tl.float32)[:, None]
    wait_for_inputs(DEPENDENT)
    # Many numbers would take registers during the product; otherwise they are loaded with the rows.
    SQUARES_LATER: tl.constexpr = ROWS * 2**SQUARES_LEVELS > 2048
    # A loop of one turn is none: what does not depend on the row stays where it is needed, in fewer registers.
    turns = 1
    if LOOPS:
        turns = tl.cdiv(tl.cdiv(num_rows, ROWS) - tl.program_id(0), tl.num_programs(0))
    for turn in tl.range(0, turns, num_stages=1):
        row_tile = tl.program_id(0) + turn * tl.num_programs(0)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        row_exists = row < num_rows
        known_row = tl.minimum(row, num_rows - 1)
        keep_out = column_exists[:, None] & row_exists[None, :]
        place = row.to(tl.int64)[None, :] * N + column[:, None]
        if NORM and not SQUARES_LATER:
            parts = load_squares(squares, known_row, SQUARES, SQUARES_LEVELS)
        if RESIDUAL:
            before = tl.load(residual + place, mask=keep_out, other=0.0).to(tl.float32)
        total = tl.zeros([SPLIT, COLUMNS, ROWS], tl.float32)
        total_up = total
        lost = nothing_lost(total, tl.zeros([1], dtype))
        lost_up = lost
        own_row = row_tile * ROWS + thread_row
        total, lost, total_up, lost_up = add_turn(
            total, lost, total_up, lost_up, tiles, ups, x, thread_k, own_row, num_rows, x_stride,
            BLOCK, K // BLOCK, LANE, K, UP,
        )  # fmt: skip
        for first in tl.range(STRIDE, K, STRIDE):
            k = first + thread_k
            next_tiles = load_turn(weight, thread_column, other_columns, k, TURN, BLOCK, INSIDE, LANE, K)
            next_ups = next_tiles
            if SWIGLU:
                next_ups = load_turn(weight + UP, thread_column, other_columns, k, TURN, BLOCK, INSIDE, LANE, K)
            total, lost, total_up, lost_up = add_turn(
                total, lost, total_up, lost_up, next_tiles, next_ups, x, k, own_row, num_rows, x_stride,
                BLOCK, INSIDE, LANE, K, UP,
            )  # fmt: skip
        sums = sum_of_warps(total)
        if NORM:
            if SQUARES_LATER:
                parts = load_squares(squares, known_row, SQUARES, SQUARES_LEVELS)
            root = tl.rsqrt(sum_of_pairs(parts, SQUARES_LEVELS) / K + eps)[None, :]
            sums *= root
        if BIAS:
            sums += added[:, None]
        # Rounded where PyTorch rounds: the output of a product has the type of its weights.
        product = sums.to(dtype).to(tl.float32)
        if SWIGLU:
            gated = (product / (1.0 + tl.exp(-product))).to(dtype).to(tl.float32)
            up = sum_of_warps(total_up)
            product = gated * (up * root).to(dtype).to(tl.float32)
        if RESIDUAL:
            product += before
            if NEXT_NORM:
                tl.store(normed + place, (product * next_scale).to(dtype), mask=keep_out)
            tile_squares = sum_of_pairs(tl.trans(tl.where(keep_out, product * product, 0.0)), LEVELS)
            tl.store(out_squares + row * tl.num_programs(1) + tl.program_id(1), tile_squares, mask=row_exists)
        if SIGMOIDS_FROM < N:
            is_sigmoid = (column >= SIGMOIDS_FROM)[:, None]
            gate_place = row[None, :] * (N - SIGMOIDS_FROM) + (column - SIGMOIDS_FROM)[:, None]
            tl.store(sigmoids + gate_place, 1.0 / (1.0 + tl.exp(-product)), mask=keep_out & is_sigmoid)
            keep_out = keep_out & (is_sigmoid == 0)
            place = row.to(tl.int64)[None, :] * SIGMOIDS_FROM + column[:, None]
        tl.store(out + place, product.to(out.dtype.element_ty), mask=keep_out)


@Kernel
@triton.jit
def decode_embedding_kernel(
    tokens, table, next_norm, out, normed, out_squares, vocab_size, E: tl.constexpr, E_PAD: tl.constexpr,
    NEXT_NORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token's embedding in the residual stream's type, its sum of squares, and itself times a norm's weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, E_PAD)
    if NEXT_NORM:
        next_scale = tl.load(next_norm + column, mask=column < E, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    token = tl.load(tokens + row).to(tl.int64)
    # A token outside of the table would read beyond it; the caller sees NaN instead.
    exists = (token >= 0) & (token < vocab_size)
    x = tl.load(table + token * E + column, mask=exists & (column < E), other=float("nan")).to(tl.float32)
    x = tl.where(column < E, x, 0.0)
    tl.store(out + row * E + column, x, mask=column < E)
    if NEXT_NORM:
        tl.store(normed + row * E + column, (x * next_scale).to(normed.dtype.element_ty), mask=column < E)
    tl.store(out_squares + row, tl.sum(x * x, 0))


def embedding(tokens: Tensor, table: Tensor, next_norm: NextNorm | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Embeddings [M, E] of tokens [M] in fp32, and what `linear` gives with them; see `ops.decode.linear`."""
    rows, width = tokens.shape[0], table.shape[1]
    out = torch.empty(rows, width, dtype=torch.float32, device=table.device)
    squares = torch.empty(rows, 1, dtype=torch.float32, device=table.device)
    next_weight, normed = _of_next_norm(next_norm, out)
    check_contiguous(table=table, next_norm=next_weight)
    # A column of a batch's tokens has a stride.
    decode_embedding_kernel[(rows,)](
        tokens.contiguous(), table, table if next_weight is None else next_weight, out,
        out if normed is None else normed, squares, table.shape[0], E=width, E_PAD=next_power_of_2(width),
        NEXT_NORM=normed is not None, num_warps=4, **dependent_launch(table.device),
    )  # fmt: skip
    return out, squares, normed


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    next_norm: NextNorm | None = None,
    num_sigmoids: int = 0,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`x W^T` and what goes with it, as the functions of `ops.decode.linear` ask for it.

    x is [M, K] in the type of the products; weight [N, K], with `swiglu` [2 N, K], the gate's rows first. With `norm`,
    sums of squares [M, parts] and epsilon, x is the rows times the norm's weight. `residual` [M, N], fp32, is added to
    the result; `next_norm` reads this sum next. Returns the result, [M, N - num_sigmoids]; the sigmoids
    [M, num_sigmoids] or the sums of squares [M, tiles] in fp32, or None; and the result times the next norm's weight,
    [M, N] in the norm's type, or None.
    """
    x = unit_stride(x)
    squares, eps = norm or (x, 0.0)
    rows, depth = x.shape
    width = weight.shape[0] // (2 if swiglu else 1)
    tile_rows = _rows_of_tile(rows, weight.dtype.itemsize)
    tiles, row_tiles = cdiv(width, _COLUMNS), cdiv(rows, tile_rows)
    dtype = (out_dtype or weight.dtype) if residual is None else torch.float32
    out = torch.empty(rows, width - num_sigmoids, dtype=dtype, device=x.device)
    extra = None
    if residual is not None:
        extra = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    elif num_sigmoids:
        extra = torch.empty(rows, num_sigmoids, dtype=torch.float32, device=x.device)
    next_weight, normed = _of_next_norm(next_norm, out)
    # Not copied: programs ask for weights before a copy made here would be ready.
    check_contiguous(weight=weight, bias=bias, next_norm=next_weight)
    parts = 1
    if norm:
        parts, squares = squares.shape[1], squares.contiguous()
    split, turn = _turns_of_sum(depth, weight.dtype.itemsize, 2 if swiglu else 1)
    programs = min(row_tiles, max(1, _ENOUGH_PROGRAMS // tiles))
    few_rows = tile_rows == _FEWEST_ROWS and programs == row_tiles
    most_registers = {"maxnreg": _MAX_REGISTERS} if few_rows else {}
    decode_linear_kernel[programs, tiles](
        x, squares, weight, weight if bias is None else bias,
        x if residual is None else residual.contiguous(), weight if next_weight is None else next_weight,
        out, out if normed is None else normed, out if extra is None else extra, out if extra is None else extra,
        x.stride(0), rows, eps,
        K=depth, N=width, SIGMOIDS_FROM=width - num_sigmoids, SQUARES=parts, SQUARES_LEVELS=_log2(parts),
        NORM=norm is not None, BIAS=bias is not None, SWIGLU=swiglu, RESIDUAL=residual is not None,
        NEXT_NORM=normed is not None, LOOPS=programs < row_tiles, ROWS=tile_rows, LEVELS=_log2(_COLUMNS), SPLIT=split,
        STEP=_STEP, TURN=turn, dtype=_TYPES[weight.dtype], num_warps=split, num_stages=1,
        **most_registers, enable_fp_fusion=weight.dtype.itemsize == 4, **dependent_launch(x.device),
    )  # fmt: skip
    return out, extra, normed


def _of_next_norm(next_norm: NextNorm | None, out: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The next norm's weight, and memory for what it multiplies; None without one."""
    if next_norm is None:
        return None, None
    weight, dtype = next_norm
    return weight, torch.empty_like(out, dtype=dtype)


def _rows_of_tile(rows: int, element_size: int) -> int:
    """Rows that a program takes at a time: of many rows, those that read the same weights."""
    # The compiler makes products in fp32 of single sums, as it likes them for a tile.
    if element_size == 4:
        return _FEWEST_ROWS
    return min(_MAX_ROWS, max(_FEWEST_ROWS, next_power_of_2(rows) // 2))


def _log2(number: int) -> int:
    """The logarithm, rounded up."""
    return (number - 1).bit_length()


def _turns_of_sum(depth: int, element_size: int, products: int) -> tuple[int, int]:
    """Warps that split a sum, and how often each takes `_STEP` numbers before a wait."""
    split = min(_MAX_WARPS, next_power_of_2(cdiv(depth, _STEP)))
    part_bytes = _COLUMNS * products * split * _STEP * element_size
    most = 1 if element_size == 4 else max(1, _MAX_BYTES[products] // part_bytes)
    parts = cdiv(depth, split * _STEP)
    # Turns of equal length: the last one's masked parts cost as much as others.
    return split, cdiv(parts, cdiv(parts, most))
