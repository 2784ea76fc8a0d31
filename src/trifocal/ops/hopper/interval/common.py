"""Shared by the Hopper versions of `interval.forward` and `interval.d_q`: row and key tiles, barriers, the loader."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trifocal.ops.hopper.common import PART_ROWS, allocate_barriers, copy_tile, tma_load
from trifocal.ops.triton.interval.common import full_tiles, visible_keys

# Tiles of keys, and of values, in shared memory.
STAGES = gl.constexpr(2)

# fmt: off

@gluon.jit
def place_tile(
    slot, masks, counts,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, KEYS: gl.constexpr,
):
    """Batch, group and first query of the slot-th tile of rows; its first key and key tiles: how many, which are full.
    """
    slots, row_tiles, batch_groups, num_queries = counts
    QUERIES: gl.constexpr = 2 * PART_ROWS // Q_PER_KV
    first_query = (row_tiles - 1 - slot // batch_groups) * QUERIES
    batch = (slot % batch_groups) // GROUPS
    group = slot % GROUPS
    last_query = gl.minimum(first_query + QUERIES, num_queries) - 1
    begin, full_end = visible_keys(first_query, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    full_begin, end = visible_keys(last_query, masks, COMPRESSED, BLOCK, STRIDE, PACKED)
    tiles, first_full, last_full = full_tiles(begin, end, full_begin, full_end, KEYS)
    return batch, group, first_query, (begin, gl.maximum(tiles, 1), first_full, last_full)


@gluon.jit
def first_key_of(number, key_tiles, KEYS: gl.constexpr):
    """First key of the number-th key tile of `place_tile`: those that need a mask come first."""
    begin, tiles, first_full, last_full = key_tiles
    masked = tiles - (last_full - first_full)
    place = number
    if number >= masked:
        place = number - masked + first_full
    elif number >= first_full:
        place = number - first_full + last_full
    return begin + place * KEYS


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """Barriers of a loader and two row parts: of q, k and v, that a buffer is filled, and that its readers are done.

    Each part has its own queries; keys and values are read by both.
    """
    return allocate_barriers(2, (1, 1)) + allocate_barriers(STAGES, (1, 2, 1, 2))


@gluon.jit
def load_tiles(
    descriptors, buffers, barriers, masks, counts,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, COMPRESSED: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    PACKED: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, KEYS: gl.constexpr,
    SHARE: gl.constexpr, BACKWARD: gl.constexpr,
):
    """The loader: k of the first tile, q and, in backward, d_o, then v and k by turns."""
    q_sources, k_sources, v_source = descriptors[0], descriptors[1], descriptors[2]
    q_tiles, k_tiles, v_tiles = buffers[0], buffers[1], buffers[2]
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    QUERIES: gl.constexpr = PART_ROWS // Q_PER_KV
    Q_BYTES: gl.constexpr = PART_ROWS * (D_1 + D_2) * 2
    K_BYTES: gl.constexpr = KEYS * (D_1 + D_2) * 2
    count = 0
    visit = 0
    for slot in range(gl.program_id(0), counts[0], gl.num_programs(0)):
        batch, group, first_query, key_tiles = place_tile(
            slot, masks, counts, GROUPS, Q_PER_KV, COMPRESSED, BLOCK, STRIDE, PACKED, KEYS)
        for number in range(key_tiles[1]):
            first_key = first_key_of(number, key_tiles, KEYS)
            stage = count % STAGES
            free = (count // STAGES & 1) ^ 1
            mbarrier.wait(k_free.index(stage), free)
            mbarrier.expect(k_ready.index(stage), K_BYTES)
            copy_tile(k_sources, batch, first_key, group // SHARE, k_ready.index(stage), k_tiles, stage, D_1, D_2)
            if number == 0:
                for part in gl.static_range(2):
                    query = first_query + part * QUERIES
                    ready = q_ready.index(part)
                    mbarrier.wait(q_free.index(part), (visit & 1) ^ 1)
                    if BACKWARD:
                        mbarrier.expect(ready, Q_BYTES + descriptors[3].block_type.nbytes)
                    else:
                        mbarrier.expect(ready, Q_BYTES)
                    copy_tile(q_sources, batch, query, group * Q_PER_KV, ready, q_tiles, part, D_1, D_2)
                    if BACKWARD:
                        tma_load(descriptors[3], [batch, query, group * Q_PER_KV, 0], ready, buffers[3].index(part))
            mbarrier.wait(v_free.index(stage), free)
            mbarrier.expect(v_ready.index(stage), v_source.block_type.nbytes)
            tma_load(v_source, [batch, first_key, group // SHARE, 0], v_ready.index(stage), v_tiles.index(stage))
            count += 1
        visit += 1


@gluon.jit
def store_rows(
    target, values, rows_left, GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, SIZE: gl.constexpr, COLUMNS: gl.constexpr,
    ADD: gl.constexpr, LAYOUT: gl.constexpr,
):
    """Store COLUMNS of the rows of a part of a tile, as many as are left; with ADD, added to the old values."""
    row = gl.arange(0, PART_ROWS, gl.SliceLayout(1, LAYOUT))
    place = ((row // Q_PER_KV) * (GROUPS * Q_PER_KV) + row % Q_PER_KV) * SIZE
    pointers = target + place[:, None] + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    keep = (row < rows_left)[:, None]
    if ADD:
        values += gl.load(pointers, mask=keep, other=0.0).to(gl.float32)
    gl.store(pointers, values.to(target.dtype.element_ty), mask=keep)

# fmt: on
