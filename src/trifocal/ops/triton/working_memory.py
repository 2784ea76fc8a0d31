"""Buffers of the kernels besides their inputs and results, by formula: the bytes that their launchers allocate.

They are freed before the launcher returns, so only the largest counts. These grow with the number of tokens: in the
block-major order the index of the choice and partial results, the latter up to `dispatch.SELECTED_BUFFER_BYTES`; the
importance of blocks, up to `dispatch.IMPORTANCE_BUFFER_BYTES`; in the other orders bits of the choice and, where
programs are few, d_k and d_v in parts.
"""

import torch

from trifocal.ops import dispatch
from trifocal.ops.geometry import Geometry
from trifocal.ops.triton.choice_index import parts_of_block
from trifocal.ops.triton.scoring import LINE
from trifocal.ops.triton.selected_forward import LARGEST_BLOCK, rows_of_chunk
from trifocal.ops.triton.tiles import cdiv

_FP32, _INT32, _INT64 = 4, 4, 8
# An H100's and H200's; with fewer, sums are kept in fewer parts.
MULTIPROCESSORS = 132


def forward_working_bytes(
    geometry: Geometry, batch: int, length: int, heads: int, groups: int, dim: int, value_dim: int, item: int
) -> int:
    """Most that a stage of the forward pass allocates for itself.

    Args:
        geometry: Block sizes, in tokens.
        batch: B.
        length: Queries and keys of a batch entry, T.
        heads: H.
        groups: G.
        dim: D.
        value_dim: V.
        item: Bytes of a number of q, k and v.
    """
    lines = cdiv(geometry.num_selection_blocks(length), LINE.value)
    row = 2 * _FP32 * batch * groups * lines * LINE.value
    scored = geometry.num_selection_blocks(length) > geometry.num_selected_blocks
    importance = min(length * row, dispatch.IMPORTANCE_BUFFER_BYTES) if scored else 0
    choice = _Choice(geometry, batch, length, groups)
    if not choice.is_block_major():
        return max(importance, choice.bits)
    slots = choice.slots_of_chunk(heads // groups * value_dim * item)
    partial = slots * heads // groups * (value_dim * item + _FP32)
    return max(importance, choice.sorting, choice.index + partial)


def backward_working_bytes(
    geometry: Geometry, batch: int, length: int, heads: int, groups: int, dim: int, value_dim: int, item: int
) -> int:
    """Most that a stage of the backward pass allocates for itself; arguments as in `forward_working_bytes`."""
    choice = _Choice(geometry, batch, length, groups)
    numbers = _FP32 * batch * length * heads
    q_per_kv = heads // groups
    if not choice.is_block_major(backward=True):
        parts = cdiv(length, dispatch.masked_part_queries(length, q_per_kv, choice.keys, MULTIPROCESSORS))
        sums = parts * _FP32 * batch * length * groups * (dim + value_dim) if parts > 1 else 0
        return numbers + choice.bits + sums
    dtype = torch.float32 if item == _FP32 else torch.bfloat16
    item = dispatch.partial_d_q_type(dtype, choice.num_selected, on_hopper=False).itemsize
    slots = choice.slots_of_chunk(q_per_kv * dim * item)
    piece = dispatch.fewest_piece_slots(dtype, q_per_kv, dim, value_dim)
    pieces = choice.pieces_of_chunk(slots, piece)
    partial = slots * q_per_kv * dim * item + pieces * choice.block * _FP32 * (dim + value_dim)
    chunks = cdiv(choice.num_slots, slots)
    if chunks > 1:
        # Sums of d_k and d_v over the chunks.
        partial += choice.keys * choice.block * _FP32 * (dim + value_dim)
    return numbers + max(choice.sorting, choice.index + _INT32 * chunks * pieces + partial)


class _Choice:
    """Sizes of the choice as selected attention sees it: in blocks of at most `LARGEST_BLOCK` tokens."""

    def __init__(self, geometry: Geometry, batch: int, length: int, groups: int) -> None:
        parts = parts_of_block(geometry.selection_block_size, LARGEST_BLOCK)
        self.block = geometry.selection_block_size // parts
        self.num_selected = geometry.num_selected_blocks * parts
        self.rows, self.row_slots = batch * length, groups * self.num_selected
        self.num_slots = self.rows * self.row_slots
        num_blocks = cdiv(length, self.block)
        self.keys = batch * groups * num_blocks
        self.length = length
        self.bits = _INT32 * self.rows * groups * cdiv(num_blocks, 32)

    def is_block_major(self, backward: bool = False) -> bool:
        """Whether the order is block-major."""
        return (
            dispatch.selected_order(self.length, self.length, self.num_selected, self.block, backward=backward)
            == "block_major"
        )

    @property
    def index(self) -> int:
        """Keys and sorted slots."""
        return (_INT32 + _INT64) * self.num_slots

    @property
    def sorting(self) -> int:
        """Keys before and after, slots before and after, and as much again for the sort itself."""
        return (2 * _INT32 + 2 * _INT64 + _INT32 + _INT64) * self.num_slots

    def slots_of_chunk(self, bytes_of_slot: int) -> int:
        """Slots whose partial results exist at a time."""
        return rows_of_chunk(self.row_slots * bytes_of_slot, self.rows) * self.row_slots

    def pieces_of_chunk(self, slots_of_chunk: int, piece: int) -> int:
        """Most pieces into which the slots of a chunk's keys are cut."""
        return min(self.keys, slots_of_chunk) + slots_of_chunk // piece
