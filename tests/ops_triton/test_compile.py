"""Every kernel compiles for sm_80 and sm_90 without a GPU, fits its shared memory, and spills little."""

import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.ops_triton.compilation import SHARED_MEMORY, Call, compile_in_subprocess
from tests.ops_triton.decode_calls import decode_step, empty, meta_documents, num_compressed, prompt_chunk
from trifocal import ops
from trifocal.ops.geometry import Geometry

# A few spilled words cost nothing; a spilled accumulator would be thousands of bytes. Tiles for Ampere were never
# measured on one: at the benchmarked shapes, fewer are allowed.
MAX_SPILLED_BYTES, FEW_SPILLED_BYTES = 256, 64
OPS = Path(ops.__file__).parent


def calls(part):
    """What a part compiles: each kernel once, and more than once where the width of the heads decides its tiles.

    For Hopper the shapes of production (64 wide) and of the paper (192 wide); for Ampere, which has less memory and
    never runs the GPU tests, the benchmarked shapes and fp32 too. Other calls are there for the choice of kernels.
    """
    from tests.ops_triton.forced import order_rule
    from trifocal.ops import dispatch
    from trifocal.ops.decode.triton.draw_tokens import draw_tokens
    from trifocal.ops.decode.triton.linear import embedding, linear
    from trifocal.ops.triton.choice_loss import index_loss_backward, index_loss_forward
    from trifocal.ops.triton.combine import combine_backward, combine_forward, row_sums
    from trifocal.ops.triton.index_scoring import select_blocks_by_index_forward
    from trifocal.ops.triton.interval.compressed import compressed_backward, compressed_forward
    from trifocal.ops.triton.interval.window import window_backward, window_forward
    from trifocal.ops.triton.mean_compression import mean_compress_backward, mean_compress_forward
    from trifocal.ops.triton.scoring import select_blocks_forward
    from trifocal.ops.triton.selected.backward import selected_backward
    from trifocal.ops.triton.selected.forward import selected_forward

    def attention(heads, groups, dim, value_dim, branch, dtype=torch.bfloat16, packed=False):
        geometry, length = Geometry(), 1024
        documents = meta_documents(length, packed)
        q, d_o = empty(1, length, heads, dim, dtype=dtype), empty(1, length, heads, value_dim, dtype=dtype)
        size = length if branch == "win" else num_compressed(geometry, length, packed)
        k, v = empty(1, size, groups, dim, dtype=dtype), empty(1, size, groups, value_dim, dtype=dtype)
        gate, lse = empty(1, length, heads, dtype=dtype), empty(1, length, heads, dtype=torch.float32)
        if branch == "win":
            window_forward(q, k, v, 512, 0.1, documents)
            window_backward(d_o, q, k, v, None, lse, 512, 0.1, documents, delta=lse, gate=gate)
        else:
            compressed_forward(q, k, v, geometry, length, 0.1, documents)
            compressed_backward(d_o, q, k, v, None, lse, geometry, length, 0.1, documents, delta=lse, gate=gate)

    def selected(heads, groups, dim, value_dim, order, dtype=torch.bfloat16, packed=False, part_queries=None):
        geometry, length = Geometry(), 4096
        documents = meta_documents(length, packed)
        q, d_o = empty(1, length, heads, dim, dtype=dtype), empty(1, length, heads, value_dim, dtype=dtype)
        k, v = empty(1, length, groups, dim, dtype=dtype), empty(1, length, groups, value_dim, dtype=dtype)
        gate, lse = empty(1, length, heads, dtype=dtype), empty(1, length, heads, dtype=torch.float32)
        chosen = empty(1, length, groups, geometry.num_selected_blocks, dtype=torch.int32)
        rules = {"selected_order": order_rule(order)}
        if part_queries is not None:
            rules["masked_part_queries"] = lambda *sizes: part_queries
        with mock.patch.multiple(dispatch, **rules):
            selected_forward(q, k, v, chosen, geometry, 0.1, documents)
            selected_backward(d_o, q, k, v, d_o, lse, chosen, geometry, 0.1, documents, gate=gate, delta=lse)

    def scoring(heads, groups, dim, packed=False, geometry=None, length=16384):
        geometry = geometry or Geometry()
        documents = meta_documents(length, packed)
        size = num_compressed(geometry, length, packed)
        q, k = empty(1, length, heads, dim), empty(1, size, groups, dim)
        select_blocks_forward(q, k, empty(1, length, heads, dtype=torch.float32), geometry, length, 0.1, documents)

    def index_scoring(packed=False, geometry=None):
        documents, geometry, length = meta_documents(16384, packed), geometry or Geometry(), 16384
        select_blocks_by_index_forward(empty(1, length, 4, 64), empty(1, length, 64), geometry, documents)

    def teaching(heads, groups, dim, packed=False, blocks=256):
        length = 64 * blocks
        documents = meta_documents(length, packed)
        tokens, k_idx = empty(1, 256, dtype=torch.int64), empty(1, length, 64)
        q, k, q_idx = (empty(1, length, *sizes) for sizes in ((heads, dim), (groups, dim), (groups, 64)))
        eligible, rules = empty(1, 256, dtype=torch.bool), (Geometry(), blocks, 1e-6, 1e-9, documents)
        figures, d_products, places = index_loss_forward(q_idx, k_idx, q, k, tokens, tokens, eligible, *rules)
        index_loss_backward(figures, d_products, places, q_idx, k_idx, tokens, tokens, Geometry())

    def compression(dim, dtype=torch.bfloat16, packed=False, geometry=None):
        geometry, length = geometry or Geometry(), 1024
        documents = meta_documents(length, packed)
        size = num_compressed(geometry, length, packed)
        mean_compress_forward(empty(2, length, 4, dim, dtype=dtype), geometry, size, documents)
        mean_compress_backward(empty(2, size, 4, dim, dtype=dtype), geometry, length, documents)

    def drawing(vocab_size):
        floats, whole_numbers = empty(3, dtype=torch.float32), empty(3, dtype=torch.int32)
        seen, seeds = empty(3, vocab_size, dtype=torch.bool), empty(3, dtype=torch.int64)
        draw_tokens(
            empty(3, vocab_size, dtype=torch.float32), None, floats, whole_numbers, floats, seeds, seen, whole_numbers,
            whole_numbers, seeds, empty(3, 2, dtype=torch.float64),
        )  # fmt: skip

    def decoding(dim, hidden):
        next_norm = empty(dim, dtype=torch.float32), torch.bfloat16
        residual, squares, x = embedding(empty(3, dtype=torch.int64), empty(257, dim), next_norm)
        norm = (squares, 1e-6)
        linear(x, empty(2 * dim, dim), empty(2 * dim), norm=norm, num_sigmoids=36)
        linear(x, empty(257, dim), None, norm=norm, out_dtype=torch.float32)
        gated = linear(x, empty(2 * hidden, dim), None, norm=norm, swiglu=True)[0]
        linear(gated, empty(dim, hidden), None, residual=residual, next_norm=next_norm)
        squares = empty(64, dim // 16, dtype=torch.float32)
        linear(empty(64, dim), empty(2 * hidden, dim), None, norm=(squares, 1e-6), swiglu=True)
        drawing(257)

    def combination():
        o = [empty(2, 64, 12, 128) for _ in range(4)]
        combine_forward(*o[:3], empty(2, 64, 12, 3))
        combine_backward(*o, torch.bfloat16)
        row_sums(o[0], o[1], empty(2, 64, 12, dtype=torch.float32))

    architecture, _, what = part.partition(" ")
    wide, middle, narrow, small = (64, 4, 192, 128), (64, 4, 128, 128), (12, 2, 64, 64), (24, 4, 192, 128)
    tiles = ".*_(forward|backward|d_q|dkdv)(_hopper|_warp_specialized)?_kernel"

    def call(name, function, *args, again="$^", each="$^", **options):
        return Call(name, architecture, partial(function, *args, **options), again, each)

    # Packed documents take most registers.
    packed, every, again = {"packed": True}, {"each": ".*"}, {"again": tiles}
    parts = {
        "hopper interval": lambda: [
            call("win 192/128", attention, *wide, "win", **packed),
            call("cmp 128", attention, *middle, "cmp", again=".*_(forward|dkdv)_hopper_kernel"),
            call("win 64", attention, *narrow, "win", **again),
            call("cmp 256", attention, 8, 2, 256, 256, "cmp", **packed),
            call("cmp 128, one head", attention, 2, 2, 128, 128, "cmp"),
            call("win 128, six heads", attention, 12, 2, 128, 128, "win"),
        ],
        "hopper selected": lambda: [
            call("128, block-major, four heads", selected, 32, 8, 128, 128, "block_major"),
            call("64, block-major, six heads", selected, *narrow, "block_major"),
            call("64/128", selected, 12, 2, 64, 128, "block_major", **packed, **again),
            call("192/128", selected, *small, "block_major"),
            call("128, masked, parts", selected, *middle, "masked", **packed, part_queries=192),
            call("128, tiles", selected, *middle, "tiles"),
            call("64, tiles, six heads", selected, *narrow, "tiles", **again),
            call("192/128, tiles", selected, *wide, "tiles"),
            call("256, tiles", selected, 8, 2, 256, 256, "tiles", again="tile"),
        ],
        "ampere interval": lambda: [
            call("cmp 192/128", attention, *wide, "cmp", **packed),
            call("win 128", attention, *middle, "win", **packed, **again),
            call("cmp 64", attention, *narrow, "cmp", **packed, **again),
            call("win 64 fp32", attention, 8, 2, 64, 64, "win", torch.float32, again=".*_dkdv_kernel"),
        ],
        "ampere selected": lambda: [
            call("block_major 192/128", selected, *small, "block_major", **packed),
            call("block_major 128", selected, 24, 4, 128, 128, "block_major", **packed, **again),
            call("block_major 64", selected, *narrow, "block_major", **packed, **again),
            call("masked 192/128", selected, *wide, "masked", **packed, part_queries=192),
            call("tiles 192/128", selected, *wide, "tiles", **packed),
            call("tiles 128", selected, *middle, "tiles", **packed, **again),
            call("tiles 64", selected, *narrow, "tiles", **again),
            call("tiles 64 fp32", selected, 8, 2, 64, 64, "tiles", torch.float32, **again),
            call("block_major 64 fp32", selected, 8, 2, 64, 64, "block_major", torch.float32, **again),
        ],
        "hopper scoring": lambda: [
            call("192", scoring, 64, 4, 192),
            call("128, packed", scoring, 32, 8, 128, **packed),
            call("few queries", scoring, 64, 4, 128, length=8192),
            call("no overlap", scoring, 16, 1, 128, geometry=Geometry(16, 16, 32)),
            call("index, blocks of 144", index_scoring, geometry=Geometry(32, 16, 144), again="choice"),
        ],
        "ampere scoring": lambda: [
            call("192", scoring, 64, 4, 192, **packed),
            call("64", scoring, 12, 2, 64, **packed, again="importance"),
            call("128, four heads a group", scoring, 32, 8, 128, **packed, again="importance"),
            call("index", index_scoring, **packed, again="choice"),
        ],
        "teaching": lambda: [
            call("192", teaching, 64, 4, 192, **packed),
            call("128, 1024 blocks", teaching, 64, 4, 128, blocks=1024, again="index_loss"),
            call("128, 16384 blocks", teaching, 64, 4, 128, blocks=16384, again="index_loss"),
        ],
        "hopper decoding": lambda: [
            call("192/128", decode_step, *wide, each="append_kernel"),
            call("64, learned compressor", decode_step, *narrow, learned=True),
            call("chunk 64", prompt_chunk, *narrow),
        ],
        "ampere decoding": lambda: [
            call("192/128", decode_step, *wide, each="decode_attend|append_kernel"),
            call(
                "256, many blocks", decode_step, 16, 2, 256, 256, new=8, pages=512, learned=True, selected=300,
                again="decode_attend|decode_combine",
            ),
            call("chunk 192/128", prompt_chunk, *wide, **every),
        ],
        "products": lambda: [
            call("a decode step", decoding, 768, 2048, **every),
            call("a large vocabulary", drawing, 32000),
            call("combination", combination),
            call("compression 128", compression, 128, **packed),
            call("compression 256 fp32", compression, 256, torch.float32, **every),
            call("compression 192, no overlap", compression, 192, geometry=Geometry(16, 16, 32)),
        ],
    }  # fmt: skip
    return (parts.get(part) or parts[what])()


PARTS = {
    architecture: [
        f"{architecture} {what}" for what in ("interval", "selected", "scoring", "teaching", "decoding", "products")
    ]
    for architecture in ("hopper", "ampere")
}
EACH_PART = [*PARTS["hopper"], *PARTS["ampere"]]


@pytest.mark.parametrize("part", EACH_PART)
def test_kernels_compile_fit_and_spill_little(part, tmp_path):
    rows = [row for row in compile_in_subprocess(part, folder=tmp_path) if "shared_bytes" in row]
    assert rows
    for row in rows:
        assert row["shared_bytes"] <= SHARED_MEMORY[row["architecture"]], row
        few = row["architecture"] == "ampere" and "256" not in row["call"]
        assert row["spill_bytes"] <= (FEW_SPILLED_BYTES if few else MAX_SPILLED_BYTES), row
    CHECKS.get(part.partition(" ")[2], lambda rows: None)(rows)


def rows_of_the_choice_s_loss_stay_in_registers(rows):
    """On Hopper too, and up to as many blocks as the kernel says."""
    found = [row for row in rows if row["kernel"] == "index_loss_kernel"]
    assert any(row["call"].endswith("16384 blocks") for row in found)
    for row in found:
        assert row["spill_bytes"] <= FEW_SPILLED_BYTES, row


def weights_are_read_well(rows):
    """They are added up alike for any number of rows, and go from memory to matrix instructions.

    Shared memory is for sums of warps only, 4 KB for 8 rows; with few rows two programs fit a multiprocessor.
    """
    rows = [row for row in rows if row["kernel"] == "decode_linear_kernel"]
    widths = [row["operand_widths"] for row in rows]
    assert len(widths) == 5 and len(widths[0]) == 1 and widths == widths[:1] * 5, widths
    assert rows[-1]["shared_bytes"] <= 16 * 1024, rows[-1]
    for few_rows in rows[:-1]:
        assert few_rows["shared_bytes"] == 4096 and few_rows["registers"] <= 128, few_rows
        assert few_rows["spill_bytes"] <= (0 if few_rows["architecture"] == "hopper" else 8), few_rows


def sums_of_many_parts_compile_in_seconds(rows):
    """Triton needs time by the third power of the loads that depend on one another: half a minute for 128."""
    loads = [row["loads"] for row in rows if row["kernel"] == "decode_combine_kernel"]
    assert max(loads) < 100
    if rows[0]["architecture"] == "ampere":
        assert max(loads) >= 48


CHECKS = {
    "teaching": rows_of_the_choice_s_loss_stay_in_registers,
    "products": weights_are_read_well,
    "decoding": sums_of_many_parts_compile_in_seconds,
}


def test_every_kernel_is_compiled(tmp_path):
    """Those of ops/hopper for Hopper only, all others for both architectures, but for one that Hopper's replaces."""
    found = {file: re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M) for file in OPS.rglob("*.py")}
    names = {name for file in found for name in found[file]}
    written_for_hopper = {name for file in found if "hopper" in file.parts for name in found[file]}
    rows = compile_in_subprocess(*EACH_PART, folder=tmp_path, only_record=True)
    kernels = {
        architecture: {row["kernel"] for row in rows if row["architecture"] == architecture} for architecture in PARTS
    }
    assert kernels == {"hopper": names - {"masked_dkdv_kernel"}, "ampere": names - written_for_hopper}

    def of_call(call):
        return {row["kernel"] for row in rows if row["architecture"] == "hopper" and row["call"] == call}

    interval = {f"interval_{part}_hopper_kernel" for part in ("forward", "d_q", "dkdv")} | {"row_numbers_kernel"}
    for call in ("cmp 128, one head", "win 128, six heads"):
        assert interval <= of_call(call)
    assert {"interval_dkdv_hopper_kernel", "row_numbers_kernel"} <= of_call("win 64")
    gathered = {"_slot_keys_kernel", "block_major_backward_hopper_kernel", "reduce_pieces_kernel"}
    assert gathered | {"block_major_forward_hopper_kernel"} <= of_call("64, block-major, six heads")
    in_tiles = {"tile_lists_kernel", "tile_forward_hopper_kernel", "tile_d_q_hopper_kernel"}
    portable = {"tile_lists_kernel", "tile_forward_kernel", "tile_d_q_kernel"}
    assert of_call("64, tiles, six heads") == portable | gathered
    assert in_tiles | {"block_major_dkdv_warp_specialized_kernel"} <= of_call("128, tiles")
    assert of_call("few queries") == {"importance_kernel", "choice_hopper_kernel"}


def test_no_kernel_uses_a_name_that_a_later_triton_removed():
    """3.9 has no `_reinterpret`, and refuses the others only when a kernel compiles."""
    removed = re.compile(r"\.(async_copy_global_to_shared|async_copy_shared_to_global|_reinterpret)\(")
    assert [file.name for file in OPS.rglob("*.py") if removed.search(file.read_text())] == []
