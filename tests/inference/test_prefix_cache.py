"""Pasts of prompts: which are kept and found, which goes first, and that none is lost or given up while needed."""

import pytest
import torch

from trifocal.inference import CachedModel, Engine, Request
from trifocal.inference.prefix_cache import PrefixCache

PROMPTS = [[number] * 40 for number in range(4)]


@pytest.fixture
def model(make_model):
    return make_model().float()


def make_cache(model, *, page_size=8, **options):
    sizes = {"max_sequences": 2, "max_length": 64, "prefill_chunk_size": 8, "spare_rows": 2} | options
    cached = CachedModel(model, page_size=page_size, **sizes)
    return PrefixCache(cached), cached


def keys(cache, prompt):
    return cache.keys(torch.tensor(prompt))


def keep(cache, cached, prompt):
    """Keep a whole prompt as a prefix."""
    sequence = cached.admit()
    cached.prefill(sequence, prompt)
    cache.keep(keys(cache, prompt), sequence)
    cached.free(sequence)


def lengths(cache, prompts):
    """Tokens found of each prompt."""
    found = [cache.find(keys(cache, prompt), len(prompt)) for prompt in prompts]
    return [0 if past is None else past.length for past in found]


def test_the_least_recently_used_goes_first(model):
    cache, cached = make_cache(model)
    keep(cache, cached, PROMPTS[0][:8])
    keep(cache, cached, PROMPTS[1][:8])
    assert lengths(cache, PROMPTS[:1]) == [8]
    keep(cache, cached, PROMPTS[2][:8])
    assert lengths(cache, PROMPTS[:3]) == [8, 0, 8] and cache.num_unused_rows == 0


def test_tokens_are_told_apart_at_any_size(model):
    cache, _ = make_cache(model)
    found = [keys(cache, [token] * 8)[0] for token in (1, 1 + 2**8, 1 + 2**16, 1 + 2**31)]
    assert len(set(found)) == 4


@pytest.mark.parametrize(
    ("chunk", "page", "length", "kept"),
    [(8, 8, 16, 16), (16, 8, 16, 16), (16, 8, 24, 0), (8, 16, 8, 0), (8, 16, 16, 16), (8, 8, 12, 0)],
)
def test_a_past_ends_where_a_chunk_and_a_page_do(model, chunk, page, length, kept):
    cache, cached = make_cache(model, page_size=page, prefill_chunk_size=chunk)
    assert cached.pages.page_size == page
    keep(cache, cached, PROMPTS[0][:length])
    assert lengths(cache, PROMPTS[:1]) == [kept]


def test_a_past_that_is_kept_is_not_kept_again(model):
    """Two requests may go through the same prompt side by side."""
    cache, cached = make_cache(model)
    keep(cache, cached, PROMPTS[0][:8])
    keep(cache, cached, PROMPTS[0][:8])
    assert cached.num_free_rows == 3 and cached.pages.num_free == cached.pages.num_pages - 1
    assert cache.drop() and not cache.drop()
    assert cached.num_free_rows == 4 and cached.pages.num_free == cached.pages.num_pages


def test_the_past_that_is_about_to_be_forked_is_not_given_up(model):
    cache, cached = make_cache(model)
    keep(cache, cached, PROMPTS[0][:8])
    past = cache.find(keys(cache, PROMPTS[0]), 8)
    assert past is not None and not cache.drop(but=past)
    keep(cache, cached, PROMPTS[1][:8])
    assert cache.drop(but=past) and lengths(cache, PROMPTS[:2]) == [8, 0]


@pytest.mark.parametrize("length", [8, 16, 17])
def test_the_last_token_of_a_prompt_goes_through_the_model(model, length):
    """The same prompt again, also one of whole chunks: its logits are needed."""
    _, cached = make_cache(model)
    engine = Engine(cached)
    first, second = (
        engine.complete([Request(prompt=PROMPTS[1][:length], max_new_tokens=3)])[0].tokens for _ in range(2)
    )
    assert second == first and engine.reused_tokens == (length - 1) // 8 * 8


def test_a_request_waits_rather_than_give_up_the_past_that_it_found(model):
    """A kept prefix has one of six pages and a running sequence four; the request needs two more."""
    _, cached = make_cache(model, num_pages=6)
    engine = Engine(cached)
    engine.complete([Request(prompt=PROMPTS[0][:8], max_new_tokens=1)])
    long = Request(prompt=PROMPTS[1][:25], max_new_tokens=7)
    engine.submit(long)
    engine.step()
    updates = list(engine.run([Request(prompt=PROMPTS[0][:24], max_new_tokens=1)]))
    ended = [update.completion for update in updates if update.completion is not None]
    assert [completion.reused_tokens for completion in ended] == [0, 8] and ended[0].request is long


def test_pages_of_the_past_that_was_found_are_not_needed_again(model):
    """A kept prefix has three of six pages; a prompt of five pages that begins with it needs two of the other three."""
    _, cached = make_cache(model, num_pages=6)
    engine = Engine(cached)
    engine.complete([Request(prompt=PROMPTS[0][:24], max_new_tokens=1)])
    engine.submit(Request(prompt=PROMPTS[0], max_new_tokens=1))
    engine.step()
    assert engine.num_waiting == 0 and engine.reused_tokens == 24
