"""Every kernel compiles for sm_80 and sm_90 without a GPU, fits its shared memory, and spills little."""

import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.ops_triton.compilation import SHARED_MEMORY, Call, compile_in_subprocess
from trifocal import ops
from trifocal.ops.geometry import Geometry

# A few spilled words cost nothing; a spilled accumulator would be thousands of bytes. Tiles for Ampere were never
# measured on one: at the benchmarked shapes, fewer are allowed.
MOST_SPILLED_BYTES, FEW_SPILLED_BYTES = 256, 64
OPS = Path(ops.__file__).parent


def calls():
    """What to compile: each kernel once for each architecture, and all those of a call again where sizes decide.

    For Hopper the shapes of production (64 wide) and of the paper (192 wide); for Ampere, which has less memory and
    never runs the GPU tests, every benchmarked shape and fp32. Other calls are there for the choice of kernels.
    """
    from tests.ops_triton.decode_calls import decode_step, prompt_chunk
    from tests.ops_triton.forced import order_rule
    from trifocal.ops import dispatch
    from trifocal.ops.decode.int8 import Int8Weight
    from trifocal.ops.decode.triton.draw_tokens import draw_tokens
    from trifocal.ops.decode.triton.linear import embedding, linear
    from trifocal.ops.layout import Documents
    from trifocal.ops.triton.choice_loss import index_loss_backward, index_loss_forward, teacher_masses_forward
    from trifocal.ops.triton.combine import combine_backward, combine_forward, row_sums
    from trifocal.ops.triton.index_scoring import select_blocks_by_index_forward
    from trifocal.ops.triton.interval.compressed import compressed_backward, compressed_forward
    from trifocal.ops.triton.interval.window import window_backward, window_forward
    from trifocal.ops.triton.mean_compression import mean_compress_backward, mean_compress_forward
    from trifocal.ops.triton.scoring import select_blocks_forward
    from trifocal.ops.triton.selected.backward import selected_backward
    from trifocal.ops.triton.selected.forward import selected_forward

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, device="meta", dtype=dtype)

    def documents_of(length, packed):
        return Documents(*(empty(size, dtype=torch.int32) for size in (4, length, length))) if packed else None

    def attention(heads, groups, dim, value_dim, branch, dtype=torch.bfloat16, packed=False):
        geometry, length = Geometry(), 1024
        documents = documents_of(length, packed)
        q, d_o = empty(1, length, heads, dim, dtype=dtype), empty(1, length, heads, value_dim, dtype=dtype)
        size = length // geometry.compression_stride if packed else geometry.num_compressed_blocks(length)
        size = length if branch == "win" else size
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
        documents = documents_of(length, packed)
        q, d_o = empty(1, length, heads, dim, dtype=dtype), empty(1, length, heads, value_dim, dtype=dtype)
        k, v = empty(1, length, groups, dim, dtype=dtype), empty(1, length, groups, value_dim, dtype=dtype)
        gate, lse = empty(1, length, heads, dtype=dtype), empty(1, length, heads, dtype=torch.float32)
        chosen = empty(1, length, groups, geometry.num_selected_blocks, dtype=torch.int32)
        rules = {"selected_order": order_rule(order)}
        if part_queries is not None:
            rules["masked_part_queries"] = lambda *sizes: part_queries
        with mock.patch.multiple(dispatch, **rules):
            selected_forward(q, k, v, chosen, geometry, 0.1, documents)
            if order != "query_major":
                selected_backward(
                    d_o, q, k, v, d_o, lse, chosen, geometry, 0.1, documents, gate=gate, delta=lse
                )  # fmt: skip

    def scoring(heads, groups, dim, packed=False, geometry=None, length=16384):
        geometry = geometry or Geometry()
        documents = documents_of(length, packed)
        size = length // geometry.compression_stride if packed else geometry.num_compressed_blocks(length)
        q, k = empty(1, length, heads, dim), empty(1, size, groups, dim)
        select_blocks_forward(q, k, empty(1, length, heads, dtype=torch.float32), geometry, length, 0.1, documents)

    def index_scoring(packed=False, geometry=None):
        documents, geometry, length = documents_of(16384, packed), geometry or Geometry(), 16384
        select_blocks_by_index_forward(empty(1, length, 4, 64), empty(1, length, 64), geometry, documents)

    def teaching(heads, groups, dim, packed=False, blocks=256):
        length = 64 * blocks
        documents = documents_of(length, packed)
        tokens, k_idx = empty(1, 256, dtype=torch.int64), empty(1, length, 64)
        q, k, q_idx = (empty(1, length, *sizes) for sizes in ((heads, dim), (groups, dim), (groups, 64)))
        teacher_masses_forward(q, k, tokens, tokens, Geometry(), blocks, documents)
        eligible, rules = empty(1, 256, dtype=torch.bool), (Geometry(), blocks, 1e-6, 1e-9, documents)
        figures, d_products, places = index_loss_forward(q_idx, k_idx, q, k, tokens, tokens, eligible, *rules)
        index_loss_backward(figures, d_products, places, q_idx, k_idx, tokens, tokens, Geometry())

    def compression(dim, dtype=torch.bfloat16, packed=False, geometry=None):
        geometry, length = geometry or Geometry(), 1024
        documents = documents_of(length, packed)
        size = length // geometry.compression_stride if packed else geometry.num_compressed_blocks(length)
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

    def decoding_int8(dim, hidden):
        def weight(outputs, width):
            values, scale = empty(outputs, width, dtype=torch.int8), empty(outputs, dtype=torch.float32)
            return Int8Weight(values, scale, torch.bfloat16)

        for rows in (1, 64):
            x, residual = empty(rows, dim), empty(rows, dim, dtype=torch.float32)
            norm = (empty(rows, dim // 16, dtype=torch.float32), 1e-6)
            linear(x, weight(2596, dim), None, norm=norm, num_sigmoids=96)
            linear(x, weight(2 * hidden, dim), None, norm=norm, swiglu=True)
            next_norm = empty(dim, dtype=torch.float32), torch.bfloat16
            linear(empty(rows, hidden), weight(dim, hidden), None, residual=residual, next_norm=next_norm)

    def combination():
        o = [empty(2, 64, 12, 128) for _ in range(4)]
        combine_forward(*o[:3], empty(2, 64, 12, 3))
        combine_backward(*o, torch.bfloat16)
        row_sums(o[0], o[1], empty(2, 64, 12, dtype=torch.float32))

    hopper = [
        Call("cmp 128", "hopper", lambda: attention(64, 4, 128, 128, "cmp")),
        Call("win 64", "hopper", lambda: attention(12, 2, 64, 64, "win"), every_kernel=True),
        Call("win 192/128 packed", "hopper", lambda: attention(64, 4, 192, 128, "win", packed=True), every_kernel=True),
        Call("cmp 256 packed", "hopper", lambda: attention(8, 2, 256, 256, "cmp", packed=True)),
        Call("cmp 128, one head", "hopper", lambda: attention(2, 2, 128, 128, "cmp")),
        Call("win 128, six heads", "hopper", lambda: attention(12, 2, 128, 128, "win")),
        Call("slc 128, block-major", "hopper", lambda: selected(64, 4, 128, 128, "block_major")),
        Call("slc 64, block-major, six heads", "hopper", lambda: selected(12, 2, 64, 64, "block_major")),
        Call(
            "slc 64/128 packed", "hopper", lambda: selected(16, 2, 64, 128, "block_major", packed=True),
            every_kernel=True,
        ),
        Call("slc 192/128", "hopper", lambda: selected(64, 4, 192, 128, "block_major")),
        Call(
            "slc 128 packed, masked, parts", "hopper",
            lambda: selected(64, 4, 128, 128, "masked", packed=True, part_queries=192),
        ),
        Call("slc 128, query-major", "hopper", lambda: selected(64, 4, 128, 128, "query_major")),
        Call("scoring 192", "hopper", lambda: scoring(64, 4, 192)),
        Call("scoring packed", "hopper", lambda: scoring(32, 8, 128, packed=True)),
        Call("scoring of few queries", "hopper", lambda: scoring(64, 4, 128, length=8192)),
        Call("scoring, no overlap", "hopper", lambda: scoring(16, 1, 128, geometry=Geometry(16, 16, 32))),
        Call(
            "index scoring, blocks of 144", "hopper",
            lambda: index_scoring(geometry=Geometry(32, 16, 144)), every_kernel=True,
        ),
        Call("teaching 128", "hopper", lambda: teaching(64, 4, 128), every_kernel=True),
        Call("decoding 192/128", "hopper", lambda: decode_step(64, 4, 192, 128), every_kernel=True),
        Call("chunk 64", "hopper", lambda: prompt_chunk(12, 2, 64, 64), every_kernel=True),
    ]  # fmt: skip
    # Every portable kernel at the shapes of the benchmarks, packed, which takes most registers.
    ampere = []
    for heads, groups, dim, value_dim in ((64, 4, 128, 128), (12, 2, 64, 64), (64, 4, 192, 128)):
        sizes = (heads, groups, dim, value_dim)
        for name, call in {
            "cmp": partial(attention, *sizes, "cmp", packed=True),
            "win": partial(attention, *sizes, "win", packed=True),
            "slc block-major": partial(selected, *sizes, "block_major", packed=True),
            "slc masked": partial(selected, *sizes, "masked", packed=True, part_queries=192),
            "slc query-major": partial(selected, *sizes, "query_major", packed=True),
            "scoring": partial(scoring, heads, groups, dim, packed=True),
            "teaching": partial(teaching, heads, groups, dim, packed=True),
            "decoding": partial(decode_step, *sizes),
            "chunk": partial(prompt_chunk, *sizes),
        }.items():
            ampere.append(Call(f"{name} {dim}", "ampere", call, every_kernel=True))
    ampere += [
        Call("scoring, four heads a group", "ampere", lambda: scoring(32, 8, 128, packed=True), every_kernel=True),
        Call("index scoring packed", "ampere", lambda: index_scoring(packed=True), every_kernel=True),
        Call("win fp32", "ampere", lambda: attention(8, 2, 64, 64, "win", torch.float32), every_kernel=True),
        Call("slc fp32", "ampere", lambda: selected(8, 2, 64, 64, "block_major", torch.float32), every_kernel=True),
        Call(
            "decoding 256, many blocks", "ampere",
            lambda: decode_step(16, 2, 256, 256, new=8, pages=512, learned=True, selected=300), every_kernel=True,
        ),
    ]  # fmt: skip
    result = hopper + ampere
    for architecture in ("hopper", "ampere"):
        result += [
            Call("teaching, 1024 blocks", architecture, lambda: teaching(64, 4, 128, blocks=1024), every_kernel=True),
            Call("teaching, 16384 blocks", architecture, lambda: teaching(64, 4, 128, blocks=16384), every_kernel=True),
            Call("combination", architecture, combination),
            Call("decoding, learned compressor", architecture, lambda: decode_step(12, 2, 64, 64, learned=True)),
            Call("products of a decode step", architecture, lambda: decoding(768, 2048), every_kernel=True),
            *(
                Call(f"products with 8 bits, {dim}", architecture, partial(decoding_int8, dim, hidden), True)
                for dim, hidden in ((768, 2048), (2048, 5632))
            ),
            Call("draw from a large vocabulary", architecture, lambda: drawing(32000)),
            Call("compression 128 packed", architecture, lambda: compression(128, packed=True)),
            Call("compression 256 fp32", architecture, lambda: compression(256, torch.float32), every_kernel=True),
            Call("compression 192, no overlap", architecture, lambda: compression(192, geometry=Geometry(16, 16, 32))),
        ]
    return result


@pytest.fixture(scope="module")
def rows():
    return compile_in_subprocess("tests.ops_triton.test_compile")


@pytest.fixture(scope="module")
def compiled(rows):
    """Those of the rows that have a compiler's figures: no kernel lacks them on either architecture."""
    found = [row for row in rows if "shared_bytes" in row]
    assert {(row["kernel"], row["architecture"]) for row in found} == {
        (row["kernel"], row["architecture"]) for row in rows
    }
    return found


def test_every_kernel_is_compiled(rows, compiled):
    """Those of ops/hopper for Hopper alone, all others for both architectures, but for one that Hopper's replaces."""
    found = {file: re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M) for file in OPS.rglob("*.py")}
    found.pop(OPS / "triton/smoke.py")
    names = {name for file in found for name in found[file]}
    written_for_hopper = {name for file in found if "hopper" in file.parts for name in found[file]}
    kernels = {
        architecture: {row["kernel"] for row in compiled if row["architecture"] == architecture}
        for architecture in ("hopper", "ampere")
    }
    assert kernels == {"hopper": names - {"masked_dkdv_kernel"}, "ampere": names - written_for_hopper}

    def of_call(call):
        return {row["kernel"] for row in rows if row["call"] == call}

    interval = {f"interval_{part}_hopper_kernel" for part in ("forward", "d_q", "dkdv")} | {"row_numbers_kernel"}
    for call in ("cmp 128, one head", "win 128, six heads"):
        assert interval <= of_call(call)
    assert {"interval_dkdv_hopper_kernel", "row_numbers_kernel"} <= of_call("win 64")
    assert "block_major_backward_warp_specialized_kernel" in of_call("slc 128, block-major")
    six_heads = {"block_major_forward_hopper_kernel", "block_major_backward_hopper_kernel"}
    assert six_heads <= of_call("slc 64, block-major, six heads")
    assert of_call("scoring of few queries") == {"importance_kernel", "choice_hopper_kernel"}


def test_shared_memory_fits(compiled):
    for row in compiled:
        assert row["shared_bytes"] <= SHARED_MEMORY[row["architecture"]], row


def test_little_is_spilled(compiled):
    for row in compiled:
        few = row["architecture"] == "ampere" and "256" not in row["call"]
        assert row["spill_bytes"] <= (FEW_SPILLED_BYTES if few else MOST_SPILLED_BYTES), row


def test_a_row_of_the_choice_s_loss_stays_in_registers(compiled):
    """On Hopper too, and up to as many blocks as the kernel says."""
    found = [row for row in compiled if row["kernel"] in ("index_loss_kernel", "block_masses_kernel")]
    longest = [(row["architecture"], row["kernel"]) for row in found if row["call"] == "teaching, 16384 blocks"]
    assert len(set(longest)) == 4
    for row in found:
        assert row["spill_bytes"] <= FEW_SPILLED_BYTES, row


def test_weights_in_8_bits_are_added_up_alike_for_any_number_of_rows(compiled):
    found = [row["operand_widths"] for row in compiled if row["call"].startswith("products with 8 bits")]
    assert len(found) == 2 * 2 * 6 and all(widths == found[0] and len(widths) == 1 for widths in found), found


def test_weights_in_8_bits_go_from_memory_to_matrix_instructions(compiled):
    """Shared memory is for sums of warps alone, 4 KB for 8 rows; with one row two programs fit a multiprocessor."""
    found = [row for row in compiled if row["call"].startswith("products with 8 bits")]
    for row in found:
        assert row["shared_bytes"] <= 16 * 1024, row
    for one_row in (row for number, row in enumerate(found) if number % 6 < 3):
        assert one_row["shared_bytes"] == 4096 and one_row["registers"] <= 128, one_row
        assert one_row["spill_bytes"] <= (0 if one_row["architecture"] == "hopper" else 8), one_row


def test_the_sum_of_many_parts_compiles_in_seconds(compiled):
    """Triton needs time by the third power of the loads that depend on one another: half a minute for 128."""
    loads = [row["loads"] for row in compiled if row["kernel"] == "decode_combine_kernel"]
    assert 48 <= max(loads) < 100
