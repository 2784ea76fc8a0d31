"""The kernels, interpreted, read tensors that lie anyhow in memory: as the same numbers without gaps, bit for bit."""

import functools

import pytest
import torch

from tests.models.conftest import make_config, make_model
from tests.ops import decode_cases
from tests.ops.cases import USUAL, Case, draw
from trifocal import nsa_attention
from trifocal.inference import CachedModel
from trifocal.inference.sampler import SamplingTensors, draw_step
from trifocal.ops import DenseCache, SparseCache, WindowCache, dispatch, tiles
from trifocal.ops.decode import linear as decode_linear
from trifocal.ops.triton.common import unit_stride
from trifocal.ops.triton.launch import Kernel
from trifocal.testing.inputs import cotangent

__all__ = ["make_config", "make_model"]
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the reference of a GPU is not this one")

PLAIN = Case("2 heads a group, D != V, two batch entries", USUAL, 19, batch=2, heads=4, groups=2, value_dim=5)
PACKED = Case("packed", USUAL, 26, lengths=(1, 5, 20), heads=4, groups=2)


def within(x, *before):
    """x inside of a larger tensor: so many NaN, or -1, before it in each of the last dimensions, and one behind."""
    first = x.ndim - len(before)
    sizes = [size + n + 1 for size, n in zip(x.shape[first:], before, strict=True)]
    memory = torch.full((*x.shape[:first], *sizes), torch.nan if x.is_floating_point() else -1, dtype=x.dtype)
    part = memory[(..., *(slice(n, n + size) for n, size in zip(before, x.shape[first:], strict=True)))]
    return part.copy_(x)


def permuted(x, *order):
    """The numbers of x, with its dimensions in this order in memory."""
    back = sorted(range(x.ndim), key=lambda n: order[n])
    return x.permute(order).contiguous().permute(back)


def heads_first(x):
    """Of a cache [pages, G, tokens, *]: tokens first."""
    return permuted(x, 0, 2, 1, 3)


def columns(x):
    """Some columns of a wider projection, at an odd place in memory."""
    return within(x.flatten(2), 3).unflatten(2, x.shape[2:])


def features_first(x):
    return permuted(x, 3, 0, 2, 1)


def one_of_two(x):
    """One of two numbers that lie side by side, as real and imaginary parts do."""
    return torch.stack((x, torch.full_like(x, -1)), -1)[..., 0]


def gradients(inputs, case, d_o, cu_seqlens=None):
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = nsa_attention(*leaves, case.geometry, cu_seqlens=cu_seqlens, backend="triton")
    return o, *torch.autograd.grad(o, leaves, d_o)


def assert_same_bits(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layout", "d_o_layout"),
    [
        (lambda x: columns(heads_first(x)), lambda d_o: d_o[:, :, :1].expand_as(d_o)),
        (lambda x: x[:1].expand_as(x), features_first),
    ],
    ids=["columns", "one batch entry for all"],
)
def test_inputs_and_gradients_of_the_whole_attention(layout, d_o_layout):
    inputs = [layout(x) for x in draw(PLAIN, torch.float32)]
    d_o = d_o_layout(cotangent(torch.empty(2, 19, 4, 5)))
    expected = gradients([x.contiguous() for x in inputs], PLAIN, d_o.contiguous())
    assert_same_bits(gradients(inputs, PLAIN, d_o), expected)


def test_borders_of_documents():
    inputs, d_o = draw(PACKED, torch.float32), torch.ones(()).expand(1, 26, 4, 8)
    expected = gradients(inputs, PACKED, d_o, PACKED.cu_seqlens)
    assert_same_bits(gradients(inputs, PACKED, d_o, one_of_two(PACKED.cu_seqlens)), expected)


@pytest.mark.parametrize(("heads", "copied"), [(2, False), (3, True)])
def test_heads_that_32_bits_do_not_reach_are_copied(heads, copied):
    """A kernel counts from the first head to the last in 32 bits; on the meta device they take no memory."""
    x = torch.empty_strided((1, 5, heads, 8), (8, 8, 2**30 - 1, 1), device="meta")
    assert (unit_stride(x) is not x) == copied
    assert unit_stride(x).is_contiguous() == copied


def layer_of_a_pool(x):
    """[pages, G, tokens, *] as one of three layers that share their memory page by page."""
    return within(x[:, None], 1, 0, 0, 0)[:, 0]


@pytest.mark.parametrize(
    ("cache_layout", "new_layout", "learned"),
    [(layer_of_a_pool, columns, True), (lambda x: within(heads_first(x), 3), features_first, False)],
    ids=["layer of a pool, learned", "tokens first, mean"],
)
def test_caches_and_new_tokens_of_decoding(cache_layout, new_layout, learned, monkeypatch):
    monkeypatch.setattr(dispatch, "decode_units_of_part", lambda *sizes: tiles.DECODE_GROUP)
    case = decode_cases.Case("", USUAL, 4, 2, 8, 6, learned=learned, index=8)
    tokens = decode_cases.draw(case, 2, 68, torch.float32)
    found = []
    for cache, new, table in (
        (lambda x: x, lambda x: x, lambda x: x),
        (cache_layout, new_layout, lambda x: within(x, 2)),
    ):
        decoder = decode_cases.Decoder(case, tokens, 2, "triton")
        decoder.fill([21, 66])
        decoder.cache = SparseCache(*(cache(x) for x in vars(decoder.cache).values()))
        decoder.rings = WindowCache(*map(cache, vars(decoder.windows(9)).values()))
        decoder.dense = DenseCache(*map(cache, vars(decoder.dense).values()))
        decoder.table = table(decoder.table)
        new_tokens = decoder.new_tokens
        decoder.new_tokens = lambda num_new, of=new_tokens, new=new: type(tokens)(*map(new, of(num_new)))
        outputs = []
        for attend in (decoder.step, decoder.step_dense, functools.partial(decoder.step_dense, window_size=9)):
            decoder.lengths.copy_(torch.tensor([21, 66]))
            outputs.append(attend([2, 1]))
        held = [x for kept in (decoder.cache, decoder.dense, decoder.rings) for x in vars(kept).values()]
        found.append([x.nan_to_num(77.0) for x in (*outputs, *held)])
    assert_same_bits(*found)


def test_weights_of_a_cached_model(make_model, monkeypatch):
    """Transposed weights, and norms with gaps: their copies have none."""
    monkeypatch.setattr(decode_linear, "_runs_kernels", lambda weight, backend: True)
    found = []
    for one, two in ((torch.clone, torch.clone), (one_of_two, lambda x: permuted(x, 1, 0))):
        model = make_model(attention="dense", tie_embeddings=False).float()
        for parameter in model.parameters():
            parameter.data = (two if parameter.ndim == 2 else one)(parameter.data)
        cached = CachedModel(model, max_sequences=1, max_length=4)
        found.append([cached.decode([cached.admit()], [[3, 1, 4]])])
    assert found[0][0].isfinite().all()
    assert_same_bits(*found)


def test_a_step_runs_on_the_device_of_its_tensors(make_model, monkeypatch):
    """Which need not be the current one: a model on the second of two GPUs."""
    entered, launched, launch = [], [], Kernel.__getitem__

    class DeviceOf:
        def __init__(self, x):
            self.device = x.device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.pop()

    def watched(kernel, grid):
        launched.append((kernel.__name__, entered[-1:]))
        return launch(kernel, grid)

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    monkeypatch.setattr(Kernel, "__getitem__", watched)
    monkeypatch.setattr(decode_linear, "_runs_kernels", lambda weight, backend: True)
    cached = CachedModel(make_model(attention="dense").float(), max_sequences=1, max_length=4)
    logits = cached.decode([cached.admit()], [[3]])[:, 0]
    settings, books = SamplingTensors.empty(1, 31, logits.device), (torch.ones(1, dtype=torch.int32), None)
    tokens, drawn = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.float64)
    draw_step(logits, settings, *books, tokens, drawn, filtered=False, backend="triton")
    kernels = {"decode_embedding_kernel", "decode_linear_kernel", "draw_tokens_kernel"}
    assert {name for name, _ in launched} == kernels
    assert all(devices == [logits.device] for _, devices in launched), launched
