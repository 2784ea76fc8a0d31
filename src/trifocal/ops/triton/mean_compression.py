"""Mean compression: `C` means over `l` tokens each, `d` tokens apart, and its gradient: memory traffic, nothing else.

Forward goes through a block's `l / d` splits of `d` tokens at the same time, first token of each, second token of each:
the blocks that share a token load it together, and all but the first find it in the cache. Backward holds a tile of
tokens and adds the shares of the `l / d` blocks that hold a token.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, place_compressed_blocks
from trifocal.ops.tiles import cdiv, next_power_of_2
from trifocal.ops.triton.documents import default_documents, first_compressed_blocks
from trifocal.ops.triton.launch import Kernel

# Numbers of a tile: 8 for each thread of 4 warps, 16 bytes in 16-bit types.
_TILE = 1024
# Loads that a program asks for before it adds up the first of them.
_UNROLL = 8


@triton.jit
def _tile_of(num_rows, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Batch entry, group and rows of this program. Groups are next to one another in memory, so they come first."""
    program = tl.program_id(0)
    tiles = (num_rows + ROWS - 1) // ROWS
    row = program // GROUPS % tiles * ROWS + tl.arange(0, ROWS)
    return (program // GROUPS // tiles).to(tl.int64), (program % GROUPS).to(tl.int64), row


@Kernel
@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def mean_compress_kernel(
    x, x_cmp, last_tokens,
    batch_stride, time_stride, group_stride, feature_stride, num_tokens, num_blocks,
    GROUPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The means of one tile of blocks; zero in slots that no document fills."""
    batch, group, slot = _tile_of(num_blocks, GROUPS, ROWS)
    exists = slot < num_blocks
    if PACKED:
        last = tl.load(last_tokens + slot, mask=exists, other=num_tokens)
        filled = last < num_tokens
        first = last - (BLOCK - 1)
    else:
        filled = exists
        first = slot * STRIDE
    column = tl.arange(0, D_PAD)
    inside = filled[:, None] & (column < D)[None, :]
    x += batch * batch_stride + group * group_stride
    columns = column.to(tl.int64) * feature_stride
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    for begin in tl.range(0, BLOCK, UNROLL):
        # Each round has its own sum: of fewer numbers, it errs by less.
        part = tl.zeros([ROWS, D_PAD], tl.float32)
        for step in tl.static_range(UNROLL):
            # One token of each split in turn.
            token = (begin + step) % (BLOCK // STRIDE) * STRIDE + (begin + step) // (BLOCK // STRIDE)
            rows = (first + token).to(tl.int64) * time_stride
            part += tl.load(x + rows[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        total += part
    out = ((batch * num_blocks + slot) * GROUPS + group) * D
    mean = total * (1.0 / BLOCK)
    tl.store(
        x_cmp + out[:, None] + column[None, :],
        mean.to(x_cmp.dtype.element_ty),
        mask=exists[:, None] & (column < D)[None, :],
    )


@Kernel
@triton.jit(do_not_specialize=["num_tokens"])
def mean_compress_backward_kernel(
    d_x_cmp, d_x, ids, positions, cu_seqlens, first_blocks,
    batch_stride, block_stride, group_stride, feature_stride, num_tokens,
    GROUPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of tokens: of every block that holds a token its share, latest block first."""
    batch, group, token = _tile_of(num_tokens, GROUPS, ROWS)
    exists = token < num_tokens
    if PACKED:
        document = tl.load(ids + token, mask=exists, other=0)
        position = tl.load(positions + token, mask=exists, other=0)
        first_block = tl.load(first_blocks + document)
        length = tl.load(cu_seqlens + document + 1) - tl.load(cu_seqlens + document)
    else:
        position = token
        first_block = token * 0
        length = first_block + num_tokens
    column = tl.arange(0, D_PAD)
    d_x_cmp += batch * batch_stride + group * group_stride
    columns = column.to(tl.int64) * feature_stride
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    for before in tl.range(0, BLOCK // STRIDE):
        block = position // STRIDE - before
        holds = exists & (block >= 0) & (block * STRIDE <= length - BLOCK)
        rows = (first_block + block).to(tl.int64) * block_stride
        inside = holds[:, None] & (column < D)[None, :]
        total += tl.load(d_x_cmp + rows[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    out = ((batch * num_tokens + token) * GROUPS + group) * D
    d_token = total * (1.0 / BLOCK)
    tl.store(
        d_x + out[:, None] + column[None, :],
        d_token.to(d_x.dtype.element_ty),
        mask=exists[:, None] & (column < D)[None, :],
    )


def mean_compress_forward(x: Tensor, geometry: Geometry, num_blocks: int, documents: Documents | None) -> Tensor:
    """Compress keys or values x [B, S, G, D], in any strides, to [B, C, G, D], contiguous, in the type of x; zero in
    slots that no document fills. C is `num_blocks`; with documents any number not under the documents' own.
    """
    batch, num_tokens, groups, dim = x.shape
    x_cmp = torch.empty(batch, num_blocks, groups, dim, dtype=x.dtype, device=x.device)
    if not x_cmp.numel():
        return x_cmp
    last_tokens = x_cmp
    if documents is not None:
        _, (last_tokens, _) = place_compressed_blocks(documents, num_blocks, geometry)
    constants = _constants(x_cmp, geometry, documents)
    mean_compress_kernel[(batch * groups * cdiv(num_blocks, constants["ROWS"]),)](
        x, x_cmp, last_tokens, *_strides(x), num_tokens, num_blocks, **constants,
        UNROLL=math.gcd(geometry.compression_block_size, _UNROLL),
    )  # fmt: skip
    return x_cmp


def mean_compress_backward(d_x_cmp: Tensor, geometry: Geometry, num_tokens: int, documents: Documents | None) -> Tensor:
    """Gradient of `mean_compress_forward`: [B, C, G, D], in any strides, to [B, S, G, D], contiguous."""
    batch, _, groups, dim = d_x_cmp.shape
    d_x = torch.empty(batch, num_tokens, groups, dim, dtype=d_x_cmp.dtype, device=d_x_cmp.device)
    if not d_x_cmp.numel():
        return d_x.zero_()
    first_blocks = d_x if documents is None else first_compressed_blocks(documents, geometry)
    ids, positions, cu_seqlens = default_documents(documents, d_x)
    constants = _constants(d_x, geometry, documents)
    mean_compress_backward_kernel[(batch * groups * cdiv(num_tokens, constants["ROWS"]),)](
        d_x_cmp, d_x, ids, positions, cu_seqlens, first_blocks, *_strides(d_x_cmp), num_tokens, **constants
    )
    return d_x


def _strides(x: Tensor) -> tuple[int, ...]:
    """All four; one batch has none: its value would only force a compilation."""
    batch, *others = x.stride()
    return (0 if x.shape[0] == 1 else batch), *others


def _constants(out: Tensor, geometry: Geometry, documents: Documents | None) -> dict[str, int | bool]:
    groups, dim = out.shape[2:]
    columns = next_power_of_2(dim)
    return {
        "GROUPS": groups, "D": dim, "D_PAD": columns,
        "BLOCK": geometry.compression_block_size, "STRIDE": geometry.compression_stride,
        "PACKED": documents is not None, "ROWS": max(1, _TILE // columns),
    }  # fmt: skip
