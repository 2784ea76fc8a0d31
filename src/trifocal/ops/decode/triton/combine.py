"""Decoding's last kernel: adds up the parts of every branch, and the branches by their gates.

A program holds some heads of one token. Parts are added in the order that `common` says, by groups of units, whether
these come as separate parts or as one.
"""

import triton
import triton.language as tl

from trifocal.ops.decode.triton.attend import count_chosen, count_window, dense_unit
from trifocal.ops.decode.triton.common import GROUP_UNITS, UNIT_KEYS, add_softmax, nothing_yet
from trifocal.ops.decode.triton.scores import count_tiles
from trifocal.ops.triton.common import LOWEST
from trifocal.ops.triton.dependent_launch import wait_for_inputs
from trifocal.ops.triton.launch import Kernel

HEADS_OF_PROGRAM = tl.constexpr(4)


@triton.jit
def add_groups(
    parts, place, exists, first, count, whole,
    V: tl.constexpr, V_PAD: tl.constexpr, UNITS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Add some groups, from part `first` on, to the sum of those before."""
    part_maximum, part_total, part_o = parts
    column = tl.arange(0, V_PAD)
    for group in tl.static_range(GROUPS):
        softmax = nothing_yet(HEADS_OF_PROGRAM, V_PAD, 0, True)
        for step in tl.static_range(GROUP_UNITS // UNITS):
            part = first + group * (GROUP_UNITS // UNITS) + step
            is_part = exists & (part < count)
            inside = is_part[:, None] & (column < V)[None, :]
            next_maximum = tl.load(part_maximum + place + part, mask=is_part, other=LOWEST)
            next_total = tl.load(part_total + place + part, mask=is_part, other=0.0)
            next_o = tl.load(part_o + (place + part)[:, None] * V + column[None, :], mask=inside, other=0.0)
            softmax = add_softmax(softmax, (next_maximum, next_total, next_o, next_o), 0, True)
        whole = add_softmax(whole, softmax, 0, True)
    return whole


@triton.jit
def add_parts(
    parts, place, exists, count,
    V: tl.constexpr, V_PAD: tl.constexpr, UNITS: tl.constexpr, AT_ONCE: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """o of one branch, [heads, V_PAD], from parts of UNITS units each; zero where a row saw nothing.

    The parts of AT_ONCE groups are asked for together. MORE: whether there may be more.
    """
    whole = nothing_yet(HEADS_OF_PROGRAM, V_PAD, 0, True)
    if MORE:
        PARTS: tl.constexpr = GROUP_UNITS // UNITS * AT_ONCE
        for first in range(0, count, PARTS):
            whole = add_groups(parts, place, exists, first, count, whole, V, V_PAD, UNITS, AT_ONCE)
    else:
        # Without a loop, the parts of all branches are asked for together. Not in front of the loop too: Triton needs
        # eight times as long for twice as many loads, as each depends on the results of those before.
        whole = add_groups(parts, place, exists, 0, count, whole, V, V_PAD, UNITS, AT_ONCE)
    _, whole_total, whole_o, _ = whole
    # Not `> 0`: a NaN stays one.
    sees = whole_total != 0.0
    return whole_o * tl.where(sees, 1.0 / tl.where(sees, whole_total, 1.0), 0.0)[:, None]


@Kernel
@triton.jit(do_not_specialize=["num_parts", "first_chosen", "first_window", "window_size"])
def decode_combine_kernel(
    part_maximum, part_total, part_o, gates, o, lengths, num_new,
    gate_batch_stride, gate_time_stride, gate_head_stride, gate_branch_stride,
    num_parts, first_chosen, first_window, window_size,
    NEW: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, DENSE: tl.constexpr,
    GATED: tl.constexpr, WINDOW: tl.constexpr, COMPRESSION: tl.constexpr, STRIDE: tl.constexpr,
    SELECTION: tl.constexpr, NUM_SELECTED: tl.constexpr, BLOCKS: tl.constexpr, UNIT_TILES: tl.constexpr,
    COMPRESSED_UNITS: tl.constexpr, UNITS: tl.constexpr, COMPRESSED_AT_ONCE: tl.constexpr, CHOSEN_AT_ONCE: tl.constexpr,
    WINDOW_AT_ONCE: tl.constexpr, MORE_COMPRESSED: tl.constexpr, MORE_CHOSEN: tl.constexpr, MORE_WINDOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """o of one tile of heads of one token; zero where the sequence has no such token."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    position = length + token
    head = tl.program_id(0) * HEADS_OF_PROGRAM + tl.arange(0, HEADS_OF_PROGRAM)
    in_o = head < HEADS
    is_token = token < new
    exists = in_o & is_token
    parts = (part_maximum, part_total, part_o)
    row = (batch * NEW + token) * HEADS + head
    place = row * num_parts
    if DENSE:
        num_keys = length + new
        if WINDOW:
            count = tl.where(is_token, tl.cdiv(count_window(position, window_size), UNITS * UNIT_KEYS), 0)
        else:
            count = tl.where(is_token, tl.cdiv(num_keys, UNITS * dense_unit(num_keys)), 0)
        mixed = add_parts(parts, place, exists, count, V, V_PAD, UNITS, CHOSEN_AT_ONCE, MORE_CHOSEN)
    else:
        count = tl.where(is_token, tl.cdiv(count_chosen(position, SELECTION, NUM_SELECTED), UNITS * UNIT_KEYS), 0)
        mixed = add_parts(parts, place + first_chosen, exists, count, V, V_PAD, UNITS, CHOSEN_AT_ONCE, MORE_CHOSEN)
        if GATED:
            gate = gates + batch * gate_batch_stride + token * gate_time_stride + head * gate_head_stride
            mixed *= tl.load(gate + gate_branch_stride, mask=exists, other=0.0).to(tl.float32)[:, None]
            tiles = count_tiles(length + new, COMPRESSION, STRIDE, SELECTION, BLOCKS)
            count = tl.where(is_token, tl.cdiv(tiles, COMPRESSED_UNITS * UNIT_TILES), 0)
            o_cmp = add_parts(
                parts, place, exists, count, V, V_PAD, COMPRESSED_UNITS, COMPRESSED_AT_ONCE, MORE_COMPRESSED
            )
            # Said so, every compiled code rounds the same way.
            mixed = tl.fma(o_cmp, tl.load(gate, mask=exists, other=0.0).to(tl.float32)[:, None], mixed)
            if WINDOW:
                count = tl.where(is_token, tl.cdiv(count_window(position, window_size), UNITS * UNIT_KEYS), 0)
                o_win = add_parts(
                    parts, place + first_window, exists, count, V, V_PAD, UNITS, WINDOW_AT_ONCE, MORE_WINDOW
                )
                gate_win = tl.load(gate + 2 * gate_branch_stride, mask=exists, other=0.0).to(tl.float32)
                mixed = tl.fma(o_win, gate_win[:, None], mixed)
    column = tl.arange(0, V_PAD)
    tl.store(
        o + row[:, None] * V + column[None, :], mixed.to(o.dtype.element_ty),
        mask=in_o[:, None] & (column < V)[None, :],
    )  # fmt: skip
