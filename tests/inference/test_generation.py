"""Batches of prompts: seeds, stops, chunks, and greedy decoding against the model without a cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trifocal.inference import CachedModel, stream
from trifocal.models import DecoderLM


def test_a_stream_hands_out_the_same_tokens_and_ends_with_the_last_row(make_model: Callable[..., DecoderLM]) -> None:
    model = make_model()
    prompt = torch.randint(31, (3, 6), generator=torch.Generator().manual_seed(0))
    whole = model.generate(prompt, 25, seed=3)
    streamed = list(stream(model, prompt, 25, seed=3))
    assert torch.equal(torch.stack(streamed, dim=1), whole[:, 6:])
    stop = int(whole[0, 10])
    stopped = model.generate(prompt, 25, seed=3, stop_token=stop)
    streamed = list(stream(model, prompt, 25, seed=3, stop_token=stop))
    assert torch.equal(torch.stack(streamed, dim=1), stopped[:, 6 : 6 + len(streamed)])
    assert (stopped[:, 6 + len(streamed) :] == stop).all()


def test_between_tokens_of_a_stream_gradients_are_as_before(make_model: Callable[..., DecoderLM]) -> None:
    model = make_model()
    for _ in stream(model, torch.zeros(1, 3, dtype=torch.int64), 2):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with pytest.raises(ValueError, match="top_k must be at least 0"):
        next(stream(model, torch.zeros(1, 3, dtype=torch.int64), 2, top_k=-1))


@pytest.mark.parametrize("options", [{}, {"attention": "dense"}, {"chooser": "index", "shared_kv": True}], ids=str)
def test_greedy_equals_the_model_without_a_cache(make_model: Callable[..., DecoderLM], options: dict[str, Any]) -> None:
    model = make_model(**options)
    expected = torch.randint(31, (3, 5), generator=torch.Generator().manual_seed(0))
    prompt = expected
    with torch.no_grad():
        for _ in range(20):
            expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), dim=1)
    for chunk in (0, 2, 3):
        given = model.generate(prompt, 20, temperature=0, prefill_chunk_size=chunk)
        assert torch.equal(given, expected)


def test_seed_repeats_and_leaves_the_global_generator_alone(make_model: Callable[..., DecoderLM]) -> None:
    model = make_model()
    prompt = torch.randint(31, (2, 4))
    state = torch.get_rng_state()
    first = model.generate(prompt, 20, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, model.generate(prompt, 20, seed=1))
    assert not torch.equal(first, model.generate(prompt, 20, seed=2))
    torch.manual_seed(0)
    unseeded = model.generate(prompt, 20)
    assert not torch.equal(unseeded, model.generate(prompt, 20))


def test_rows_stop_by_themselves(make_model: Callable[..., DecoderLM]) -> None:
    model = make_model()
    prompt = torch.randint(31, (4, 6), generator=torch.Generator().manual_seed(0))
    free = model.generate(prompt, 40, seed=3)
    # A token that one row draws early and another does not.
    stop = int(free[0, 10])
    stopped = model.generate(prompt, 40, seed=3, stop_token=stop)
    assert stopped.shape == free.shape
    assert torch.equal(stopped[:, :6], prompt)
    for row in range(4):
        hits = (stopped[row, 6:] == stop).nonzero()
        end = 46 if len(hits) == 0 else 6 + int(hits[0])
        assert torch.equal(stopped[row, :end], free[row, :end])
        assert (stopped[row, end:] == stop).all()
    assert (stopped[0, 10:] == stop).all()


def test_nothing_is_computed_after_the_last_stop(
    make_model: Callable[..., DecoderLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    prompt = torch.randint(31, (1, 6), generator=torch.Generator().manual_seed(0))
    first = int(model.generate(prompt, 1, temperature=0)[0, -1])
    calls = []
    for name in ("prefill_chunk", "step"):
        healthy = getattr(CachedModel, name)
        monkeypatch.setattr(
            CachedModel, name, lambda *a, healthy=healthy, name=name, **k: calls.append(name) or healthy(*a, **k)
        )
    stopped = model.generate(prompt, 50, temperature=0, stop_token=first)
    assert calls == ["prefill_chunk"]
    assert (stopped[0, 6:] == first).all()


def test_result_is_an_ordinary_tensor(make_model: Callable[..., DecoderLM]) -> None:
    model = make_model()
    tokens = model.generate(torch.randint(31, (1, 3)), 5)
    assert tokens.shape == (1, 8)
    assert not tokens.is_inference()
    model(tokens, tokens).backward()
    assert torch.equal(model.generate(tokens, 0), tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer, got 2.5"),
        ({"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
        ({"prefill_chunk_size": -2}, "prefill_chunk_size must be at least 0, got -2"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)}, r"at least one token a row, got \[2, 0\]"),
    ],
)
def test_bad_arguments_are_refused(make_model: Callable[..., DecoderLM], options: dict[str, Any], message: str) -> None:
    given = {"tokens": torch.zeros(1, 2, dtype=torch.int64), "max_new_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        make_model().generate(given.pop("tokens"), given.pop("max_new_tokens"), **given)


def test_broken_weights_are_named(make_model: Callable[..., DecoderLM]) -> None:
    model = make_model()
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match="its weights are broken"):
        model.generate(torch.zeros(1, 3, dtype=torch.int64), 2)


@pytest.mark.parametrize("stop_token", [None, 30])
def test_weights_that_break_after_the_prompt_are_named(
    make_model: Callable[..., DecoderLM], stop_token: int | None
) -> None:
    model = make_model()
    prompt = torch.zeros(2, 3, dtype=torch.int64)
    first = model.generate(prompt, 1, temperature=0)[:, -1].tolist()
    assert 0 not in first, "the prompt's token is another one"
    with torch.no_grad():
        model.embedding.weight[1:] = torch.nan
    options = {"temperature": 0.5, "top_k": 1, "stop_token": stop_token}
    with pytest.raises(FloatingPointError, match="not finite: its weights are broken"):
        list(stream(model, prompt, 5, **options))
    with pytest.raises(FloatingPointError, match="its weights are broken"):
        model.generate(prompt, 5, **options)
    with pytest.raises(FloatingPointError, match="its weights are broken"):
        model.generate(prompt, 2, temperature=1.0, top_k=2, seed=0, stop_token=stop_token)
