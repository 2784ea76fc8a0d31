"""The importance kernel of scoring for Hopper, in Gluon; `triton.scoring` explains its task.

With 128 columns the exponentials of a tile take as long as its products, so the two must run side by side. Two parts of
four warps have 128 keys each: scores of the next head while this head's become exponentials. A loader, one warp, starts
the copies (TMA) of keys, and of q head after head. A program stays on its multiprocessor and takes one unit after the
other, those with the longest past first: a batch entry and group, 256 keys, and enough tiles of queries that copies of
keys are few beside those of q.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from trifocal.ops import devices
from trifocal.ops.geometry import Geometry
from trifocal.ops.hopper.common import allocate_barriers, allocate_tiles, copy_tile, multiply, part_descriptors
from trifocal.ops.tiles import cdiv, split_width
from trifocal.ops.triton.common import LOG2_E_KERNEL, strides
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import LINE, Chunk

QUERIES = gl.constexpr(64)
# Compressed keys of one part of a program.
KEYS = gl.constexpr(128)
# Tiles of q in shared memory.
STAGES = gl.constexpr(4)

# fmt: off

@gluon.jit
def parts_reached(
    last_query, query_shift, pair, SELECTION: gl.constexpr, NUM_SELECTED: gl.constexpr, BLOCKS: gl.constexpr,
):
    """How many of a pair's key tiles hold candidates of queries up to the last: none where all may be taken."""
    candidates = (last_query + query_shift) // SELECTION + 1
    reached = gl.minimum(gl.maximum((candidates + BLOCKS - 1) // BLOCKS - 2 * pair, 0), 2)
    return gl.where(candidates > NUM_SELECTED, reached, 0)


@gluon.jit
def steps_of_program(units, STACK: gl.constexpr):
    """Tiles of queries that fall to this program: those of every unit that a multiple of the programs lies behind."""
    return (units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * STACK


@gluon.jit
def place_tile(
    step, counts, GROUPS: gl.constexpr, SELECTION: gl.constexpr, NUM_SELECTED: gl.constexpr, BLOCKS: gl.constexpr,
    STACK: gl.constexpr,
):
    """Batch, group, first query and pair of key tiles of a step; how many of the pair these queries reach, and how
    many any queries of the unit's stack reach. The last queries come first."""
    units, stacks, pairs, batch_groups, first_query, end_query, query_shift = counts
    unit = gl.program_id(0) + step // STACK * gl.num_programs(0)
    stack_query = first_query + (stacks - 1 - unit // (pairs * batch_groups)) * (STACK * QUERIES)
    pair = unit // batch_groups % pairs
    batch = unit % batch_groups // GROUPS
    group = unit % GROUPS
    query = stack_query + step % STACK * QUERIES
    last_query = gl.minimum(query + QUERIES, end_query) - 1
    reached = parts_reached(last_query, query_shift, pair, SELECTION, NUM_SELECTED, BLOCKS)
    # Behind the last query a stack may have empty tiles.
    reached = gl.where(query < end_query, reached, 0)
    last_query = gl.minimum(stack_query + STACK * QUERIES, end_query) - 1
    most = parts_reached(last_query, query_shift, pair, SELECTION, NUM_SELECTED, BLOCKS)
    return batch, group, query, pair, reached, most


@gluon.jit
def load_scoring(
    descriptors, buffers, barriers, counts,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, SELECTION: gl.constexpr,
    NUM_SELECTED: gl.constexpr, BLOCKS: gl.constexpr, STACK: gl.constexpr, K_STAGES: gl.constexpr,
):
    """The loader: k of the first part, one tile of q, k of the second part, the other tiles of q."""
    q_sources, k_sources = descriptors
    q_tiles, k_tiles = buffers
    q_ready, q_free, k_ready, k_free = barriers
    Q_BYTES: gl.constexpr = QUERIES * (D_1 + D_2) * 2
    K_BYTES: gl.constexpr = KEYS * (D_1 + D_2) * 2
    count = 0
    k_count_0 = 0
    k_count_1 = 0
    second = False
    for step in range(steps_of_program(counts[0], STACK)):
        batch, group, query, pair, reached, most = place_tile(
            step, counts, GROUPS, SELECTION, NUM_SELECTED, BLOCKS, STACK)
        first_key = pair * (2 * KEYS)
        if step % STACK == 0:
            second = most > 1
            if most > 0:
                place = k_count_0 % K_STAGES
                mbarrier.wait(k_free.index(place), (k_count_0 // K_STAGES & 1) ^ 1)
                mbarrier.expect(k_ready.index(place), K_BYTES)
                copy_tile(k_sources, batch, first_key, group, k_ready.index(place), k_tiles, place, D_1, D_2)
                k_count_0 += 1
        for head in range(gl.where(reached > 0, Q_PER_KV, 0)):
            stage = count % STAGES
            mbarrier.wait(q_free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(q_ready.index(stage), Q_BYTES)
            copy_tile(q_sources, batch, query, group * Q_PER_KV + head, q_ready.index(stage), q_tiles, stage, D_1, D_2)
            count += 1
            if second:
                place = K_STAGES + k_count_1 % K_STAGES
                mbarrier.wait(k_free.index(place), (k_count_1 // K_STAGES & 1) ^ 1)
                mbarrier.expect(k_ready.index(place), K_BYTES)
                copy_tile(k_sources, batch, first_key + KEYS, group, k_ready.index(place), k_tiles, place, D_1, D_2)
                k_count_1 += 1
                second = False


@gluon.jit
def settle(y):
    """Let no later statement of the program start before all of y, which is not negative, is computed.

    The assembler moves a wait for products in front of exponentials that should run beside them. It moves nothing
    across a fence. This fence is never executed, since no number is negative.
    """
    bits = gl.reshape(y.to(gl.int32, bitcast=True), [QUERIES, y.shape[1] // 8, 4, 2])
    # Both axes lie within threads.
    bits = gl.reduce_or(gl.reduce_or(bits, 3), 1)
    gl.inline_asm_elementwise(
        "{ .reg .pred negative; setp.lt.s32 negative, $1, 0; @negative membar.cta; mov.b32 $0, $1; }",
        "=r,r", [bits], gl.int32, False, 1)


@gluon.jit
def add_head(p, scores, lse_of_head, score_scale):
    """Add the probabilities of one head, before any later statement of the program."""
    probabilities = gl.exp2(scores * score_scale - (lse_of_head * LOG2_E_KERNEL)[:, None])
    settle(probabilities)
    return p + probabilities


@gluon.jit
def await_q(q_ready, count):
    """Wait for the count-th tile of q.

    The wait is a branch: all products before it have been issued. So it comes behind a product and before the
    exponentials, one tile ahead of its use.
    """
    mbarrier.wait(q_ready.index(count % STAGES), count // STAGES & 1)


@gluon.jit
def multiply_head(q_tiles, k_tiles, k_place, count, D_1: gl.constexpr, D_2: gl.constexpr, SCORES: gl.constexpr):
    """Begin the scores of the count-th tile of q, which has arrived."""
    zeros = gl.zeros([QUERIES, KEYS], gl.float32, SCORES)
    return multiply(q_tiles, count % STAGES, k_tiles, k_place, zeros, QUERIES, KEYS, D_1, D_2)


@gluon.jit
def finish_head(scores, q_free, count):
    """The scores of the count-th tile of q; gives its buffer back."""
    scores = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(q_free.index(count % STAGES), count=1)
    return scores


@gluon.jit
def store_importance(
    p, direct, overflow, place, first_block, num_blocks, row_stride, rows_left,
    COMPRESSION: gl.constexpr, STRIDE: gl.constexpr, SELECTION: gl.constexpr, TAPS: gl.constexpr,
):
    """Sum the probabilities of compressed blocks by selection block and store both parts of the importance."""
    BLOCKS: gl.constexpr = KEYS // TAPS
    WIDE: gl.constexpr = min(BLOCKS, 32)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WIDE, WIDE], [4, 1], [1, 0])
    tap = gl.arange(0, KEYS, gl.SliceLayout(0, p.type.layout)) % TAPS
    direct_weight = gl.minimum(COMPRESSION, SELECTION - tap * STRIDE).to(gl.float32) / STRIDE
    row = gl.arange(0, QUERIES, gl.SliceLayout(1, OUT))
    block = first_block + gl.arange(0, BLOCKS, gl.SliceLayout(0, OUT))
    offsets = place + row[:, None] * row_stride + block[None, :]
    exists = (row < rows_left)[:, None]
    direct_sum = gl.sum(gl.reshape(p * direct_weight[None, :], [QUERIES, BLOCKS, TAPS]), 2)
    gl.store(direct + offsets, gl.convert_layout(direct_sum, OUT), mask=exists & (block < num_blocks)[None, :])
    if COMPRESSION > STRIDE:
        overflow_weight = COMPRESSION / STRIDE - direct_weight
        overflow_sum = gl.sum(gl.reshape(p * overflow_weight[None, :], [QUERIES, BLOCKS, TAPS]), 2)
        keep = exists & (block + 1 < num_blocks)[None, :]
        gl.store(overflow + offsets + 1, gl.convert_layout(overflow_sum, OUT), mask=keep)


@gluon.jit
def score_keys(
    PART: gl.constexpr, direct, overflow, lse, lse_strides, buffers, barriers, counts, num_blocks, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, COMPRESSION: gl.constexpr,
    STRIDE: gl.constexpr, SELECTION: gl.constexpr, NUM_SELECTED: gl.constexpr, TAPS: gl.constexpr, STACK: gl.constexpr,
    K_STAGES: gl.constexpr,
):
    """Importance of one half of the selection blocks of each unit."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    BLOCKS: gl.constexpr = KEYS // TAPS
    q_tiles, k_tiles = buffers
    q_ready, q_free, k_ready, k_free = barriers
    units, stacks, pairs, batch_groups, first_query, end_query, query_shift = counts
    lse_batch_stride, lse_time_stride, lse_head_stride = lse_strides
    row = gl.arange(0, QUERIES, gl.SliceLayout(1, SCORES))
    count = 0
    k_count = 0
    for step in range(steps_of_program(counts[0], STACK)):
        batch, group, query, pair, reached, _most = place_tile(
            step, counts, GROUPS, SELECTION, NUM_SELECTED, BLOCKS, STACK)
        k_place = PART * K_STAGES + k_count % K_STAGES
        if reached > PART:
            # Once a unit it waits, then the barrier stays where it is.
            mbarrier.wait(k_ready.index(k_place), k_count // K_STAGES & 1)
            exists = query + row < end_query
            lse_head = lse + batch.to(gl.int64) * lse_batch_stride + group * Q_PER_KV * lse_head_stride
            lse_row = lse_head + (query + row).to(gl.int64) * lse_time_stride
            p = gl.zeros([QUERIES, KEYS], gl.float32, SCORES)
            await_q(q_ready, count)
            scores = multiply_head(q_tiles, k_tiles, k_place, count, D_1, D_2, SCORES)
            await_q(q_ready, count + 1)
            lse_1 = gl.load(lse_row, mask=exists, other=0.0)
            lse_2 = gl.load(lse_row + lse_head_stride, mask=exists, other=0.0)
            for head in range(2, Q_PER_KV, 2):
                scores = finish_head(scores, q_free, count)
                scores_2 = multiply_head(q_tiles, k_tiles, k_place, count + 1, D_1, D_2, SCORES)
                await_q(q_ready, count + 2)
                p = add_head(p, scores, lse_1, score_scale)
                lse_1 = gl.load(lse_row + head * lse_head_stride, mask=exists, other=0.0)
                scores_2 = finish_head(scores_2, q_free, count + 1)
                scores = multiply_head(q_tiles, k_tiles, k_place, count + 2, D_1, D_2, SCORES)
                await_q(q_ready, count + 3)
                p = add_head(p, scores_2, lse_2, score_scale)
                lse_2 = gl.load(lse_row + (head + 1) * lse_head_stride, mask=exists, other=0.0)
                count += 2
            scores = finish_head(scores, q_free, count)
            scores_2 = multiply_head(q_tiles, k_tiles, k_place, count + 1, D_1, D_2, SCORES)
            p = add_head(p, scores, lse_1, score_scale)
            scores_2 = finish_head(scores_2, q_free, count + 1)
            # The last of the unit's tiles, which reaches as far as any of them.
            if (step % STACK == STACK - 1) | (query + QUERIES >= end_query):
                mbarrier.arrive(k_free.index(k_place), count=1)
                k_count += 1
            p = add_head(p, scores_2, lse_2, score_scale)
            count += 2
            # The mask is the same for every head. Whole tiles in the past need none.
            first_key = (2 * pair + PART) * KEYS
            if (first_key + KEYS - 1) * STRIDE + (COMPRESSION - 1) > query + query_shift:
                key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
                position = query + query_shift + row
                p = gl.where((key * STRIDE + (COMPRESSION - 1))[None, :] <= position[:, None], p, 0.0)
            place = (batch.to(gl.int64) * (end_query - first_query) + (query - first_query)) * GROUPS + group
            store_importance(
                p, direct, overflow, place * num_blocks, (2 * pair + PART) * BLOCKS, num_blocks, GROUPS * num_blocks,
                end_query - query, COMPRESSION, STRIDE, SELECTION, TAPS)
        else:
            for _ in range(gl.where(reached > 0, Q_PER_KV, 0)):
                await_q(q_ready, count)
                mbarrier.arrive(q_free.index(count % STAGES), count=1)
                count += 1


@Kernel
@gluon.jit(do_not_specialize=[
    "units", "stacks", "pairs", "batch_groups", "first_query", "end_query", "query_shift", "block_lines",
])
def importance_hopper_kernel(
    q_source, q_source_2, k_source, k_source_2, lse, direct, overflow,
    lse_batch_stride, lse_time_stride, lse_head_stride,
    units, stacks, pairs, batch_groups, first_query, end_query, query_shift, block_lines, score_scale,
    GROUPS: gl.constexpr, Q_PER_KV: gl.constexpr, D_1: gl.constexpr, D_2: gl.constexpr, COMPRESSION: gl.constexpr,
    STRIDE: gl.constexpr, SELECTION: gl.constexpr, NUM_SELECTED: gl.constexpr, TAPS: gl.constexpr, STACK: gl.constexpr,
    K_STAGES: gl.constexpr,
):
    """`direct` and `overflow`, as `scoring.importance_kernel` writes them, of every unit that falls to this program."""
    q_tiles = allocate_tiles(q_source, q_source_2, STAGES, D_2)
    buffers = (q_tiles, allocate_tiles(k_source, k_source_2, 2 * K_STAGES, D_2))
    # Ready and free: q's buffers are read by both parts, each of k's by one.
    barriers = allocate_barriers(STAGES, (1, 2)) + allocate_barriers(2 * K_STAGES, (1, 1))
    lse_strides = (lse_batch_stride, lse_time_stride, lse_head_stride)
    counts = (units, stacks, pairs, batch_groups, first_query, end_query, query_shift)
    descriptors = ((q_source, q_source_2), (k_source, k_source_2))
    num_blocks = block_lines * LINE
    gl.warp_specialize([
        (score_keys, (0, direct, overflow, lse, lse_strides, buffers, barriers, counts, num_blocks, score_scale,
                      GROUPS, Q_PER_KV, D_1, D_2, COMPRESSION, STRIDE, SELECTION, NUM_SELECTED, TAPS, STACK, K_STAGES)),
        (score_keys, (1, direct, overflow, lse, lse_strides, buffers, barriers, counts, num_blocks, score_scale,
                      GROUPS, Q_PER_KV, D_1, D_2, COMPRESSION, STRIDE, SELECTION, NUM_SELECTED, TAPS, STACK, K_STAGES)),
        (load_scoring, (descriptors, buffers, barriers, counts,
                        GROUPS, Q_PER_KV, D_1, D_2, SELECTION, NUM_SELECTED, KEYS // TAPS, STACK, K_STAGES)),
    ], [4, 1], [240, 24])

# fmt: on


def launch_importance(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    direct: Tensor,
    overflow: Tensor,
    geometry: Geometry,
    chunk: Chunk,
    score_scale: float,
    k_stages: int,
    stack: int,
) -> None:
    """Write the importance of a chunk's blocks into buffers as in `launch_choice`; `score_scale` is in base 2."""
    first_query, end_query, query_shift, reachable, block_lines = chunk
    batch, groups = q.shape[0], k_cmp.shape[2]
    width = split_width(q.shape[3])
    taps = geometry.selection_block_size // geometry.compression_stride
    stacks = cdiv(end_query - first_query, stack * QUERIES.value)
    pairs = cdiv(reachable * taps, 2 * KEYS.value)
    units = stacks * pairs * batch * groups
    importance_hopper_kernel[(min(units, devices.multiprocessors(q.device)),)](
        *part_descriptors(q, QUERIES.value, 1, width), *part_descriptors(k_cmp, KEYS.value, 1, width), lse, direct,
        overflow, *strides(lse), units, stacks, pairs, batch * groups, first_query, end_query, query_shift, block_lines,
        score_scale, groups, q.shape[2] // groups, width.part_1, width.part_2, geometry.compression_block_size,
        geometry.compression_stride, geometry.selection_block_size, geometry.num_selected_blocks, taps, STACK=stack,
        K_STAGES=k_stages, num_warps=4, maxnreg=168,
    )  # fmt: skip
