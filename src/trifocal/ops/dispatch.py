"""The rules that choose the code: the backend of a call and, on the kernels, the kernel that runs each stage.

Everything is decided before it runs, by device, types, shapes and strides. `auto` takes the kernels for tensors on a
CUDA device that they support (`ops.support.unsupported_reason`), the reference for all others. Every stage has a
portable kernel in `triton/`, and some have one in `hopper/` under the same file name; sizes of tiles are in `tiles.py`.
To try another kernel or configuration, change a rule and run `benchmarks/kernels.py`. Importing this module imports no
Triton.
"""

import importlib
import importlib.util
import math
from collections import Counter
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from trifocal.ops import devices, tiles
from trifocal.ops.geometry import Geometry
from trifocal.ops.support import unsupported_reason
from trifocal.ops.tiles import cdiv

Backend = Literal["auto", "reference", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "triton")

# Bytes of partial results of selected attention, of small groups, that are kept at a time, and of importance.
SELECTED_BUFFER_BYTES = 2**31
# Bytes of one group's queries that are gathered before later ones: with its partial results they pass through the
# second-level cache. Slots of a block among them, on average, beside which its keys and values are little.
SELECTED_CACHED_BYTES = 2**23
FEWEST_SLOTS_OF_A_BLOCK = 32
IMPORTANCE_BUFFER_BYTES = 2**28
# Up to this many times the blocks of a choice, going through all of them is cheaper than sorting out the chosen. Up to
# more in backward of packed documents, most of which are shorter than the longest, and in forward of small groups.
MASKED_UP_TO = 2
MASKED_LONGER_UP_TO = 4
# With fewer queries than this for a block, on average, there is nothing to gain from holding the block.
FEWEST_QUERIES_PER_BLOCK = 2
# Neighbours together choose more the more blocks there are, and a tile of fewer heads a group has more of them: heads
# from which on tiles serve, and up to how many times the blocks of a choice, forward and backward.
FEWEST_HEADS_OF_TILES = 8
TILES_UP_TO = ((FEWEST_HEADS_OF_TILES, math.inf, math.inf), (5, 16, 16), (3, 8, 0))
# A slot of fewer rows cannot be copied into a tile by itself.
FEWEST_HEADS_OF_WARP_SPECIALIZED = 8
# Programs a multiprocessor, at most, that the masked order's d_k, d_v makes of few blocks by cutting their rows into
# parts; with more than half as many blocks, rows stay together. As measured on an H200.
ENOUGH_PROGRAMS = 12
# Rows of a part: 16 tiles, beside which loading a block and storing its sums is little.
FEWEST_ROWS_OF_A_PART = 1024
# Programs a multiprocessor from which on the Hopper kernel for the window's d_k and d_v runs.
FEWEST_PROGRAMS_OF_WINDOW_DKDV = 0.75
# As the bytes above, of the queries and gradients that d_k and d_v gather: a chunk's parts are summed before the next.
GATHERED_BYTES = 2**27
# Queries, of all batch entries, up to which the portable importance kernel runs on Hopper too: up to there the other
# gains nothing on an H200 (0.108 ms instead of 0.109 at shape B), while its descriptors cost the host 0.1 ms.
MAX_QUERIES_OF_PORTABLE_IMPORTANCE = 8192
# Programs a multiprocessor from which on a program of decoding takes a group of units; most that share the parts of a
# sequence.
ENOUGH_DECODE_PROGRAMS = 2
MAX_DECODE_PROGRAMS = 16
# Selection blocks up to which the Hopper kernel of the choice runs.
MAX_BLOCKS_OF_WARP = 2048

_choices: Counter[tuple[str, str, str]] = Counter()


def backend_choices() -> dict[tuple[str, str, str], int]:
    """How often each (operation, backend, reason) was chosen in this process so far."""
    return dict(_choices)


def resolve(
    operation: str,
    requested: str,
    q: Tensor,
    v: Tensor | None,
    geometry: Geometry | None,
    scale: float | None = None,
    *,
    decoding: bool = False,
) -> str:
    """Choose the backend of one call and count the choice; ValueError, with the reason, if the requested one cannot
    run. Device, type and shape of q [B, T, H, D] and v [B, *, G, V], if there are heads, decide.
    """
    check_backend(requested)
    if requested == "reference":
        chosen, reason = "reference", "asked for"
    elif requested == "auto" and q.device.type != "cuda":
        chosen, reason = "reference", "the tensors are not on a CUDA device"
    else:
        obstacle = unsupported_reason(q, v, geometry, scale, decoding=decoding)
        if requested == "triton":
            if obstacle:
                raise ValueError(f"backend 'triton' cannot run {operation} here: {obstacle}")
            chosen, reason = "triton", "asked for"
        else:
            chosen, reason = ("reference", obstacle) if obstacle else ("triton", "supported")
    count_choice(operation, chosen, reason)
    return chosen


def check_backend(requested: str) -> None:
    """Raise ValueError unless there is a backend of this name."""
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {requested!r}")


def count_choice(operation: str, chosen: str, reason: str) -> None:
    """Count one choice; compiled code counts when it is compiled, not when it runs."""
    _choices[operation, chosen, reason] += 1


# Not a side effect of the compiled graph, which activation checkpointing inside one would refuse. This is all that
# `torch.compiler.assume_constant_result` does, after importing the compiler, and Triton with it.
count_choice._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Which kernel runs a stage. The launchers ask these rules for every call, by `dispatch.RULE(...)`.


def hopper(stage: str) -> ModuleType:
    """The module of `ops/hopper` for a stage; imported when it first runs, as the rest of Gluon is."""
    return importlib.import_module(f"trifocal.ops.hopper.{stage}")


def tma_fits(*tensors: Tensor) -> bool:
    """Whether the copy engine, if any, can read these: aligned to 16 bytes, and not fp32, whose small tiles gain
    nothing.
    """
    if not devices.has_copy_engine(tensors[0].device):
        return False
    for x in tensors:
        if x.dtype == torch.float32 or x.numel() == 0 or x.data_ptr() % 16:
            return False
        size = x.element_size()
        # A loop: a generator takes longer than its three steps, and short calls wait for this.
        for stride in x.stride()[:-1]:
            if stride * size % 16:
                return False
    return True


def interval_on_hopper(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, window: bool, packed: bool
) -> dict[str, Any] | None:
    """How the Hopper kernel `"forward"`, `"d_q"` or `"dkdv"` of the compressed or the window branch is launched; None
    where the portable one runs. The tensors that it reads are [B, *, heads, D or V].

    The Hopper kernels take any number of heads a group, up to 32 at 192 wide, in shares that divide a tile. The copy
    engine must be able to read all. In packed documents, the compressed slots that no document fills would reach the
    products. The window's d_k and d_v are not cut into parts: one program for 128 keys must make enough.
    """
    heads = q.shape[2] // k.shape[2]
    if kernel == "dkdv" and window:
        programs = cdiv(k.shape[1], 128) * k.shape[0] * k.shape[2]
        if programs < FEWEST_PROGRAMS_OF_WINDOW_DKDV * devices.multiprocessors(q.device):
            return None
    configuration = tiles.HOPPER_INTERVAL[kernel, window].get(q.shape[-1])
    fits = (
        configuration is not None
        and devices.is_hopper(q.device)
        and (heads <= 32 or q.shape[-1] <= 128)
        and v.shape[-1] in (64, 128)
        and q.shape[1] * heads >= 128
        and (window or not packed)
        and tma_fits(q, k, v, *others)
    )
    return configuration if fits else None


def interval_parts(q: Tensor, programs: int, q_per_kv: int, rows: int) -> int:
    """How many programs share the rows of a key tile: sixteen a multiprocessor, half of them long; but each with four
    tiles of `rows` at least, and no more than 32, since each writes its own sums. `programs` are those without parts.
    """
    wanted = cdiv(16 * devices.multiprocessors(q.device), max(1, programs))
    return max(1, min(32, wanted, q.shape[1] * q_per_kv // (4 * rows)))


def importance_on_hopper(q: Tensor, k_cmp: Tensor, geometry: Geometry, *, packed: bool) -> dict[str, int] | None:
    """How the Hopper kernel of the importance is launched, by tiles of 128 keys; None where the portable one runs."""
    taps, remainder = divmod(geometry.selection_block_size, geometry.compression_stride)
    heads = q.shape[2] // k_cmp.shape[2]
    fits = (
        q.shape[0] * q.shape[1] > MAX_QUERIES_OF_PORTABLE_IMPORTANCE
        and devices.is_hopper(q.device)
        and q.shape[3] in tiles.HOPPER_IMPORTANCE
        and heads in (4, 8, 16, 32, 64)
        and q.shape[1] >= 64
        and not packed
        and remainder == 0
        and taps in (2, 4, 8, 16, 32, 64)
        and tma_fits(q, k_cmp)
    )
    if not fits:
        return None
    options = tiles.HOPPER_IMPORTANCE[q.shape[3]]
    return {**options, "stack": max(options["stack"], 8 // heads)}


def choice_on_hopper(q: Tensor, blocks: int, *, packed: bool) -> bool:
    """Whether the Hopper kernel chooses among this many selection blocks: one warp holds all of a row."""
    return devices.is_hopper(q.device) and not packed and blocks <= MAX_BLOCKS_OF_WARP


def selected_order(
    num_queries: int,
    longest: int,
    num_selected: int,
    block_size: int,
    q_per_kv: int,
    *,
    backward: bool = False,
    packed: bool = False,
) -> str:
    """The loop order of selected attention: `"tiles"`, `"masked"` or `"block_major"`.

    A pair of a tile of rows and a block costs the masked order about as much as block-major, but there are more of
    them. Tiles multiply the blocks that neighbours chose together, block-major moves each query's partial results:
    those of a small group are little beside what its many neighbours choose, so only small groups take block-major.
    `longest` are the keys of a batch entry or, in packed documents, of the longest document.
    """
    num_blocks = cdiv(longest, block_size)
    few_queries = num_queries * min(num_selected, num_blocks) < FEWEST_QUERIES_PER_BLOCK * num_blocks
    small = q_per_kv < FEWEST_HEADS_OF_TILES
    up_to = MASKED_LONGER_UP_TO if (packed if backward else small) else MASKED_UP_TO
    if not few_queries and num_blocks <= up_to * num_selected:
        return "masked"
    limit = next((limits[backward] for heads, *limits in TILES_UP_TO if q_per_kv >= heads), 0)
    return "tiles" if few_queries or num_blocks <= limit * num_selected else "block_major"


def selected_on_hopper(*tensors: Tensor, block_size: int) -> bool:
    """Whether the Hopper kernels that gather rows (block-major, and d_k, d_v of the masked order) take these queries,
    keys and values, [B, *, heads, D]: 16-bit types; widths of 64 and 128; blocks of 64 tokens; 16 bytes at a time.
    """
    return (
        all(x.dtype != torch.float32 and x.shape[-1] in (64, 128) for x in tensors)
        and block_size == 64
        and devices.is_hopper(tensors[0].device)
        and all(x.data_ptr() % 16 == 0 and _rows_are_aligned(x) for x in tensors)
    )


def tiles_on_hopper(q: Tensor, k: Tensor, v: Tensor, *others: Tensor, block_size: int) -> bool:
    """Whether a Hopper kernel of selected attention's tiles runs, which must fill the device: groups of 3 heads and
    more, blocks of 64 tokens, widths of 64 and 128, but where both are 64 the portable one is as fast.
    """
    heads = tiles.next_power_of_2(q.shape[2] // k.shape[2])
    return (
        block_size == 64
        and heads >= 4
        and (q.shape[-1], v.shape[-1]) in ((128, 128), (128, 64), (64, 128))
        and devices.is_hopper(q.device)
        and q.shape[0] * k.shape[2] * cdiv(q.shape[1], 128 // heads) >= devices.multiprocessors(q.device)
        and tma_fits(q, k, v, *others)
    )


def queries_of_tile(q: Tensor, q_per_kv: int, rows: int, groups: int) -> int:
    """Neighbouring queries in a portable tile of selected attention, up to 32, a bit of a word each; fewer where full
    tiles of all batch entries' `groups` would leave multiprocessors idle.
    """
    queries = max(1, min(32, rows // q_per_kv))
    while queries > 1 and cdiv(q.shape[1], queries) * groups < devices.multiprocessors(q.device):
        queries = cdiv(queries, 2)
    return queries


def dkdv_is_warp_specialized(q_per_kv: int, *tensors: Tensor) -> bool:
    """Whether the warp-specialized one of both Hopper kernels of tiles' d_k and d_v runs: it copies single slots, of
    whole multiples of the 8 rows after which shared memory's pattern repeats.
    """
    return q_per_kv >= FEWEST_HEADS_OF_WARP_SPECIALIZED and 64 % q_per_kv == 0 and tma_fits(*tensors)


def decode_units_of_part(programs: int, units: int, device: torch.device) -> int:
    """How many units of keys a program of decoding adds up before it writes: 1, or a group where programs suffice, with
    the same bits (`decode.triton.common`). `programs` is their number for each part, `units` those of the longest past.
    """
    group = tiles.DECODE_GROUP
    return group if programs * cdiv(units, group) >= ENOUGH_DECODE_PROGRAMS * devices.multiprocessors(device) else 1


def decode_append_scores(num_new: int, jobs: int, geometry: Geometry) -> bool:
    """Whether the launch that writes `num_new` tokens of a sequence also scores the past for an index.

    It can where every new key, wherever blocks begin, lies in a local block of every new token that sees it: such
    blocks are chosen without a score. With more `jobs` than writing, the launch also sums compressed blocks, in an
    order that its number of warps decides; it must be the same in every step.
    """
    before_own = (geometry.num_local_blocks - 1) * geometry.selection_block_size
    return jobs == 1 and num_new - 1 <= before_own


def decode_programs(programs: int, parts: int, device: torch.device) -> int:
    """Programs that share the parts of a sequence: a long block table must not start programs that find nothing."""
    return max(1, min(parts, MAX_DECODE_PROGRAMS * devices.multiprocessors(device) // programs))


def masked_part_queries(num_queries: int, q_per_kv: int, blocks: int, multiprocessors: int) -> int:
    """How many queries one program of the masked order's d_k, d_v takes the rows of, so that the first block, which all
    queries may choose, is not the work of one: all, where there are programs enough. `num_queries` is T, or those of
    the longest document; `blocks` are those of all batch entries and groups.
    """
    parts = min(ENOUGH_PROGRAMS * multiprocessors // blocks, num_queries * q_per_kv // FEWEST_ROWS_OF_A_PART)
    return cdiv(cdiv(num_queries, parts), 64) * 64 if parts > 1 else num_queries


def partial_d_q_type(dtype: torch.dtype, num_selected: int, *, on_hopper: bool) -> torch.dtype:
    """Type of a slot's share of d_q: fp32 for short choices, where it needs no more memory, and 16 bits err by more."""
    return torch.float32 if num_selected <= 8 and not on_hopper else dtype


def gathered_rows(bytes_of_row: int, num_blocks: int, num_selected: int) -> int:
    """How many rows (batch, query) are sorted by block at a time where only d_k and d_v are gathered, a multiple of 64.

    One group's queries of a chunk, which its blocks gather one after the other, pass through the second-level cache;
    but a block is to find enough of them in a chunk that its keys, values and sums are little beside them.
    """
    most = max(GATHERED_BYTES // bytes_of_row, FEWEST_SLOTS_OF_A_BLOCK * num_blocks // num_selected)
    return max(64, most // 64 * 64)


def _rows_are_aligned(x: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 numbers; one batch entry needs no stride."""
    batch, time, head = x.stride()[:3]
    return (x.shape[0] == 1 or batch % 16 == 0) and time % 16 == 0 and head % 16 == 0
