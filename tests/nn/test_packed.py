"""The dense baseline on packed documents: each attends as it would alone, at the cost of its own length."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import trifocal.nn.packed as packed_module
from tests.devices import needs_gpu
from trifocal.nn.packed import packed_attention
from trifocal.ops import Documents
from trifocal.ops.dispatch import backend_choices

# Alike and whole; alike but for the last; in rows of 16; across every multiple of the longest; one; of one token.
PACKS = {
    "alike": [16] * 4,
    "alike but for the last": [16] * 3 + [5],
    "in rows": [16, 4, 12, 9, 7, 16],
    "across": [3, 11, 1, 13, 7, 2, 12],
    "one": [21],
    "single tokens": [1] * 6,
}


def inputs(lengths, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, sum(lengths), *s, generator=generator, dtype=dtype) for s in ((6, 8), (2, 8), (2, 5)))
    return [x.to(device).requires_grad_() for x in drawn]


def borders(lengths):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def alone(q, k, v, lengths):
    """A softmax for each document by itself, without SDPA."""
    found = []
    for q_THD, k_TGD, v_TGV in zip(*(x[0].split(lengths) for x in (q, k, v)), strict=True):
        k_THD, v_THV = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in (k_TGD, v_TGV))
        scores = torch.einsum("thd,shd->hts", q_THD, k_THD) * q.shape[3] ** -0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        found.append(torch.einsum("hts,shv->thv", scores.masked_fill(future, -torch.inf).softmax(-1), v_THV))
    return torch.cat(found)[None]


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_documents_attend_as_if_alone(lengths, device):
    dtype = torch.float64
    x = inputs(lengths, dtype, device)
    documents = Documents.from_cu_seqlens(borders(lengths), sum(lengths)).to(device)
    upstream = torch.randn(1, sum(lengths), 6, 5, generator=torch.Generator().manual_seed(1), dtype=dtype).to(device)
    eps = torch.finfo(dtype).eps
    for given in (documents, documents._replace(max_length=None, aligned=False)):
        found, expected = packed_attention(*x, given), alone(*x, lengths)
        torch.testing.assert_close(found, expected, rtol=0, atol=64 * eps)
        gradients = [torch.autograd.grad(o, x, upstream) for o in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=0, atol=512 * eps)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (PACKS["alike"], (16, True)),
        (PACKS["in rows"], (16, True)),
        (PACKS["across"], (16, False)),
        ([100] * 3, (100, True)),
        ([3, 7], (8, False)),
        (PACKS["one"], (21, True)),
    ],
)
def test_length_of_rows(lengths, expected):
    """Where no document crosses a multiple of the longest, or of the next power of two, rows are whole."""
    documents = Documents.from_cu_seqlens(borders(lengths), sum(lengths))
    assert (documents.max_length, documents.aligned) == expected
    assert documents.max_length >= max(lengths)


def products(call):
    # PyTorch does not count those of the CPU's fused kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_costs_what_a_batch_costs():
    """32 documents of 64 beside 32 rows of 64: as many products; documents of other lengths, at most twice as many."""
    lengths = [64] * 32
    q, k, v = (x.detach() for x in inputs(lengths, torch.float32))
    v = torch.randn(*v.shape[:3], k.shape[3])

    def cost(lengths):
        documents = Documents.from_cu_seqlens(borders(lengths), sum(lengths))
        return products(lambda: packed_attention(q, k, v, documents))

    rows_q, rows_k, rows_v = (x.view(32, 64, *x.shape[2:]).transpose(1, 2) for x in (q, k, v))
    batch = products(
        lambda: scaled_dot_product_attention(
            rows_q, *(x.repeat_interleave(3, 1) for x in (rows_k, rows_v)), is_causal=True
        )
    )
    assert cost(lengths) == batch > 0
    assert cost([60, 64, 50, 64, 18] * 8) <= 2 * batch


@pytest.mark.parametrize(
    ("device", "dtype", "width", "obstacle"),
    [
        ("cpu", torch.bfloat16, 64, "not on a CUDA device"),
        ("cuda", torch.float32, 64, "bfloat16 and float16"),
        ("cuda", torch.bfloat16, 256, "up to 192"),
        ("cuda", torch.bfloat16, 192, ""),
    ],
)
def test_rules_of_the_choice(device, dtype, width, obstacle, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    found = packed_module.flash_attention_obstacle(device, 0, dtype, width)
    assert (obstacle in found) if obstacle else not found


def test_varlen_is_asked_for_what_it_can_do(monkeypatch):
    """One width of 8, 16, 24 …, the bound of the host, the scale of D: with the operator's own arithmetic in its place.

    The kernel needs a GPU, where `test_values_and_gradients_on_a_gpu` runs it.
    """
    lengths = PACKS["across"]
    asked = []

    def varlen_attn(q, k, v, *rest, scale, **options):
        asked.append((q.shape, k.shape, v.shape, *rest[2:], options["window_size"]))
        assert scale == 12**-0.5
        return alone(q[None] * (q.shape[2] ** 0.5 * scale), k[None], v[None], lengths)[0]

    monkeypatch.setattr(packed_module, "varlen_attn", varlen_attn)
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 12), (2, 12), (2, 5))
    x = [torch.randn(1, sum(lengths), *s, generator=generator, dtype=torch.float64) for s in shapes]
    documents = Documents.from_cu_seqlens(borders(lengths), sum(lengths))
    found = packed_module._varlen(*x, documents)
    torch.testing.assert_close(found, alone(*x, lengths), rtol=0, atol=1e-14)
    total = sum(lengths)
    assert asked == [((total, 6, 16), (total, 2, 16), (total, 2, 16), 16, 16, (-1, 0))]


GPU_LENGTHS = [3, 1, 500, 37, 128, 1, 355, 999]


def gpu_inputs(lengths, dtype=torch.bfloat16, dim=64, value_dim=64):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, upstream = (
        torch.randn(1, sum(lengths), *s, generator=generator, device="cuda", dtype=dtype)
        for s in ((12, dim), (2, dim), (2, value_dim), (12, value_dim))
    )
    return [x.requires_grad_() for x in (q, k, v)], upstream


def packed(lengths, padding=0):
    """Documents, and behind them empty ones, as the trainer pads them."""
    documents = Documents.from_cu_seqlens(borders(lengths), sum(lengths)).to("cuda")
    if not padding:
        return documents
    padded = torch.nn.functional.pad(documents.cu_seqlens, (0, padding), value=sum(lengths))
    return documents._replace(cu_seqlens=padded)


def by_sdpa(q, k, v, lengths):
    """PyTorch's attention, document by document."""
    found = []
    for parts in zip(*(x[0].split(lengths) for x in (q, k, v)), strict=True):
        q_HTD, *keys_values = (x.transpose(0, 1) for x in parts)
        k_HTD, v_HTV = (x.repeat_interleave(q.shape[2] // x.shape[0], 0) for x in keys_values)
        found.append(scaled_dot_product_attention(q_HTD, k_HTD, v_HTV, is_causal=True).transpose(0, 1))
    return torch.cat(found)[None]


def gradients(o, x, upstream):
    return [o, *torch.autograd.grad(o, x, upstream)]


@needs_gpu
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
def test_values_and_gradients_on_a_gpu(dtype, dim, value_dim, row, padding):
    """Against fp64: no further from it than twice what SDPA is, document by document, in the same type."""
    x, upstream = gpu_inputs(GPU_LENGTHS, dtype, dim, value_dim)
    before = {key: count for key, count in backend_choices().items() if key[:2] == ("packed_attention", row)}
    found = gradients(packed_attention(*x, packed(GPU_LENGTHS, padding)), x, upstream)
    after = {key: count for key, count in backend_choices().items() if key[:2] == ("packed_attention", row)}
    assert sum(after.values()) == sum(before.values()) + 1
    plain = gradients(by_sdpa(*x, GPU_LENGTHS), x, upstream)
    exact_x = [part.detach().double().requires_grad_() for part in x]
    exact = gradients(by_sdpa(*exact_x, GPU_LENGTHS), exact_x, upstream.double())
    floor = torch.finfo(dtype).eps
    for given, other, wanted in zip(found, plain, exact, strict=True):
        allowed = 2 * (other.double() - wanted).abs().max() + floor * wanted.abs().max()
        assert (given.double() - wanted).abs().max() <= allowed


@needs_gpu
@pytest.mark.filterwarnings("ignore")
def test_compiled_as_one_graph():
    """One graph for documents of other lengths, as many of them: nothing is read off the device."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(packed_attention, fullgraph=True, dynamic=False)
    for lengths in ([200, 312, 512], [512, 1, 511], [5, 507, 512]):
        x, upstream = gpu_inputs(lengths)
        documents = packed(lengths)._replace(max_length=512, aligned=True)
        given = gradients(compiled(*x, documents), x, upstream)
        torch.testing.assert_close(given, gradients(packed_attention(*x, documents), x, upstream))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@needs_gpu
# PyTorch's warning of a gradient that is accumulated on another stream than it was made on is meant here.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_recorded_and_replayed_with_other_documents():
    """A CUDA graph of forward and backward, replayed with other borders and empty documents behind them."""
    x, upstream = gpu_inputs([1024])
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
        documents.cu_seqlens.fill_(1024)
        documents.cu_seqlens[: len(lengths) + 1] = borders(lengths).cuda()
        graph.replay()
        expected = gradients(by_sdpa(*x, lengths), x, upstream)
        torch.testing.assert_close(recorded, expected, rtol=0.02, atol=0.02)
