"""Decoding's last sums: the parts of every branch, and the branches by their gates.

The last program of `attend` to arrive takes them for its token and group, some heads at a time. In dense attention,
which may have many more parts, a kernel does, whose programs share the heads. Parts are added in the order that
`common` says: GROUP_UNITS units make a group, whether they come as parts of their own or as one.
"""

import triton
import triton.language as tl

from trifocal.ops.decode.triton.common import add_softmax, dense_unit, load_result, nothing_yet
from trifocal.ops.triton.common import LOWEST
from trifocal.ops.triton.dependent_launch import wait_for_inputs
from trifocal.ops.triton.launch import Kernel


@triton.jit
def add_groups(
    part_maximum, part_total, part_o, place, exists, first, count, whole_maximum, whole_total, whole_o,
    V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, GROUP_UNITS: tl.constexpr, UNITS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Add some groups, from part `first` on, to the sum of those before."""
    column = tl.arange(0, V_PAD)
    for group in tl.static_range(GROUPS):
        maximum, total, o, none = nothing_yet(ROWS, V_PAD, 0, True)
        for step in tl.static_range(GROUP_UNITS // UNITS):
            part = first + group * (GROUP_UNITS // UNITS) + step
            is_part = exists & (part < count)
            inside = is_part[:, None] & (column < V)[None, :]
            next_maximum = load_result(part_maximum + place + part, is_part, LOWEST)
            next_total = load_result(part_total + place + part, is_part, 0.0)
            next_o = load_result(part_o + (place + part)[:, None] * V + column[None, :], inside, 0.0)
            maximum, total, o, none = add_softmax(
                maximum, total, o, none, next_maximum, next_total, next_o, none, 0, True
            )
        whole_maximum, whole_total, whole_o, none = add_softmax(
            whole_maximum, whole_total, whole_o, none, maximum, total, o, none, 0, True
        )
    return whole_maximum, whole_total, whole_o


@triton.jit
def add_parts(
    part_maximum, part_total, part_o, place, exists, count,
    V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, GROUP_UNITS: tl.constexpr, UNITS: tl.constexpr,
    AT_ONCE: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """o of one branch, [ROWS, V_PAD], from parts of UNITS units each; zero where a row saw nothing.

    The parts of AT_ONCE groups are asked for together. MORE: whether there may be more.
    """
    whole_maximum, whole_total, whole_o, _none = nothing_yet(ROWS, V_PAD, 0, True)
    if MORE:
        PARTS: tl.constexpr = GROUP_UNITS // UNITS * AT_ONCE
        for first in range(0, count, PARTS):
            whole_maximum, whole_total, whole_o = add_groups(
                part_maximum, part_total, part_o, place, exists, first, count, whole_maximum, whole_total, whole_o,
                V, V_PAD, ROWS, GROUP_UNITS, UNITS, AT_ONCE,
            )  # fmt: skip
    else:
        # Without a loop, the parts of all branches are asked for together. Not in front of the loop too: Triton needs
        # eight times as long for twice as many loads, as each depends on the results of those before.
        whole_maximum, whole_total, whole_o = add_groups(
            part_maximum, part_total, part_o, place, exists, 0, count, whole_maximum, whole_total, whole_o,
            V, V_PAD, ROWS, GROUP_UNITS, UNITS, AT_ONCE,
        )  # fmt: skip
    # Not `> 0`: a NaN stays one.
    sees = whole_total != 0.0
    return whole_o * tl.where(sees, 1.0 / tl.where(sees, whole_total, 1.0), 0.0)[:, None]


@triton.jit
def add_branches(
    part_maximum, part_total, part_o, gate, gate_branch_stride, place, exists, compressed, chosen, window,
    first_chosen, first_window, V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, GROUP_UNITS: tl.constexpr,
    COMPRESSED_UNITS: tl.constexpr, UNITS: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr,
    WINDOW: tl.constexpr, COMPRESSED_AT_ONCE: tl.constexpr, CHOSEN_AT_ONCE: tl.constexpr,
    WINDOW_AT_ONCE: tl.constexpr, MORE_COMPRESSED: tl.constexpr, MORE_CHOSEN: tl.constexpr, MORE_WINDOW: tl.constexpr,
):  # fmt: skip
    """o of some heads, [ROWS, V_PAD], from the parts of each branch: `compressed`, `chosen`, `window` many.

    CHOSEN: whether there are chosen blocks; a window layer has its window alone.
    """
    if not CHOSEN:
        mixed = add_parts(
            part_maximum, part_total, part_o, place + first_window, exists, window,
            V, V_PAD, ROWS, GROUP_UNITS, UNITS, WINDOW_AT_ONCE, MORE_WINDOW,
        )  # fmt: skip
    else:
        mixed = add_parts(
            part_maximum, part_total, part_o, place + first_chosen, exists, chosen,
            V, V_PAD, ROWS, GROUP_UNITS, UNITS, CHOSEN_AT_ONCE, MORE_CHOSEN,
        )  # fmt: skip
        if GATED:
            mixed *= tl.load(gate + gate_branch_stride, mask=exists, other=0.0).to(tl.float32)[:, None]
            o_cmp = add_parts(
                part_maximum, part_total, part_o, place, exists, compressed,
                V, V_PAD, ROWS, GROUP_UNITS, COMPRESSED_UNITS, COMPRESSED_AT_ONCE, MORE_COMPRESSED,
            )  # fmt: skip
            # Said so, every compiled code rounds the same way.
            mixed = tl.fma(o_cmp, tl.load(gate, mask=exists, other=0.0).to(tl.float32)[:, None], mixed)
            if WINDOW:
                o_win = add_parts(
                    part_maximum, part_total, part_o, place + first_window, exists, window,
                    V, V_PAD, ROWS, GROUP_UNITS, UNITS, WINDOW_AT_ONCE, MORE_WINDOW,
                )  # fmt: skip
                gate_win = tl.load(gate + 2 * gate_branch_stride, mask=exists, other=0.0).to(tl.float32)
                mixed = tl.fma(o_win, gate_win[:, None], mixed)
    return mixed


@triton.jit
def store_o(o, row, in_o, values, V: tl.constexpr, V_PAD: tl.constexpr):
    """Write o of some heads of one token; `row` counts heads, [B, T, H]."""
    column = tl.arange(0, V_PAD)
    tl.store(
        o + row[:, None] * V + column[None, :], values.to(o.dtype.element_ty),
        mask=in_o[:, None] & (column < V)[None, :],
    )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["num_parts"])
def decode_combine_kernel(
    part_maximum, part_total, part_o, o, lengths, num_new, num_parts,
    NEW: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, UNIT_KEYS: tl.constexpr,
    GROUP_UNITS: tl.constexpr, UNITS: tl.constexpr, AT_ONCE: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """o of one tile of heads of one token in dense attention; zero where the sequence has no such token."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    length, new = tl.load(lengths + batch), tl.load(num_new + batch)
    num_keys = length + new
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_o = head < HEADS
    row = (batch * NEW + token) * HEADS + head
    count = tl.where(token < new, tl.cdiv(num_keys, UNITS * dense_unit(num_keys, UNIT_KEYS)), 0)
    whole_o = add_parts(
        part_maximum, part_total, part_o, row * num_parts, in_o & (token < new), count,
        V, V_PAD, ROWS, GROUP_UNITS, UNITS, AT_ONCE, MORE,
    )  # fmt: skip
    store_o(o, row, in_o, whole_o, V, V_PAD)
