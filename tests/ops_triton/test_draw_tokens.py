"""The kernels that end a decode step: the tokens, log-probabilities and books of the PyTorch draw."""

from dataclasses import replace

import pytest
import torch

from tests.devices import needs_gpu
from trifocal.inference.sampler import Sampling, SamplingTensors, draw_step
from trifocal.ops.decode.triton import draw_tokens as kernel

# A low temperature makes unlikely logits infinite, and the generator of numbers counts in 64 bits.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PLAIN = (
    Sampling(seed=1),
    Sampling(temperature=0),
    Sampling(temperature=0.7, seed=-5, repetition_penalty=1.3),
    Sampling(temperature=1e-30, seed=2**64 - 1),
    Sampling(top_k=1, repetition_penalty=3.0),
)
FILTERED = (Sampling(top_k=3, seed=3), Sampling(top_p=0.6, seed=4), Sampling(min_p=0.2, temperature=2.0, seed=5))
VOCAB_SIZE = 19


def settings_of(samplings, vocab_size=VOCAB_SIZE):
    settings = SamplingTensors.empty(len(samplings), vocab_size, torch.device(DEVICE))
    for row, sampling in enumerate(samplings):
        settings.set_row(row, sampling, torch.arange(row, vocab_size, 3))
    return settings


def logits_of(rows, vocab_size=VOCAB_SIZE):
    return (3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0), device="cpu")).to(DEVICE)


@pytest.fixture(autouse=True)
def tensors_are_on_the_device():
    with torch.device(DEVICE):
        yield


def run(backend, logits, settings, lengths, *, filtered=False, grows=True):
    rows = len(logits)
    books = {
        "lengths": lengths.clone(),
        "seen": settings.seen.clone(),
        "tokens": torch.full((rows,), 77),
        "drawn": torch.zeros(rows, 2, dtype=torch.float64),
    }
    num_new = torch.arange(rows, dtype=torch.int32) % 2 if grows else None
    draw_step(
        logits, replace(settings, seen=books["seen"]), books["lengths"], num_new, books["tokens"], books["drawn"],
        filtered=filtered, backend=backend,
    )  # fmt: skip
    return books


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(params=["whole", "in parts"])
def parts(request, monkeypatch):
    if request.param == "in parts":
        monkeypatch.setattr(kernel, "_MAX_TOKENS", 8)
        monkeypatch.setattr(kernel, "_PART", 8)


@pytest.mark.parametrize("samplings", [PLAIN, (*PLAIN, *FILTERED)], ids=["plain", "filtered"])
def test_the_kernels_draw_as_pytorch(parts, samplings):
    settings, logits = settings_of(samplings), logits_of(len(samplings))
    # The likeliest two are equal: the first counts.
    logits[1, [7, 17]] = 50.0
    filtered = len(samplings) > len(PLAIN)
    # Filtered sequences stand at their prompt's end.
    arguments = {"filtered": filtered, "grows": not filtered}
    lengths = torch.arange(3, 3 + len(samplings), dtype=torch.int32)
    expected = run("reference", logits, settings, lengths, **arguments)
    assert_same(run("triton", logits, settings, lengths, **arguments), expected)
    assert expected["tokens"][1] == 7


@needs_gpu
@pytest.mark.parametrize("vocab_size", [257, 4000, 50_000])
def test_draws_at_real_sizes(vocab_size):
    samplings = (*PLAIN, *FILTERED)
    settings, logits = settings_of(samplings, vocab_size), logits_of(len(samplings), vocab_size)
    logits[5, 20] = torch.nan
    for length in range(20):
        lengths = torch.full((len(samplings),), length, dtype=torch.int32)
        expected = run("reference", logits, settings, lengths, filtered=True)
        assert_same(run("triton", logits, settings, lengths, filtered=True), expected)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_penalty_lowers_positive_and_negative_logits(parts, backend):
    """The likeliest token was seen; halved or doubled, its logit falls below that of the next, which was not."""
    settings = SamplingTensors.empty(2, VOCAB_SIZE, torch.device(DEVICE))
    logits = torch.full((2, VOCAB_SIZE), -9.0)
    for row, (first, second) in enumerate([(3.0, 2.0), (-2.0, -3.0)]):
        settings.set_row(row, Sampling(temperature=0, repetition_penalty=2.0), torch.tensor([4]))
        logits[row, 4], logits[row, 12] = first, second
    assert run(backend, logits, settings, torch.zeros(2, dtype=torch.int32))["tokens"].tolist() == [12, 12]


def test_broken_logits_stop_their_row_alone(parts):
    settings, logits = settings_of(PLAIN), logits_of(len(PLAIN))
    lengths = torch.full((len(PLAIN),), 5, dtype=torch.int32)
    whole = run("triton", logits, settings, lengths)
    broken = logits.clone()
    broken[1, 13], broken[2, 3], broken[3, 18] = torch.nan, torch.inf, -torch.inf
    found = run("triton", broken, settings, lengths)
    assert not found["tokens"][1:4].any()
    assert found["drawn"][1:4, 0].eq(-1).all()
    assert found["drawn"][1:4, 1].isnan().all()
    for name in ("tokens", "drawn", "seen"):
        assert torch.equal(found[name][[0, 4]], whole[name][[0, 4]]), name
    assert torch.equal(found["lengths"], whole["lengths"])
    assert_same(found, run("reference", broken, settings, lengths))


def test_a_row_is_drawn_alike_in_any_company():
    samplings = (*PLAIN, *FILTERED)
    settings, logits = settings_of(samplings), logits_of(len(samplings))
    lengths = torch.arange(len(samplings), dtype=torch.int32)
    together = run("triton", logits, settings, lengths, filtered=True, grows=False)
    alone = run("triton", logits[: len(PLAIN)], settings.rows(slice(len(PLAIN))), lengths[: len(PLAIN)], grows=False)
    assert_same(alone, {name: value[: len(PLAIN)] for name, value in together.items()})


def test_logits_with_gaps_between_them(parts):
    settings, logits, lengths = settings_of(FILTERED), logits_of(3), torch.arange(3, dtype=torch.int32)
    expected = run("triton", logits, settings, lengths, filtered=True)
    with_gaps = torch.stack((logits.T, logits.T), -1)[..., 0].T
    assert_same(run("triton", with_gaps, settings, lengths, filtered=True), expected)


@pytest.mark.parametrize("name", ["seed", "tokens", "drawn"])
def test_books_and_settings_with_gaps_are_refused(name):
    """The kernel would write into what lies between."""
    settings, logits, lengths = settings_of(FILTERED), logits_of(3), torch.arange(3, dtype=torch.int32)
    books = {"tokens": torch.zeros(3, dtype=torch.int64), "drawn": torch.zeros(3, 2, dtype=torch.float64)}
    given = {**books, "seed": settings.seed}[name]
    changed = {name: torch.stack((given, given), -1)[..., 0]}
    tokens, drawn = (changed.get(book, x) for book, x in books.items())
    settings = replace(settings, seed=changed.get("seed", settings.seed))
    with pytest.raises(ValueError, match=f"{name} must be contiguous, got strides of"):
        draw_step(logits, settings, lengths, None, tokens, drawn, filtered=False, backend="triton")
