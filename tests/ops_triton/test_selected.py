"""Selected attention's kernels against the float64 oracle: values, log-sum-exp and every gradient, fp32."""

import math

import pytest
import torch

from tests.devices import needs_gpu
from tests.ops.cases import Case, geometry
from tests.ops_triton import problems
from tests.ops_triton.forced import order_rule, selected_tile_rule
from tests.ops_triton.problems import LARGE, PAPER, compare, documents_of, large
from trifocal import ops
from trifocal.ops import Documents, devices, dispatch, selected_attention, tiles
from trifocal.ops.tiles import SelectedTile
from trifocal.ops.triton.selected.backward import selected_backward
from trifocal.ops.triton.selected.forward import selected_forward
from trifocal.testing import oracle
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import assert_close, error

SMALL = geometry(8, 4, 16, 3, 1, 1, 11)
TWO_TILES = geometry(32, 16, 128, 2, 1, 1, 11)  # a block larger than a tile, cut into two
NO_POWER = geometry(16, 16, 48, 2, 1, 1, 11)  # a block padded to 64 keys
FEW_OF_MANY = geometry(32, 16, 64, 4, 1, 1, 11)  # blocks of which neighbours choose different ones


def case_of(why, queries, keys, heads=2, groups=1, dim=16, value_dim=16, rules=SMALL, **rest):
    return Case(why, rules, queries, keys, heads=heads, groups=groups, dim=dim, value_dim=value_dim, **rest)


CASES = (
    case_of("three heads a group, two batch entries, dims that fill no tile", 37, 37, 3, 1, 24, 40, batch=2),
    case_of("fewer queries than keys, dims of two parts", 21, 60, 4, 1, 48, 16),
    case_of("packed: long, 1 token, exactly a block, a block and one", 53, 53, 4, 2, lengths=(19, 1, 16, 17)),
    case_of("packed: the last queries", 27, 61, 4, 2, lengths=(9, 33, 2, 17)),
    case_of("packed: more blocks than a word of bits, but of no document", 40, 607, lengths=(300, 17, 290)),
    case_of("blocks larger than a tile", 40, 140, 2, 2, rules=TWO_TILES),
    case_of("blocks of no power of two, one head a group", 30, 100, 2, 2, rules=NO_POWER),
    case_of("more may be selected than there are blocks", 20, 20, rules=geometry(8, 4, 16, 5, 1, 1, 11)),
    case_of("more heads a group than rows of a tile", 21, 37, 20, 1),
)
ORDERS = ("block_major", "masked", "tiles")


def draw(case, seed=0):
    """q, k, v, the gradient of o, and a choice with pads, repetitions, future blocks, no order, and rows of pads."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(case.batch, case.queries, case.heads, case.dim, generator=generator)
    k = torch.randn(case.batch, case.keys, case.groups, case.dim, generator=generator)
    v = torch.randn(case.batch, case.keys, case.groups, case.value_dim, generator=generator)
    d_o = torch.randn(case.batch, case.queries, case.heads, case.value_dim, generator=generator)
    blocks = case.geometry.num_selection_blocks(case.keys)
    shape = (case.batch, case.queries, case.groups, case.geometry.num_selected_blocks)
    chosen = torch.randint(-1, blocks + 1, shape, generator=generator, dtype=torch.int32)
    chosen[:, 5:9] = -1
    return q, k, v, d_o, chosen


def exact(case, *inputs):
    q, k, v, d_o, chosen = (x.cpu() for x in inputs)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    blocks = case.geometry.num_selection_blocks(case.keys)
    chosen = chosen.masked_fill(chosen >= blocks, -1)
    o = oracle.selected_attention(*leaves, chosen, case.geometry, lengths=case.document_lengths)
    return [o, *torch.autograd.grad(o, leaves, d_o.double())]


def by_kernels(case, q, k, v, d_o, chosen, documents=None, **options):
    """The output, the gradients of q, k and v, and the log-sum-exp."""
    arguments = chosen, case.geometry, case.dim**-0.5, documents
    o, lse = selected_forward(q, k, v, *arguments)
    return [o, *selected_backward(d_o, q, k, v, o, lse, *arguments, **options)], lse


@pytest.mark.parametrize(
    ("case", "order"),
    # The rule gives small groups to the block-major order.
    [(case, "block_major") for number, case in enumerate(CASES[:8]) if number != 4]
    + [(case, "masked") for case in CASES[:7]]
    + [(case, "tiles") for case in CASES],
    ids=lambda value: getattr(value, "why", value),
)
def test_values_and_gradients(case, order, device, monkeypatch):
    monkeypatch.setattr(dispatch, "selected_order", order_rule(order))
    inputs = [x.to(device) for x in draw(case)]
    expected = exact(case, *inputs)
    got, lse = by_kernels(case, *inputs, documents_of(case, device))
    compare("o d_q d_k d_v", got, expected)
    nothing = expected[0].abs().sum(-1) == 0
    assert torch.equal(lse.cpu() == -math.inf, nothing)


@pytest.mark.parametrize(
    ("limit", "order", "lengths"),
    [
        ("SELECTED_BUFFER_BYTES", "block_major", None),
        ("SELECTED_CACHED_BYTES", "block_major", (36, 17, 17)),
        ("GATHERED_BYTES", "tiles", (36, 17, 17)),
    ],
    ids=["two batch entries", "packed", "tiles"],
)
def test_chunks_of_rows_and_pieces_of_blocks(lengths, limit, order, device, monkeypatch):
    """Chunks of the least size, one or several at a time, and pieces of a few slots give the same sums as one."""
    case = case_of("chunks", 70, 70, heads=2, batch=1 if lengths else 2, lengths=lengths)
    inputs, documents = [x.to(device) for x in draw(case)], documents_of(case, device)
    # Everybody chooses the first block, as with a forced one: many pieces.
    inputs[-1][..., 0] = 0
    tile = SelectedTile(16, warps=4, stages=1, piece_slots=16)
    monkeypatch.setattr(dispatch, "selected_order", order_rule(order))
    monkeypatch.setattr(tiles, "selected_tile", selected_tile_rule(tile))
    monkeypatch.setattr(dispatch, limit, 1)
    monkeypatch.setattr(dispatch, "FEWEST_SLOTS_OF_A_BLOCK", 1)
    got, _ = by_kernels(case, *inputs, documents)
    compare("o d_q d_k d_v", got, exact(case, *inputs))
    if device == "cuda":
        again, _ = by_kernels(case, *inputs, documents)
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@pytest.mark.parametrize("order", ["block_major", "tiles"])
def test_gate_is_a_factor_on_the_gradient(order, device, monkeypatch):
    """The masked order's is that of the parts below."""
    monkeypatch.setattr(dispatch, "selected_order", order_rule(order))
    case = case_of("gate", 24, 24, heads=4, groups=2)
    q, k, v, d_o, chosen = (x.to(device) for x in draw(case))
    gate = torch.rand(1, 24, 4, generator=torch.Generator().manual_seed(3)).to(device)
    expected = exact(case, q, k, v, d_o * gate[..., None], chosen)[1:]
    got, _ = by_kernels(case, q, k, v, d_o, chosen, gate=gate)
    compare("d_q d_k d_v", got[1:], expected)


@pytest.mark.parametrize("order", ORDERS)
def test_strides_and_what_no_query_sees(order, device, monkeypatch):
    """Views of wider tensors give what copies give, and NaN in blocks that nobody chose reaches nothing."""
    monkeypatch.setattr(dispatch, "selected_order", order_rule(order))
    case = case_of("strides", 40, 60, heads=2, groups=2, batch=2)
    q, k, v, d_o, chosen = (x.to(device) for x in draw(case))
    chosen = chosen.masked_fill(chosen == 1, 0)
    expected = exact(case, q, k, v, d_o, chosen)
    wide_q = torch.full((2, 2, case.queries, 20), math.nan, device=device)
    wide_q[..., :16] = q.transpose(1, 2)
    q = wide_q[..., :16].transpose(1, 2)
    kv = torch.full((2, 60, 2, 40), math.nan, device=device)
    kv[..., :16], kv[..., 20:36] = k, v
    kv[:, 16:32] = math.nan
    k, v = kv[..., :16], kv[..., 20:36]
    got, _ = by_kernels(case, q, k, v, d_o, chosen)
    compare("o d_q", got[:2], expected[:2])
    for name, actual, wanted in zip(("d_k", "d_v"), got[2:], expected[2:], strict=True):
        seen = torch.ones(60, dtype=torch.bool)
        seen[16:32] = False
        assert_close(name, actual[:, seen.to(device)], wanted[:, seen], torch.float32)


def test_order_follows_from_the_shape():
    order = dispatch.selected_order
    for heads, masked, by_tiles, by_tiles_backward in (
        (1, 4096, 0, 0), (2, 4096, 0, 0), (3, 4096, 8192, 0), (4, 4096, 8192, 0), (5, 4096, 16384, 16384),
        (7, 4096, 16384, 16384), (8, 2048, 2**20, 2**20), (16, 2048, 2**20, 2**20),
    ):  # fmt: skip
        assert order(1, 65536, 16, 64, heads) == order(1, 64, 16, 64, heads) == "tiles"
        assert order(masked, masked, 16, 64, heads) == "masked"
        assert order(2048, 2048, 16, 64, heads, backward=True) == "masked"
        assert order(4096, 4096, 16, 64, heads, backward=True, packed=True) == "masked"
        for length in (masked + 1, 8192, 8193, 16384, 16385, 2**20):
            assert order(length, length, 16, 64, heads) == ("tiles" if length <= by_tiles else "block_major")
            wanted = "tiles" if length <= by_tiles_backward else "block_major"
            assert order(length, length, 16, 64, heads, backward=True) == wanted
            if length > 4096:
                assert order(length, length, 16, 64, heads, backward=True, packed=True) == wanted
    for queries, heads in ((1, 16), (4097, 16), (1, 4)):
        assert order(queries, 4097, 16, 64, heads, backward=True, packed=True) == "tiles"


def test_what_hopper_kernels_cannot_take_stays_portable(monkeypatch):
    for name in ("is_hopper", "has_copy_engine"):
        monkeypatch.setattr(dispatch.devices, name, lambda device: True)
    q, k = (torch.empty(1, 256, heads, 128, dtype=torch.bfloat16) for heads in (4, 2))

    def fits(x, *, window, packed):
        return dispatch.interval_on_hopper("forward", q, x, x, window=window, packed=packed) is not None

    assert fits(k, window=True, packed=True) and fits(k, window=False, packed=False)
    # Slots that no document fills would reach the products.
    assert not fits(k, window=False, packed=True)
    # The copy engine wants each tensor to begin at 16 bytes.
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    assert not fits(shifted, window=True, packed=False) and not fits(k.float(), window=True, packed=False)
    most = dispatch.MAX_BLOCKS_OF_WARP
    assert [dispatch.choice_on_hopper(q, most + more, packed=packed) for more, packed in ((0, 0), (1, 0), (0, 1))] == [
        True, False, False,
    ]  # fmt: skip


def test_of_packed_documents_the_longest_counts(device, monkeypatch):
    """In both passes, behind the operator."""
    found, rule = [], dispatch.selected_order

    def order(num_queries, longest, *others, **options):
        found.append(longest)
        return rule(num_queries, longest, *others, **options)

    monkeypatch.setattr(dispatch, "selected_order", order)
    case = case_of("rows", 64, 64, lengths=(11, 5, 16, 16, 9, 7))
    q, k, v, d_o, chosen = (x.to(device) for x in draw(case))
    boundaries = torch.tensor([0, *case.lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    for documents, longest in (
        (Documents.from_checked(boundaries, 64, row_length=16), 16), (Documents.from_checked(boundaries, 64), 64),
    ):  # fmt: skip
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = selected_attention(*leaves, chosen, case.geometry, cu_seqlens=documents, backend="triton")
        got = [o, *torch.autograd.grad(o, leaves, d_o)]
        compare("o d_q d_k d_v", got, exact(case, *draw(case)))
        assert found == [longest] * 2
        found.clear()


def test_blocks_behind_a_longest_length_that_is_too_small_are_left_out(device, monkeypatch):
    """Of documents on a GPU the length is trusted; a wrong one must not read memory that is no choice's."""
    monkeypatch.setattr(dispatch, "selected_order", order_rule("masked"))
    case = case_of("too long", 40, 600, lengths=(600,))
    q, k, v, d_o, chosen = (x.to(device) for x in draw(case))
    chosen[..., 0], chosen[..., 1] = 5, 35
    documents = Documents.from_checked(torch.tensor([0, 600], device=device), 600)._replace(max_length=512)
    expected = exact(case, q, k, v, d_o, chosen.masked_fill(chosen >= 32, -1))
    got, _ = by_kernels(case, q, k, v, d_o, chosen, documents)
    compare("o d_q", got[:2], expected[:2])


def test_a_chunk_that_is_gathered_stays_in_the_cache_and_gives_blocks_enough():
    # 8 KiB a row: 16 heads of 128 columns of q and d_o.
    assert dispatch.gathered_rows(8192, 1024, 16) == dispatch.GATHERED_BYTES // 8192
    # A million tokens: 32 slots a block, on average.
    assert dispatch.gathered_rows(8192, 16384, 16) == 32 * 16384 // 16
    assert dispatch.gathered_rows(2**30, 1, 16) == 64


def test_programs_are_cut_where_there_are_few():
    # 16 sequences of 2,048 tokens, 12/2 heads: 1,024 blocks are enough for 132 multiprocessors.
    assert dispatch.masked_part_queries(2048, 6, 16 * 2 * 32, 132) == 2048
    # Two of them: 128 blocks, of which the first has 192 tiles of 64 rows; parts of 18.
    assert dispatch.masked_part_queries(2048, 6, 2 * 2 * 32, 132) == 192
    assert dispatch.masked_part_queries(2048, 16, 4 * 32, 132) == 192
    # Short ones: no less than 16 tiles of rows.
    assert dispatch.masked_part_queries(1024, 1, 8, 132) == 1024
    assert dispatch.masked_part_queries(1024, 16, 16, 132) == 64


PARTED = (
    case_of("three heads a group, two batch entries", 37, 37, 3, 1, 24, 40, batch=2),
    case_of("fewer queries than keys", 37, 90, 4, 1, 48, 16),
    case_of("packed: long, 1 token, exactly a block, a block and one", 54, 54, 4, 2, lengths=(20, 1, 16, 17)),
    case_of("packed: fewer queries than keys, a document without any", 40, 60, 4, 2, lengths=(15, 9, 36)),
    case_of("blocks of no power of two, one head a group", 50, 100, 2, 2, rules=NO_POWER),
)


@pytest.mark.parametrize(
    ("case", "part_queries"),
    # A part of whole tiles, and one that ends inside of a tile: which of both it is does not depend on the case.
    [(PARTED[0], 32), *((case, 7) for case in PARTED[1:])],
    ids=lambda value: getattr(value, "why", value),
)
def test_parts_of_a_block_are_added(case, part_queries, device, monkeypatch):
    """Cut at any query, with a gate, the parts add up to the gradient; memory that no part wrote is not read."""
    q, k, v, d_o, chosen = (x.to(device) for x in draw(case))
    gate = torch.rand(q.shape[:3], generator=torch.Generator().manual_seed(3)).to(device)
    expected = exact(case, q, k, v, d_o * gate[..., None], chosen)[1:]
    documents, scale = documents_of(case, device), case.dim**-0.5
    monkeypatch.setattr(dispatch, "selected_order", order_rule("masked"))
    monkeypatch.setattr(dispatch, "masked_part_queries", lambda *sizes: part_queries)
    o, lse = selected_forward(q, k, v, chosen, case.geometry, scale, documents)

    def poisoned(*size, dtype, **options):
        return torch.zeros(*size, dtype=dtype, **options).fill_(math.nan if dtype.is_floating_point else 0)

    monkeypatch.setattr(torch, "empty", poisoned)
    got = selected_backward(d_o, q, k, v, o, lse, chosen, case.geometry, scale, documents, gate=gate)
    compare("d_q d_k d_v", got, expected)


def test_the_last_part_holds_what_a_longest_length_that_is_too_small_leaves(device, monkeypatch):
    case = case_of("too long", 40, 40, lengths=(31, 9))
    inputs, documents = [x.to(device) for x in draw(case)], documents_of(case, device)
    monkeypatch.setattr(dispatch, "selected_order", order_rule("masked"))
    monkeypatch.setattr(dispatch, "masked_part_queries", lambda *sizes: 7)
    got, _ = by_kernels(case, *inputs, documents._replace(max_length=16))
    compare("d_q d_k d_v", got[1:], exact(case, *inputs)[1:])


def assert_right_on_a_gpu(case, order, portable, monkeypatch):
    """A large case in bf16: output and gradients, and the same bits twice."""
    monkeypatch.setattr(dispatch, "selected_order", order_rule(order))
    if portable:
        monkeypatch.setattr(dispatch, "selected_on_hopper", lambda *tensors, **sizes: False)
        monkeypatch.setattr(dispatch, "tiles_on_hopper", lambda *tensors, **sizes: False)
    inputs = problems.draw(case, torch.bfloat16)
    chosen, documents = problems.choice(case, inputs), documents_of(case)
    q, k, v = inputs.q, inputs.k_slc, inputs.v_slc
    d_o = cotangent(q.new_empty(*q.shape[:3], v.shape[3]))
    got, _ = by_kernels(case, q, k, v, d_o, chosen, documents)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o_exact = ops.selected_attention(*leaves, chosen, case.geometry, backend="reference", cu_seqlens=documents)
    expected = (o_exact, *torch.autograd.grad(o_exact, leaves, d_o.double()))
    bound = problems.allowed(case, inputs, chosen, 1)
    errors = [error(a, e) for a, e in zip(got, expected, strict=True)]
    assert max(errors) <= bound, (errors, bound)
    again, _ = by_kernels(case, q, k, v, d_o, chosen, documents)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "two runs differ"


@needs_gpu
@pytest.mark.parametrize("case", [LARGE[1], LARGE[8], *LARGE[11:]], ids=lambda case: case.why)
@pytest.mark.parametrize("portable", [False, True], ids=["as chosen", "portable"])
@pytest.mark.parametrize("part_queries", [100, 192, 10_000])
def test_parts_of_a_block_on_a_gpu(case, portable, part_queries, monkeypatch):
    """d_k and d_v of the masked order, cut anywhere or not at all."""
    monkeypatch.setattr(dispatch, "masked_part_queries", lambda *sizes: part_queries)
    assert_right_on_a_gpu(case, "masked", portable, monkeypatch)


@needs_gpu
@pytest.mark.parametrize("heads", [1, 3, 6, 7])
@pytest.mark.parametrize("portable", [False, True], ids=["as chosen", "portable"])
@pytest.mark.parametrize("lengths", [None, (200, 1, 64, 65, 70)], ids=["one document", "packed"])
def test_block_major_in_chunks_on_a_gpu(heads, portable, lengths, monkeypatch):
    """Small groups, whole slots in a tile or not; rows of several chunks, whose d_k and d_v are added up."""
    # One byte: as few rows in a chunk as can be.
    monkeypatch.setattr(dispatch, "SELECTED_BUFFER_BYTES", 1)
    case = large("in chunks", PAPER, 400, 2 * heads, 2, 64, 128, lengths=lengths)
    assert_right_on_a_gpu(case, "block_major", portable, monkeypatch)


@needs_gpu
@pytest.mark.parametrize("heads", [1, 3, 4, 6, 16, 48])
@pytest.mark.parametrize("portable", [False, True], ids=["as chosen", "portable"])
@pytest.mark.parametrize(
    ("widths", "sizes"),
    [((128, 128), {"batch": 2}), ((64, 128), {"keys": 900}), ((128, 64), {"lengths": (200, 1, 64, 65, 70)})],
    ids=["plain", "later queries", "packed"],
)
def test_tiles_on_a_gpu(heads, portable, widths, sizes, monkeypatch):
    """Groups of any size, by programs that each take many tiles and pass over blocks; rows of several chunks."""
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 5)
    monkeypatch.setattr(dispatch, "GATHERED_BYTES", 1)
    case = large("tiles", FEW_OF_MANY, 400, 2 * heads, 2, *widths, **sizes)
    assert_right_on_a_gpu(case, "tiles", portable, monkeypatch)
