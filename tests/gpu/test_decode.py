"""Decoding on a GPU: values against the reference, equal bits in any batch, one recorded graph while sequences grow."""

from dataclasses import replace

import pytest
import torch

from trifocal import Geometry
from trifocal.ops import (
    DecodeBatch,
    DenseCache,
    SparseCache,
    append_dense,
    append_sparse,
    decode_attention,
    decode_dense_attention,
    dispatch,
    tiles,
)
from trifocal.testing.tolerances import allowed, error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAPER = Geometry()
PAGE = 256
# Heads, KV heads, D, V: shapes of large models, the production model, and heads that fill no tile.
SHAPES = ((64, 4, 128, 128), (12, 2, 64, 64), (16, 2, 192, 128), (3, 3, 64, 64), (7, 1, 128, 64))
LENGTHS = (0, 31, 63, 512, 1500, 5003, 16384)


class Layer:
    """Caches full of random keys and values, and new tokens of sequences of several lengths."""

    def __init__(self, shape, dtype, lengths=LENGTHS, num_new=1, num_pages=None, seed=0):
        heads, groups, dim, value_dim = shape
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.dtype, batch = dtype, len(lengths)
        pages = num_pages or -(-(max(lengths) + 64) // PAGE)
        ring, raw = PAPER.window_size + 8, PAPER.compression_block_size + 8
        stripes = PAGE // PAPER.compression_stride
        self.cache = SparseCache(
            *(self.draw(batch * pages, groups, PAGE, size) for size in (dim, value_dim)),
            *(self.draw(batch * pages, groups, stripes, size) for size in (dim, value_dim)),
            *(self.draw(batch, groups, ring, size) for size in (dim, value_dim)),
            *(self.draw(batch, groups, raw, size) for size in (dim, value_dim)),
        )
        order = torch.randperm(batch * pages, generator=self.generator, device="cuda")
        self.batch = DecodeBatch(
            torch.arange(batch, device="cuda", dtype=torch.int32),
            torch.tensor(lengths, device="cuda", dtype=torch.int32),
            torch.full((batch,), num_new, device="cuda", dtype=torch.int32),
            order.to(torch.int32).view(batch, pages),
        )
        self.q = self.draw(batch, num_new, heads, dim)
        self.new = [self.draw(batch, num_new, groups, size) for _ in range(3) for size in (dim, value_dim)]
        self.gates = torch.rand(batch, num_new, heads, 3, generator=self.generator, device="cuda")
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device="cuda", dtype=torch.float64) / dim)
        angles = torch.arange(pages * PAGE, device="cuda", dtype=torch.float64)[:, None] * frequencies
        self.rotary = angles.cos().float(), angles.sin().float()

    def draw(self, *shape):
        return torch.randn(shape, generator=self.generator, device="cuda").to(self.dtype)

    def step(self, backend, geometry=PAPER, rows=slice(None)):
        cache = copied(self.cache)
        return attend(self, cache, taken(self.batch, rows), backend, geometry, rows)

    def dense_step(self, backend, rows=slice(None)):
        cache, batch = DenseCache(self.cache.k_slc.clone(), self.cache.v_slc.clone()), taken(self.batch, rows)
        append_dense(cache, batch, self.new[2][rows], self.new[3][rows], self.rotary, backend)
        return decode_dense_attention(self.q[rows], cache, batch, self.rotary, backend=backend)


def copied(cache):
    return replace(cache, **{name: getattr(cache, name).clone() for name in cache.__dataclass_fields__})


def taken(batch, rows):
    return DecodeBatch(*(getattr(batch, name)[rows].contiguous() for name in batch.__dataclass_fields__))


def attend(layer, cache, batch, backend, geometry=PAPER, rows=slice(None)):
    append_sparse(cache, batch, *(x[rows] for x in layer.new), geometry, layer.rotary, backend=backend)
    return decode_attention(
        layer.q[rows], layer.gates[rows], cache, batch, geometry, layer.rotary, window=True, backend=backend
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_new", [1, 3, 8])
def test_values(shape, dtype, num_new):
    """Where every block is chosen, no choice depends on rounding."""
    layer = Layer(shape, dtype, num_new=num_new)
    everything = Geometry(num_selected_blocks=300)
    bound = allowed(dtype, torch.device("cuda"))
    for step in (lambda backend: layer.step(backend, everything), layer.dense_step):
        assert error(step("triton"), step("reference").double()) <= bound


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_choice(shape):
    layer = Layer(shape, torch.float32, num_new=2)
    bound = allowed(torch.float32, torch.device("cuda"))
    assert error(layer.step("triton"), layer.step("reference").double()) <= bound


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_equal_bits_in_any_batch(shape, dense):
    lengths = tuple(torch.randint(0, 9000, (150,), generator=torch.Generator().manual_seed(1)).tolist())
    layer = Layer(shape, torch.bfloat16, lengths)
    step = layer.dense_step if dense else layer.step
    together = step("triton")
    for rows in ([0], [149], [3, 7, 70], list(range(40, 100))):
        assert torch.equal(step("triton", rows=rows), together[rows])
    assert torch.equal(step("triton"), together)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equal_bits_with_any_table_and_parts(shape, dense, dtype, monkeypatch):
    """So many more columns that kernels are compiled for wider choices; entries past the end are no pages."""
    layer = Layer(shape, dtype, lengths=(40, 3001, 16384, 70000))
    step = layer.dense_step if dense else layer.step
    results = []
    for units, spare in ((1, 0), (tiles.DECODE_GROUP, 0), (1, 300)):
        monkeypatch.setattr(dispatch, "decode_units_of_part", lambda *sizes, units=units: units)
        table = layer.batch.block_table
        wide = torch.cat((table, table.new_full((len(table), spare), -(2**30))), 1)
        layer.batch = replace(layer.batch, block_table=wide)
        results.append(step("triton"))
    assert all(torch.equal(o, results[0]) for o in results[1:])


def test_a_nan_stays_with_its_sequence():
    layer = Layer(SHAPES[1], torch.bfloat16)
    expected = layer.step("triton")
    layer.q[4, 0, 3] = torch.nan
    o = layer.step("triton")
    assert o[4, 0, 3].isnan().all()
    kept = torch.arange(len(LENGTHS)) != 4
    assert torch.equal(o[kept], expected[kept])


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_recorded_step_is_replayed_while_sequences_grow(shape):
    layer = Layer(shape, torch.bfloat16, lengths=(0, 17, 500, 3000))
    cache, plain = copied(layer.cache), copied(layer.cache)
    attend(layer, copied(layer.cache), layer.batch, "triton")
    lengths = layer.batch.lengths.clone()
    batch = replace(layer.batch, lengths=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend(layer, cache, batch, "triton")
        lengths.add_(1)
    grown = layer.batch.lengths.clone()
    for _ in range(40):
        graph.replay()
        expected = attend(layer, plain, replace(layer.batch, lengths=grown), "triton")
        grown += 1
        assert torch.equal(o, expected)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_replays_have_the_bits_of_launches_that_wait_for_one_another(shape, monkeypatch):
    """A kernel that reads before the one before it has written would show up in one of many replays."""
    from trifocal.ops.decode.triton import append, attention

    layer = Layer(shape, torch.bfloat16, lengths=(63, 1500, 9000, 40000))
    cache = copied(layer.cache)
    with monkeypatch.context() as patch:
        for module in (append, attention):
            patch.setattr(module, "dependent_launch", lambda device: {"DEPENDENT": False})
        expected = attend(layer, copied(layer.cache), layer.batch, "triton")
    attend(layer, cache, layer.batch, "triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [attend(layer, cache, layer.batch, "triton") for _ in range(4)]
    for _ in range(200):
        for o in outputs:
            o.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(o, expected) for o in outputs)
