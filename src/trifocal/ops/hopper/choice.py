"""The choice kernel of scoring in Gluon; see `triton.scoring` for its task.

The portable kernel is bound by instructions, 4,600 for a row of 1,024 blocks: half of them count, scan and store a row
with neighbouring blocks in different lanes. Here a warp holds one row so that every lane has consecutive blocks:
ranks are sums within a lane and one scan over 32 of them, and the row's own figures are numbers, not vectors.

From memory, per row: importance in, in whole vectors (laid out anew in shared memory); the choice out.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trifocal.ops.geometry import Geometry
from trifocal.ops.tiles import next_power_of_2
from trifocal.ops.triton.launch import Kernel
from trifocal.ops.triton.scoring import INFINITY_BITS, LINE, Chunk

# In bits of fp32, a factor of two.
OCTAVE = gl.constexpr(1 << 23)
LONGEST_LEAP = gl.constexpr(1 << 30)
# Each lane loads whole vectors.
FEWEST_BLOCKS = 128

# fmt: off

@gluon.jit
def add(a, b):
    """The sum, for scans."""
    return a + b


@Kernel
@gluon.jit(do_not_specialize=["first_query", "end_query", "num_queries", "query_shift", "block_lines"])
def choice_hopper_kernel(
    direct, overflow, selected_blocks, first_query, end_query, num_queries, query_shift, block_lines,
    GROUPS: gl.constexpr, COMPRESSION: gl.constexpr, STRIDE: gl.constexpr, SELECTION: gl.constexpr,
    NUM_SELECTED: gl.constexpr, NUM_SELECTED_PAD: gl.constexpr, INITIAL: gl.constexpr, LOCAL: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """The choice of one row (batch, query of the chunk, group) from the importance of all its blocks."""
    LOADED: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    HELD: gl.constexpr = gl.BlockedLayout([BLOCKS // 32], [32], [1], [0])
    PADS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_blocks = block_lines * LINE
    row = gl.program_id(0)
    chunk_queries = end_query - first_query
    query = first_query + row // GROUPS % chunk_queries
    candidates = (query + query_shift) // SELECTION + 1
    total = gl.minimum(candidates, NUM_SELECTED)
    num_forced = gl.minimum(candidates, INITIAL + LOCAL)
    wanted = total - num_forced

    # Whole lines are read; numbers that no tile wrote are dropped before they are used.
    column = gl.arange(0, BLOCKS, LOADED)
    place = row.to(gl.int64) * num_blocks
    needed = (column // LINE < (candidates + LINE - 1) // LINE) & (candidates > NUM_SELECTED)
    importance = gl.load(direct + place + column, mask=needed, other=0.0)
    if COMPRESSION > STRIDE:
        importance += gl.where(column > 0, gl.load(overflow + place + column, mask=needed, other=0.0), 0.0)
    importance = gl.convert_layout(importance, HELD)

    block = gl.arange(0, BLOCKS, HELD)
    is_candidate = block < candidates
    forced = is_candidate & ((block < INITIAL) | (block >= candidates - LOCAL))
    free = is_candidate & (forced == 0)
    bits = gl.minimum(gl.maximum(importance.to(gl.int32, bitcast=True), 0), INFINITY_BITS)
    bits = gl.where(free, bits, -1)

    # Invariant: `reach` blocks, at least `wanted`, reach `low`; fewer reach `high`, or none is wanted. The wanted ones
    # are seldom far below the largest: leaps of growing length down from it, until one goes too far; then halving.
    low = gl.to_tensor(0)
    leap = gl.to_tensor(OCTAVE)
    high = gl.max(bits, 0) + 1
    reach = candidates - num_forced
    while (reach > wanted) & (high - low > 1):
        # The middle lies strictly between low and high, so every step narrows the search.
        middle = gl.maximum(low + (high - low) // 2, high - leap)
        leap = gl.minimum(leap, LONGEST_LEAP // 4) * 4
        # The sign of the difference, one number less for each block that does not reach the middle.
        counted = BLOCKS + gl.sum((bits - middle) >> 31, 0)
        enough = counted >= wanted
        low = gl.where(enough, middle, low)
        reach = gl.where(enough, counted, reach)
        high = gl.where(enough, high, middle)
    taken = (bits >= low).to(gl.int32)
    # Almost always all that reach the threshold are wanted; of more, the lower ones of those equal to it are left out.
    if reach > wanted:
        above = (bits > low).to(gl.int32)
        equal = (bits == low).to(gl.int32)
        rank = gl.associative_scan(equal, 0, add)
        taken = above | gl.where(rank <= wanted - gl.sum(above, 0), equal, 0)
    chosen = taken | forced.to(gl.int32)
    slot = gl.associative_scan(chosen, 0, add) - 1
    # Rows of all chunks: [B, T, G].
    batch = row // GROUPS // chunk_queries
    out = selected_blocks + ((batch * num_queries + query).to(gl.int64) * GROUPS + row % GROUPS) * NUM_SELECTED
    gl.store(out + slot, block, mask=chosen != 0)
    if total < NUM_SELECTED:
        pad = gl.arange(0, NUM_SELECTED_PAD, PADS)
        gl.store(out + pad, gl.full([NUM_SELECTED_PAD], -1, gl.int32, PADS), mask=(pad >= total) & (pad < NUM_SELECTED))

# fmt: on


def launch_choice(direct: Tensor, overflow: Tensor, selected_blocks: Tensor, geometry: Geometry, chunk: Chunk) -> None:
    """Write the choice of a chunk's queries into `selected_blocks` [B, T, G, N], from both parts of the importance."""
    first_query, end_query, query_shift, reachable, block_lines = chunk
    batch, num_queries, groups, num_selected = selected_blocks.shape
    choice_hopper_kernel[(batch * (end_query - first_query) * groups,)](
        direct, overflow, selected_blocks, first_query, end_query, num_queries, query_shift, block_lines, groups,
        geometry.compression_block_size, geometry.compression_stride, geometry.selection_block_size, num_selected,
        max(32, next_power_of_2(num_selected)), geometry.num_initial_blocks, geometry.num_local_blocks,
        max(FEWEST_BLOCKS, next_power_of_2(reachable)), num_warps=1,
    )  # fmt: skip
