"""The dense twin on packed documents, on a GPU: FlashAttention's kernel, compiled, recorded, and at a batch's cost."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trifocal.nn.packed import packed_attention
from trifocal.ops import Documents
from trifocal.ops.dispatch import backend_choices

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [3, 1, 500, 37, 128, 1, 355, 999]


def inputs(lengths, dtype=torch.bfloat16, dim=64, value_dim=64, heads=(12, 2)):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((heads[0], dim), (heads[1], dim), (heads[1], value_dim), (heads[0], value_dim))
    q, k, v, upstream = (
        torch.randn(1, sum(lengths), *s, generator=generator, device="cuda", dtype=dtype) for s in shapes
    )
    return [x.requires_grad_() for x in (q, k, v)], upstream


def packed(lengths, padding=0):
    """Documents, and behind them empty ones, as the trainer pads them."""
    borders = torch.tensor([0, *lengths]).cumsum(0)
    documents = Documents.from_cu_seqlens(borders, sum(lengths)).to("cuda")
    if not padding:
        return documents
    padded = torch.nn.functional.pad(documents.cu_seqlens, (0, padding), value=sum(lengths))
    return documents._replace(cu_seqlens=padded)


def alone(q, k, v, lengths):
    found = []
    for parts in zip(*(x[0].split(lengths) for x in (q, k, v)), strict=True):
        q_HTD, *keys_values = (x.transpose(0, 1) for x in parts)
        k_HTD, v_HTV = (x.repeat_interleave(q.shape[2] // x.shape[0], 0) for x in keys_values)
        found.append(scaled_dot_product_attention(q_HTD, k_HTD, v_HTV, is_causal=True).transpose(0, 1))
    return torch.cat(found)[None]


def gradients(o, x, upstream):
    return [o, *torch.autograd.grad(o, x, upstream)]


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "row"),
    [
        (torch.bfloat16, 64, 64, "varlen"),
        (torch.float16, 192, 128, "varlen"),
        (torch.bfloat16, 20, 12, "varlen"),
        (torch.bfloat16, 256, 256, "rows"),
        (torch.float32, 64, 32, "rows"),
    ],
)
def test_values_and_gradients(dtype, dim, value_dim, row, padding):
    """Against fp64: no further from it than twice what SDPA is, document by document, in the same type."""
    x, upstream = inputs(LENGTHS, dtype, dim, value_dim)
    before = {key: count for key, count in backend_choices().items() if key[:2] == ("packed_attention", row)}
    found = gradients(packed_attention(*x, packed(LENGTHS, padding)), x, upstream)
    after = {key: count for key, count in backend_choices().items() if key[:2] == ("packed_attention", row)}
    assert sum(after.values()) == sum(before.values()) + 1
    plain = gradients(alone(*x, LENGTHS), x, upstream)
    exact_x = [part.detach().double().requires_grad_() for part in x]
    exact = gradients(alone(*exact_x, LENGTHS), exact_x, upstream.double())
    floor = torch.finfo(dtype).eps
    for given, other, wanted in zip(found, plain, exact, strict=True):
        allowed = 2 * (other.double() - wanted).abs().max() + floor * wanted.abs().max()
        assert (given.double() - wanted).abs().max() <= allowed


@pytest.mark.filterwarnings("ignore")
def test_compiled_as_one_graph():
    """One graph for documents of other lengths, as many of them: nothing is read off the device."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(packed_attention, fullgraph=True, dynamic=False)
    for lengths in ([200, 312, 512], [512, 1, 511], [5, 507, 512]):
        x, upstream = inputs(lengths)
        documents = packed(lengths)._replace(max_length=512, aligned=True)
        given = gradients(compiled(*x, documents), x, upstream)
        torch.testing.assert_close(given, gradients(packed_attention(*x, documents), x, upstream))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# PyTorch's warning of a gradient that is accumulated on another stream than it was made on is meant here.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_recorded_and_replayed_with_other_documents():
    """A CUDA graph of forward and backward, replayed with other borders and empty documents behind them."""
    x, upstream = inputs([1024])
    documents = packed([512, 500, 12], padding=5)._replace(max_length=512)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(packed_attention(*x, documents), x, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = gradients(packed_attention(*x, documents), x, upstream)
    for lengths in ([512, 500, 12], [100, 412, 1, 511], [512, 512]):
        borders = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        documents.cu_seqlens.fill_(1024)
        documents.cu_seqlens[: borders.numel()] = borders
        graph.replay()
        expected = gradients(alone(*x, lengths), x, upstream)
        for given, wanted in zip(recorded, expected, strict=True):
            torch.testing.assert_close(given, wanted, rtol=0.02, atol=0.02)


def milliseconds(call, repeats=20):
    """The least of some calls: other tests may use the GPU at the same time."""
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return min(begin.elapsed_time(end) for begin, end in itertools.pairwise(marks))


def test_costs_no_more_than_a_batch():
    """16 rows of 2,048 tokens cut into documents take no longer than twice the whole rows."""
    lengths = [1000, 1048, 300, 700, 1048, 2048, 20, 2028] * 4
    x, upstream = inputs(lengths)
    documents = packed(lengths, padding=96)._replace(max_length=2048, aligned=True)
    rows = [part.detach().view(16, 2048, *part.shape[2:]).transpose(1, 2).requires_grad_() for part in x]
    upstream_rows = upstream.view(16, 2048, 12, 64).transpose(1, 2)

    def batch():
        q, k, v = rows
        k, v = (part.repeat_interleave(6, 1) for part in (k, v))
        return torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), rows, upstream_rows)

    assert milliseconds(lambda: gradients(packed_attention(*x, documents), x, upstream)) <= 2 * milliseconds(batch)
