"""Decoding's kernels against the reference: caches, choices, outputs, bits; on a GPU also at real sizes, in graphs."""

import copy
import itertools
from dataclasses import dataclass, fields, replace
from unittest import mock

import pytest
import torch

from tests.devices import needs_gpu
from tests.ops import decode_cases
from tests.ops.cases import geometry
from tests.ops.decode_cases import FOUR_A_BLOCK, Decoder, draw, whole, whole_dense
from trifocal import Geometry
from trifocal.nn.rope import rotate
from trifocal.ops import (
    compressed_attention,
    decode_attention,
    decode_dense_attention,
    dispatch,
    select_blocks,
    select_blocks_by_index,
    tiles,
)
from trifocal.testing.tolerances import allowed, error

pytest.importorskip("triton")


BOUND = 1e-5
USUAL = geometry(8, 4, 16, 3, 1, 1, 11)


@dataclass(frozen=True)
class Step:
    """A batch of pasts, and the new tokens of each."""

    shapes: decode_cases.Case
    lengths: tuple[int, ...]
    num_new: tuple[int, ...]


def shapes(why, rules=USUAL, heads=2, groups=1, **others):
    return decode_cases.Case(why, rules, heads, groups, **others)


ALONE = {"window": "none", "selected_only": True}
NO_OVERLAP = geometry(4, 4, 16, 2, 0, 1, 20)
OF_48 = geometry(16, 16, 48, 2, 0, 1, 5)
OF_144 = geometry(4, 4, 144, 2, 0, 1, 5)
STEPS = (
    Step(shapes("3 heads a group, V < D", heads=6, groups=2, value_dim=6), (79,), (1,)),
    Step(shapes("7 heads, blocks of four strides, one without a token", FOUR_A_BLOCK, 7), (5, 6, 66), (0, 2, 1)),
    Step(shapes("one head a group, no overlap, no window", NO_OVERLAP, 2, 2, window="none"), (77,), (1,)),
    Step(shapes("everything shared, pages of three blocks", window="shared", page_blocks=3), (80,), (2,)),
    Step(shapes("selected alone", value_dim=4, **ALONE), (66,), (1,)),
    Step(shapes("three strides a block, no block forced first", OF_48), (190,), (1,)),
    Step(shapes("D in two parts, V wider", dim=130, value_dim=132, learned=True), (41,), (3,)),
    Step(shapes("rows are two tiles", heads=20), (30,), (4,)),
    Step(shapes("an index, rows are two tiles", heads=3, groups=3, index=8, learned=True), (5, 60), (6, 7)),
    Step(shapes("an index in two parts", OF_48, 2, 2, index=24, page_blocks=2, **ALONE), (190, 0, 20), (1, 1, 0)),
    Step(shapes("an index, blocks of several tiles", OF_144, index=64, **ALONE), (900,), (2,)),
)


@pytest.fixture(autouse=True)
def unwritten_memory_is_poison(monkeypatch):
    """What a kernel does not write must not be read."""
    empty = torch.empty

    def poisoned(*sizes, **options):
        x = empty(*sizes, **options)
        return x.fill_(torch.nan if x.dtype.is_floating_point else -(2**20))

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def four_units_to_a_part(monkeypatch, request):
    """Fewer programs to interpret; one test takes both ways."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(dispatch, "decode_units_of_part", lambda *sizes: tiles.DECODE_GROUP)


def run(step, backend, tokens, dense=False, window_size=None):
    decoder = Decoder(step.shapes, tokens, max(step.num_new), backend)
    decoder.fill(list(step.lengths))
    if dense:
        return decoder.step_dense(list(step.num_new), window_size), decoder
    return decoder.step(list(step.num_new)), decoder


def tokens_of(step, device):
    length = max(past + new for past, new in zip(step.lengths, step.num_new, strict=True))
    return draw(step.shapes, len(step.lengths), length, torch.float32, device)


def assert_same_caches(cache, expected):
    for field in fields(cache):
        held, wanted = getattr(cache, field.name), getattr(expected, field.name)
        if wanted is None:
            assert held is None
            continue
        assert torch.equal(held.isnan(), wanted.isnan()), field.name
        assert error(held.nan_to_num(0.0), wanted.nan_to_num(0.0)) <= BOUND, field.name


@pytest.mark.parametrize("step", STEPS, ids=[step.shapes.why for step in STEPS])
def test_a_step_is_the_reference_and_the_whole_sequence(step, device):
    tokens = tokens_of(step, device)
    o, decoder = run(step, "triton", tokens)
    expected, reference = run(step, "reference", tokens)
    assert_same_caches(decoder.cache, reference.cache)
    assert error(o, expected) <= BOUND
    for row, (past, new) in enumerate(zip(step.lengths, step.num_new, strict=True)):
        if new:
            part = whole(step.shapes, tokens.part(row, past + new))
            assert error(o[row, :new], part[0, past:]) <= BOUND
        assert not o[row, new:].any()


def test_another_default_type_changes_no_bit(device):
    """As a model has it that was loaded in 16 bits."""
    step, default = STEPS[0], torch.get_default_dtype()
    tokens = tokens_of(step, device)
    expected, _ = run(step, "triton", tokens)
    torch.set_default_dtype(torch.float16)
    try:
        o, _ = run(step, "triton", tokens)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(o, expected)


@pytest.mark.parametrize("learned", [False, True], ids=["mean", "learned"])
def test_caches_after_every_length(learned, device):
    """Around every border; the windows of blocks that are not due hold NaN."""
    case = shapes("append", value_dim=7, window="own", page_blocks=2, learned=learned)
    lengths = (0, 3, 4, 7, 8, 9, 11, 12, 27, 28, 31, 32)
    step = Step(case, lengths, tuple((5, 3, 0, 1)[row % 4] for row in range(len(lengths))))
    tokens, caches = tokens_of(step, device), []
    for backend in ("triton", "reference"):
        decoder = Decoder(case, tokens, 5, backend)
        decoder.fill(list(lengths))
        decoder.append(list(step.num_new))
        caches.append(decoder.cache)
    assert_same_caches(*caches)


# A window in one part, one that begins in the middle of a ring, and one of several parts.
@pytest.mark.parametrize("window_size", [None, 5, 270])
def test_dense_attention_over_pages_and_windows_over_rings(window_size, monkeypatch, device):
    if window_size:
        monkeypatch.setattr(dispatch, "decode_units_of_part", lambda *sizes: 1)
    step = Step(shapes("dense", heads=6, groups=2, value_dim=6), (30, 300), (0, 2))
    tokens = tokens_of(step, device)
    o, decoder = run(step, "triton", tokens, True, window_size)
    expected, reference = run(step, "reference", tokens, True, window_size)
    assert_same_caches(decoder.dense, reference.dense)
    if window_size:
        assert_same_caches(decoder.rings, reference.rings)
    assert error(o, expected) <= BOUND
    whole_row = whole_dense(step.shapes, tokens.part(1, 302), window_size)
    assert error(o[1], whole_row[0, 300:]) <= BOUND


BITS = {**ALONE, "index": 16}


@pytest.mark.parametrize(
    ("dense", "past", "others"),
    [(False, 330, {}), (True, 1300, {}), (False, 330, BITS)],
    ids=["sparse", "dense", "index"],
)
def test_bits_do_not_depend_on_the_batch_the_table_or_the_parts(dense, past, others, device):
    """Several units alone, elsewhere in other caches, with a wider table and longer parts."""
    rules = geometry(2, 1, 16, 18, 1, 1, 300)
    step = Step(shapes("bits", rules, value_dim=64, page_blocks=2, **others), (20, past), (1, 1))
    tokens = tokens_of(step, device)
    expected, _ = run(step, "reference", tokens, dense)
    with mock.patch.object(dispatch, "decode_units_of_part", lambda *sizes: 1):
        together, _ = run(step, "triton", tokens, dense)
    assert error(together, expected) <= BOUND
    alone = type(tokens)(*(x[1:] for x in tokens))
    decoder = Decoder(step.shapes, alone, 1, "triton", spare_pages=17, seed=5)
    decoder.fill([past])
    o = (decoder.step_dense if dense else decoder.step)([1])
    assert torch.equal(o[0], together[1])


def test_parts_of_one_tile(monkeypatch, device):
    """No loop: keys are asked for before the rows are ready. Two parts of chosen blocks, and of the window."""
    monkeypatch.setattr(tiles, "decode_tile", lambda q, v, rows, kernel: tiles.Tile(16, 256, 4, 2))
    monkeypatch.setattr(dispatch, "decode_units_of_part", lambda *sizes: 1)
    step = Step(shapes("one tile", geometry(4, 4, 16, 20, 1, 1, 270), 6, 2), (20, 700), (2, 2))
    tokens = tokens_of(step, device)
    o, _ = run(step, "triton", tokens)
    expected, _ = run(step, "reference", tokens)
    assert error(o, expected) <= BOUND


@pytest.mark.parametrize("others", [{}, {"index": 8, "learned": True}, BITS], ids=str)
def test_what_a_batch_spares_changes_no_bit(others, monkeypatch, device):
    """Up to n blocks no choice is made, and where no compressed block ends none is written."""
    from trifocal.ops.decode.triton import append, attention

    step = Step(shapes("spared", geometry(8, 4, 16, 5, 1, 1, 11), 2, 2, **others), (5, 76), (2, 3))
    tokens = tokens_of(step, device)
    expected, decoder = run(step, "triton", tokens)
    spared = Decoder(step.shapes, tokens, 3, "triton")
    spared.fill(list(step.lengths))
    spared.spared = {"takes_all": True, "ends_block": False}
    monkeypatch.setattr(attention, "decode_choice_kernel", None)
    monkeypatch.setattr(append, "plan_scores", None)
    for kernel in ("learned_hidden_kernel", "learned_blocks_kernel"):
        monkeypatch.setattr(append, kernel, None)
    assert torch.equal(spared.step(list(step.num_new)), expected)
    for field in fields(spared.cache):
        held, wanted = getattr(spared.cache, field.name), getattr(decoder.cache, field.name)
        assert held is wanted is None or torch.equal(held.nan_to_num(9.0), wanted.nan_to_num(9.0))


@pytest.mark.parametrize(
    ("local", "num_new", "launches"),
    # A second new token may begin another block than the first.
    [(1, (1, 1, 0), 1), (1, (2, 1, 0), 2), (2, (5, 3, 0), 1), (0, (1, 1, 1), 2)],
)
def test_scores_from_the_launch_that_writes_change_no_bit(local, num_new, launches, monkeypatch, device):
    from trifocal.ops.decode.triton import append

    step = Step(shapes("fewer launches", geometry(4, 4, 16, 6, 1, local, 5), 2, 2, **BITS), (111, 259, 100), num_new)
    tokens = tokens_of(step, device)
    with mock.patch.object(dispatch, "decode_append_scores", lambda *sizes: False):
        expected, _ = run(step, "triton", tokens)
    kernel = mock.MagicMock()
    kernel.__getitem__.side_effect = append.append_kernel.__getitem__
    monkeypatch.setattr(append, "append_kernel", kernel)
    o, _ = run(step, "triton", tokens)
    assert kernel.__getitem__.call_count == launches
    assert torch.equal(o, expected)


def test_scores_of_the_past_read_no_new_key(device):
    """Another program may be writing them."""
    step = Step(shapes("the past", geometry(4, 4, 16, 6, 1, 2, 5), 2, 2, **BITS), (111, 259), (3, 1))
    decoder = Decoder(step.shapes, tokens_of(step, device), 3, "triton")
    decoder.fill(list(step.lengths))
    new, batch = decoder.append(list(step.num_new))
    scores = decoder.scores
    decoder.append_tokens(new._replace(k_idx=torch.full_like(new.k_idx, torch.nan)), batch)
    assert torch.equal(decoder.scores.nan_to_num(-1.0), scores.nan_to_num(-1.0))
    assert (scores > 0).any()


@pytest.mark.parametrize("takes_all", [False, True])
def test_the_reference_attends_by_scores_of_the_kernels(takes_all, device):
    """With more than 64 heads in a group, "auto" takes the kernels to append and the reference to attend."""
    lengths = (20, 65) if takes_all else (20, 150)
    step = Step(shapes("mixed", geometry(4, 4, 16, 6, 1, 1, 5), 2, 2, **BITS), lengths, (1, 2))
    tokens = tokens_of(step, device)
    expected, _ = run(step, "reference", tokens)
    decoder = Decoder(step.shapes, tokens, 2, "triton")
    decoder.fill(list(step.lengths))
    decoder.spared = {"takes_all": takes_all}
    new, batch = decoder.append(list(step.num_new))
    decoder.backend = "reference"
    assert error(decoder.attend(new, batch), expected) <= BOUND


@pytest.mark.parametrize("local", [0, 1, 2, 3])
def test_the_past_is_scored_where_every_new_key_lies_in_local_blocks(local):
    for block, num_new in itertools.product((1, 2, 3, 4), range(1, 9)):
        steps = itertools.product(range(4 * block), range(num_new))
        local_to_all = all(past // block > (past + token) // block - local for past, token in steps)
        rules = Geometry(1, 1, block, 4, 1, local, 1)
        assert dispatch.decode_append_scores(num_new, 1, rules) == local_to_all, (block, num_new)
        assert not dispatch.decode_append_scores(num_new, 2, rules)


def choices(step, tokens, monkeypatch, rotated=True):
    """The blocks that the kernels choose for the tokens of a step, [B, T, G, N], and those of the reference."""
    from trifocal.ops.decode.triton import attention as kernels

    launched = []

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(args)

    decoder = Decoder(step.shapes, tokens, max(step.num_new), "triton")
    if not rotated:
        decoder.rotary = torch.ones_like(decoder.rotary[0]), torch.zeros_like(decoder.rotary[1])
        decoder.rotary_idx = decoder.rotary if decoder.rotary_idx else None
    decoder.fill(list(step.lengths))
    monkeypatch.setattr(kernels, "decode_attend_kernel", Launch())
    monkeypatch.setattr(kernels, "decode_combine_kernel", Launch())
    decoder.step(list(step.num_new))
    cos, sin = decoder.rotary
    if step.shapes.index:
        q, k = (rotate(x, *decoder.rotary_idx) for x in (tokens.q_idx, tokens.k_idx))
        expected = select_blocks_by_index(q, k[:, :, 0], step.shapes.geometry, backend="reference")
    else:
        k_cmp = decode_cases.compressed(step.shapes, tokens.k_cmp)
        starts = torch.arange(k_cmp.shape[1]) * step.shapes.geometry.compression_stride
        q, k_cmp = rotate(tokens.q, cos, sin), rotate(k_cmp, cos[starts], sin[starts])
        _, lse = compressed_attention(q, k_cmp, k_cmp, step.shapes.geometry, backend="reference")
        expected = select_blocks(q, k_cmp, lse, step.shapes.geometry, backend="reference")
    (selected_blocks,) = (
        x for x in launched[0] if isinstance(x, torch.Tensor) and x.dtype == torch.int32 and x.ndim == 4
    )
    return selected_blocks, expected[:, step.lengths[0] :]


@pytest.mark.parametrize("index", [0, 8])
def test_half_of_many_blocks_are_chosen(index, monkeypatch, device):
    step = Step(shapes("choice", geometry(8, 4, 16, 20, 1, 1, 11), 6, 2, index=index), (641,), (8,))
    chosen, expected = choices(step, tokens_of(step, device), monkeypatch)
    assert torch.equal(chosen, expected)


@pytest.mark.parametrize("index", [0, 8])
def test_equal_blocks_tie_and_the_lower_indices_are_taken(index, monkeypatch, device):
    """All keys but those of one block are equal; that one raises the maximum of its tile."""
    step = Step(shapes("ties", geometry(4, 4, 16, 9, 0, 1, 4), 2, 2, index=index), (400,), (8,))
    tokens = tokens_of(step, device)
    k_cmp, k_idx = (torch.zeros_like(x) + x[:, :1] for x in (tokens.k_cmp, tokens.k_idx))
    k_cmp[:, 304:320] *= 6.3
    k_idx[:, 304:320] *= 6.3
    chosen, expected = choices(step, tokens._replace(k_cmp=k_cmp, k_idx=k_idx), monkeypatch, rotated=False)
    assert (expected == 19).any() and (expected[..., 4] == 4).any()
    assert torch.equal(chosen, expected)


PAPER = Geometry()


def of_model(why, heads, groups, dim, value_dim, **others):
    return decode_cases.Case(why, PAPER, heads, groups, dim, value_dim, page_blocks=4, **others)


# Shapes of large models, the production model, and heads that fill no tile; two of them with an index.
MODELS = (
    of_model("64 heads of 128", 64, 4, 128, 128),
    of_model("production, with an index", 12, 2, 64, 64, index=64, learned=True),
    of_model("the paper's", 16, 2, 192, 128, learned=True),
    of_model("an index alone", 16, 2, 128, 128, index=64, window="none", selected_only=True),
    of_model("one head a group", 3, 3, 64, 64),
    of_model("7 heads", 7, 1, 128, 64),
)
LENGTHS = (0, 31, 63, 512, 1500, 5003, 16384)
both_kinds = pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])


class Layer:
    """Caches full of random keys and values, whose steps leave them as they are."""

    def __init__(self, case, dtype, lengths=LENGTHS, num_new=1):
        tokens = draw(case, len(lengths), 8, dtype, "cuda")
        # Pages for the replays of a graph, too.
        self.decoder = Decoder(case, tokens, num_new, "triton", spare_pages=0, length=max(lengths) + 64)
        self.decoder.randomise(list(lengths))
        self.num_new = [num_new] * len(lengths)

    def step(self, backend="triton", *, rows=None, dense=False, rules=None):
        """A step of some of the sequences, on copies of the caches."""
        decoder = copy.deepcopy(self.decoder)
        decoder.backend = backend
        decoder.case = replace(decoder.case, geometry=rules or decoder.case.geometry)
        if rows is not None:
            decoder.tokens = type(decoder.tokens)(*(x[rows] for x in decoder.tokens))
            for name in ("rows", "lengths", "table"):
                setattr(decoder, name, getattr(decoder, name)[rows].contiguous())
        return (decoder.step_dense if dense else decoder.step)(self.num_new[: len(decoder.lengths)])


def each_model(models=MODELS):
    return pytest.mark.parametrize("case", models, ids=[case.why for case in models])


@needs_gpu
@each_model()
# Compiling is what takes the time, half a minute a case.
@pytest.mark.parametrize(("dtype", "num_new"), [(torch.bfloat16, 1), (torch.float32, 3), (torch.bfloat16, 8)], ids=str)
def test_values_at_real_sizes(case, dtype, num_new):
    """Where every block is chosen, no choice depends on rounding; in fp32 the choice is the reference's."""
    layer = Layer(case, dtype, num_new=num_new)
    bound = allowed(dtype, torch.device("cuda"))
    ways = [{"rules": Geometry(num_selected_blocks=300)}, {"dense": True}, *[{}] * (dtype == torch.float32)]
    for way in ways:
        assert error(layer.step(**way), layer.step("reference", **way).double()) <= bound, way


@needs_gpu
@each_model(MODELS[:4])
@both_kinds
def test_equal_bits_in_any_batch(case, dense):
    lengths = tuple(torch.randint(0, 9000, (150,), generator=torch.Generator().manual_seed(1)).tolist())
    layer = Layer(case, torch.bfloat16, lengths)
    together = layer.step(dense=dense)
    for rows in ([0], [149], [3, 7, 70], list(range(40, 100))):
        assert torch.equal(layer.step(dense=dense, rows=rows), together[rows])
    assert torch.equal(layer.step(dense=dense), together)


@needs_gpu
@each_model()
@both_kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equal_bits_with_any_table_and_parts(case, dense, dtype, monkeypatch):
    """So many more columns that kernels are compiled for wider choices; entries past the end are no pages."""
    layer = Layer(case, dtype, lengths=(40, 3001, 16384, 70000))
    results = []
    for units, spare in ((1, 0), (tiles.DECODE_GROUP, 0), (1, 300)):
        monkeypatch.setattr(dispatch, "decode_units_of_part", lambda *sizes, units=units: units)
        table = layer.decoder.table
        layer.decoder.table = torch.cat((table, table.new_full((len(table), spare), -(2**30))), 1)
        results.append(layer.step(dense=dense))
    assert all(torch.equal(o, results[0]) for o in results[1:])


@needs_gpu
def test_a_nan_stays_with_its_sequence():
    layer = Layer(MODELS[1], torch.bfloat16)
    expected = layer.step()
    layer.decoder.tokens.q[4, :, 3] = torch.nan
    o = layer.step()
    assert o[4, 0, 3].isnan().all()
    kept = torch.arange(len(LENGTHS)) != 4
    assert torch.equal(o[kept], expected[kept])


@needs_gpu
@each_model(MODELS[:4])
def test_a_recorded_step_is_replayed_while_sequences_grow(case):
    """Each kernel may begin while the one before ends: one that reads too early shows in one of many replays."""
    decoder = Layer(case, torch.bfloat16, lengths=(0, 17, 63, 500, 9000, 40000)).decoder
    plain, ones = copy.deepcopy(decoder), [1] * 6
    decoder.step(ones)
    decoder.lengths.copy_(plain.lengths)
    new, batch = decoder.new_tokens(ones), replace(decoder.batch(ones), lengths=decoder.lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.append_tokens(new, batch)
        o = decoder.attend(new, batch)
        decoder.lengths.add_(1)
    for _ in range(60):
        graph.replay()
        plain.append_tokens(new, replace(batch, lengths=plain.lengths))
        assert torch.equal(o, plain.attend(new, replace(batch, lengths=plain.lengths)))
        plain.lengths += 1


def test_more_strides_a_block_than_a_tile_holds_are_refused(device):
    step = Step(shapes("too many strides", geometry(1, 1, 80, 2, 1, 1, 4)), (10,), (1,))
    with pytest.raises(ValueError, match="at most 64 strides"):
        run(step, "triton", tokens_of(step, device))


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_a_scale_may_be_a_tensor_and_must_be_finite(dense, device):
    step = Step(shapes("a scale", window="shared"), (30,), (1,))
    decoder = Decoder(step.shapes, tokens_of(step, device), 1, "triton")
    decoder.fill([30])

    def attend(scale):
        if dense:
            return decode_dense_attention(new.q, decoder.dense, batch, decoder.rotary, scale=scale, backend="triton")
        return decode_attention(
            new.q, new.gates, decoder.cache, batch, USUAL, decoder.rotary, window=True, scale=scale, backend="triton"
        )

    decoder.step_dense([1])
    decoder.lengths -= 1
    new, batch = decoder.append([1])
    assert torch.equal(attend(torch.tensor(0.25)), attend(0.25))
    with pytest.raises(ValueError, match="scale must be finite, got nan"):
        attend(float("nan"))
