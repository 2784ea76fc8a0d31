"""The engine: tokens do not depend on what else runs; who waits, leaves, comes back, stops and fails."""

import contextlib
import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

import trifocal.inference.engine as engine_module
from tests.chat_data import write_llama_tokenizer
from trifocal.data import make_tokenizer
from trifocal.inference import CachedModel, Engine, Request, RequestTooLong, Sampling
from trifocal.inference.prompt_lookup import PromptLookup

VOCABULARY = 31


@pytest.fixture
def model(make_model):
    return make_model().float()


def make_engine(model, max_sequences=4, *, tokenizer=None, page_size=8, **options):
    cached = CachedModel(model, max_sequences=max_sequences, max_length=60, page_size=page_size, **options)
    with torch.inference_mode():
        for tensor in (*cached.cache._pages, *cached.cache._rings):
            tensor.fill_(torch.nan)
    return Engine(cached, tokenizer), cached


def draw_requests(count, seed=0, **options):
    """Requests of all kinds: greedy and drawn, with and without filters and penalty, long and short."""
    rng = random.Random(seed)
    samplings = [
        {"temperature": 0.0},
        {},
        {"top_k": 5},
        {"top_p": 0.7, "temperature": 1.5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
    ]
    return [
        Request(
            prompt=[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))],
            max_new_tokens=rng.randint(1, 20),
            sampling=Sampling(seed=number, **samplings[number % len(samplings)]),
            name=f"prompt {number}",
            **options,
        )
        for number in range(count)
    ]


def result(completion):
    return completion.tokens, completion.log_probabilities, completion.finish_reason


def alone(model, requests, **options):
    engine, _ = make_engine(model, 1, **options)
    return [result(completion) for request in requests for completion in engine.complete([request])]


# The second has widths that leave the matrices of most sequences at no multiple of 16 bytes; the third the pages that
# lie in order without a copy.
@pytest.mark.parametrize(
    ("options", "page_size"),
    [
        ({"compressor": "mlp", "chooser": "index"}, 8),
        ({"num_heads": 3, "num_kv_heads": 1, "head_dim": 6, "value_dim": 10}, 8),
        ({"layer_types": ("window", "dense")}, 1),
    ],
    ids=str,
)
def test_company_changes_no_bit(make_model, options, page_size):
    """Tokens and log-probabilities, in a batch that others enter and leave, with pages so few that some must leave."""
    model = make_model(**options).float()
    requests = draw_requests(6)
    expected = alone(model, requests, page_size=page_size)
    for max_sequences, num_pages in ((8, 0), (3, 0), (8, 56 // page_size)):
        sizes = {"page_size": page_size, "num_pages": num_pages, "prefill_chunk_size": 30}
        engine, cached = make_engine(model, max_sequences, **sizes)
        found = engine.complete(requests)
        assert [result(completion) for completion in found] == expected
        assert engine.idle and cached.num_free_rows == max_sequences
        assert cached.pages.num_free == cached.pages.num_pages


def test_the_youngest_leaves_and_comes_back(model):
    requests = [
        Request(prompt=[i] * 8, max_new_tokens=30, sampling=Sampling(seed=i, repetition_penalty=1.3)) for i in range(4)
    ]
    expected = alone(model, requests)
    engine, cached = make_engine(model, 4, num_pages=12)
    swapped = []
    healthy = cached.swap_out

    def swap_out(sequence):
        [job] = [job for job in engine._scheduler.running if job.cached is sequence]
        assert job.age == max(job.age for job in engine._scheduler.running)
        swapped.append(job.age)
        return healthy(sequence)

    cached.swap_out = swap_out
    found = engine.complete(requests)
    assert swapped and 0 not in swapped
    assert [result(completion) for completion in found] == expected


def test_a_prompt_in_the_making_leaves_too(model):
    """It is the youngest; its chunks continue where they were."""
    short, long = Request(prompt=[1] * 8, max_new_tokens=40), Request(prompt=[2] * 40, max_new_tokens=2)
    expected = alone(model, [short, long], prefill_chunk_size=2)
    engine, _ = make_engine(model, 2, num_pages=8, prefill_chunk_size=2)
    engine.submit(short)
    for _ in range(2):
        engine.step()
    engine.submit(long)
    left = []
    found = []
    while not engine.idle:
        found += [update.completion for update in engine.step() if update.completion is not None]
        assert all(job.request is long for job in engine._scheduler.swapped)
        left += [job.swapped.length for job in engine._scheduler.swapped if job.swapped is not None]
    found.sort(key=lambda completion: completion.request is long)
    assert [result(completion) for completion in found] == expected
    # It entered while there was room, and left with some of its chunks.
    assert left and all(0 < length < 40 for length in left)


def test_samples_share_their_prompt(model):
    request = Request(prompt=list(range(20)), max_new_tokens=6, sampling=Sampling(seed=7), samples=3)
    engine, cached = make_engine(model, 4)
    engine.submit(request)
    engine.step()
    # Two full pages and a begun one, shared until somebody writes.
    assert cached.pages.num_pages - cached.pages.num_free == 3
    updates = engine.step()
    assert cached.pages.num_pages - cached.pages.num_free == 2 + 3
    while not engine.idle:
        updates += engine.step()
    found = sorted((u.completion for u in updates if u.completion is not None), key=lambda c: c.sample)
    singles = [
        Request(prompt=request.prompt, max_new_tokens=6, sampling=Sampling(seed=7 + sample)) for sample in range(3)
    ]
    assert [result(completion) for completion in found] == alone(model, singles)
    assert len({tuple(completion.tokens) for completion in found}) > 1


def test_scores_are_those_of_the_whole_model(model):
    """Prompts, also in pieces, and drawn tokens; and the likeliest beside them."""
    requests = draw_requests(4, likeliest=3, score_prompt=True) + draw_requests(2)
    scores = {id(request): [] for request in requests}
    engine, _ = make_engine(model, prefill_chunk_size=7)
    for update in engine.run(requests):
        scores[id(update.request)] += [*update.prompt_scores, update.score]
        if update.completion is None:
            continue
        prompt, tokens = list(update.request.prompt), update.completion.tokens
        with torch.no_grad():
            log_p = model(torch.tensor([[*prompt, *tokens]]))[0].log_softmax(-1)
        first = 1 if update.request.score_prompt else len(prompt)
        for i, score in enumerate(scores.pop(id(update.request)), start=first):
            expected = log_p[i - 1]
            assert score.log_probability == pytest.approx(float(expected[[*prompt, *tokens][i]]), abs=1e-4)
            best = expected.topk(update.request.likeliest)
            assert [value for _, value in score.likeliest] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert [token for token, _ in score.likeliest] == best.indices.tolist()
    assert not scores


def test_nothing_is_computed_after_the_last_stop(model, monkeypatch):
    options = {"prompt": [1, 2, 3], "max_new_tokens": 50, "sampling": Sampling(temperature=0)}
    first = make_engine(model)[0].complete([Request(**options)])[0].tokens[0]
    calls = []
    for name in ("prefill_chunk", "step"):
        healthy = getattr(CachedModel, name)
        monkeypatch.setattr(
            CachedModel, name, lambda *a, healthy=healthy, name=name, **k: calls.append(name) or healthy(*a, **k)
        )
    [found] = make_engine(model)[0].complete([Request(**options, stop_tokens=(first,))])
    assert (calls, found.tokens) == (["prefill_chunk"], [first])


def test_a_long_prompt_stops_nobody(model):
    """Who runs gets a token in every step, a short prompt passes the long one, and no bit changes."""
    running, long, short = (
        Request(prompt=[i] * length, max_new_tokens=20, sampling=Sampling(seed=i))
        for i, length in ((1, 4), (2, 40), (3, 9))
    )
    expected = alone(model, [running, long, short], prefill_chunk_size=5)
    engine, _ = make_engine(model, 3, prefill_chunk_size=5)
    engine.submit(running)
    engine.step()
    engine.submit(long, short)
    first = {}
    found = {}
    for number in range(100):
        updates = engine.step()
        if id(running) not in found:
            assert running in [update.request for update in updates]
        for update in updates:
            first.setdefault(id(update.request), number)
            if update.completion is not None:
                found[id(update.request)] = result(update.completion)
    assert [found[id(request)] for request in (running, long, short)] == expected
    # 8 pieces and 2: the shortest and the oldest in turn.
    assert first[id(short)] == 3 and first[id(long)] == 9


def test_prefixes_of_prompts_are_found_again(make_model, monkeypatch):
    """No bit changes, at any number of pages; what was found is not prefilled again."""
    model = make_model().float()
    rng = random.Random(0)
    beginnings = [[rng.randrange(VOCABULARY) for _ in range(25)] for _ in range(2)]
    requests = [
        Request(
            prompt=beginnings[number % 2][: rng.randint(9, 25)] + [number] * rng.randint(1, 15),
            max_new_tokens=rng.randint(1, 12),
            sampling=Sampling(seed=number),
            samples=1 + number % 2,
            score_prompt=number == 5,
        )
        for number in range(8)
    ]
    sizes = {"prefill_chunk_size": 8}
    engine, _ = make_engine(model, 2, **sizes)
    expected = [result(completion) for request in requests for completion in engine.complete([request])]
    for max_sequences, num_pages, spare_rows in ((2, 0, 2), (4, 9, 5), (8, 8, 1)):
        engine, cached = make_engine(model, max_sequences, num_pages=num_pages, spare_rows=spare_rows, **sizes)
        assert [result(completion) for completion in engine.complete(requests)] == expected
        assert engine.reused_tokens > 0 or spare_rows == 1
        while engine._prefixes.drop():
            pass
        assert cached.pages.num_free == cached.pages.num_pages
        assert cached.num_free_rows == max_sequences + spare_rows
    # Two turns of a chat: 24 of 29 tokens are there, whatever else came between.
    engine, cached = make_engine(model, 2, spare_rows=9, **sizes)
    engine.complete([Request(prompt=beginnings[0], max_new_tokens=2), Request(prompt=beginnings[1], max_new_tokens=2)])
    pieces = []
    healthy = cached.prefill_chunk
    monkeypatch.setattr(cached, "prefill_chunk", lambda c, x, **o: pieces.append(len(x)) or healthy(c, x, **o))
    turn = engine.complete([Request(prompt=[*beginnings[0], 1, 2, 3, 4], max_new_tokens=2, samples=2)])
    assert pieces == [5] and engine.reused_tokens == 24
    assert [completion.reused_tokens for completion in turn] == [24, 24]
    # Neither the same tokens in another order, nor the same second chunk behind another first one.
    first, second = beginnings[0][:8], beginnings[0][8:16]
    for prompt in ([*sorted(first), 1], [*first, *sorted(second), 1], [*beginnings[1][:8], *second, 1]):
        reused = engine.reused_tokens
        engine.complete([Request(prompt=prompt, max_new_tokens=1)])
        assert engine.reused_tokens - reused == (8 if prompt[:8] in (first, beginnings[1][:8]) else 0)


def test_guessed_tokens_are_those_of_one_at_a_time(make_model, monkeypatch):
    """In float64, where rounding decides nothing: greedy and drawn, among others, with few pages and stops."""
    rng = random.Random(0)
    model = make_model()
    settings = ({"temperature": 0}, {"temperature": 0.2}, {"temperature": 0.5, "top_k": 4}, {"repetition_penalty": 1.2})
    requests = [
        Request(
            prompt=[1, 2, 3, 4, 5, 6] * 3 + [number],
            max_new_tokens=25 + number,
            sampling=Sampling(seed=number, **settings[number % len(settings)]),
            samples=1 + number % 2,
            stop_tokens=(number,),
            likeliest=2 * (number % 2),
        )
        for number in range(7)
    ]

    def run(engine, requests):
        updates = [update for update in engine.run(requests) if update.token is not None]
        return sorted(
            (requests.index(u.request), u.sample, number, u.token, pytest.approx(u.score.log_probability, abs=1e-9))
            for number, u in enumerate(sorted(updates, key=lambda u: (requests.index(u.request), u.sample)))
        )

    expected, counts = run(make_engine(model)[0], requests), []
    texts = [
        [*request.prompt, *(token for r, s, _, token, _ in expected if (r, s) == (number, sample))]
        for number, request in enumerate(requests)
        for sample in range(request.samples)
    ]

    def guess(lookup, most):
        """What will come, half of the time with a token that will not."""
        size = len(lookup._tokens)
        text = next(text for text in texts if text[:size] == lookup._tokens)
        draft = text[size : size + most]
        if draft and rng.random() < 0.5:
            draft[rng.randrange(len(draft))] = rng.randrange(VOCABULARY)
        return draft

    monkeypatch.setattr(PromptLookup, "guess", guess)
    for max_sequences, num_pages in ((4, 0), (2, 14), (6, 20)):
        cached = make_engine(model, max_sequences, num_pages=num_pages)[1]
        engine = Engine(cached, speculate=True)
        assert run(engine, requests) == expected
        assert cached.pages.num_free == cached.pages.num_pages and cached.num_free_rows == max_sequences
        counts.append((engine.right_tokens, engine.guessed_tokens))
    right, guessed = map(sum, zip(*counts, strict=True))
    assert 50 < right < guessed - 50


@pytest.mark.parametrize("speculate", [False, True])
def test_a_step_spares_what_no_sequence_needs(make_model, speculate, monkeypatch):
    """What the host says of a step's lengths is what the device has, as sequences come, go, move and are guessed."""
    model = make_model(chooser="index").float()
    cached = CachedModel(model, max_sequences=3, max_length=60, page_size=8, num_pages=18)
    geometry, step, seen = cached.config.geometry, cached.step, set()

    def checked(tokens, batch):
        new = batch.num_new > 0
        spans = zip(batch.lengths[new].tolist(), (batch.lengths + batch.num_new)[new].tolist(), strict=True)
        blocks = [(geometry.num_compressed_blocks(begin), geometry.num_compressed_blocks(end)) for begin, end in spans]
        longest = int((batch.lengths + batch.num_new)[new].max())
        needed = longest <= geometry.selected_tokens, any(before < after for before, after in blocks)
        # The first step of each batch size has everything in it.
        assert (batch.takes_all, batch.ends_block) in (needed, (False, True))
        seen.add((batch.takes_all, batch.ends_block))
        return step(tokens, batch)

    monkeypatch.setattr(cached, "step", checked)
    engine = Engine(cached, speculate=speculate)
    for requests in (draw_requests(8), *([request] for request in draw_requests(4, seed=1))):
        engine.complete(requests)
    assert len(seen) == 4


def test_a_guess_is_what_followed_last():
    lookup = PromptLookup([1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 1, 2, 3])
    assert lookup.guess(7) == [5, 6, 1, 2, 3] and lookup.guess(2) == [5, 6] and lookup.guess(0) == []
    lookup.add(4)
    assert lookup.guess(7) == [9, 1, 2, 3, 5, 6, 1]
    lookup.judge(0)
    assert [lookup.guess(1) for _ in range(9)] == [[]] * 8 + [[9]]


@pytest.mark.parametrize("steps", [1, 8])
def test_a_cancelled_request_leaves_nothing(model, steps):
    """Waiting, in its prompt, running with samples, and swapped out; the others' tokens stay the same."""
    victims = draw_requests(6, seed=1, samples=2)
    others = draw_requests(4)
    expected = alone(model, others, prefill_chunk_size=3)
    engine, cached = make_engine(model, 4, num_pages=10, prefill_chunk_size=3)
    engine._steps_ahead = 1
    engine.submit(*(request for pair in zip(victims, others, strict=False) for request in pair))
    for _ in range(steps):
        engine.step()
    for victim in victims:
        engine.cancel(victim)
    found = {}
    while not engine.idle:
        for update in engine.step():
            assert update.request in others
            if update.completion is not None:
                found[id(update.request)] = result(update.completion)
    assert len(found) + steps >= 4 and all(
        found.get(id(request), wanted) == wanted for request, wanted in zip(others, expected, strict=True)
    )
    assert cached.pages.num_free == 10 and cached.num_free_rows == 4 and engine.idle


def test_a_cancelled_request_is_not_returned_after_a_step_that_failed(model, monkeypatch):
    """Its last token was read by the step that failed, which returned nothing."""
    first, second = Request(prompt=[1], max_new_tokens=2), Request(prompt=[2], max_new_tokens=1)
    engine, cached = make_engine(model)
    engine._steps_ahead = 1
    engine.submit(first)
    assert [update.completion for _ in range(2) for update in engine.step()] == [None]
    engine.submit(second)
    monkeypatch.setattr(cached, "prefill_chunk", lambda *a, **o: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert len(engine._updates) == 1
    engine.cancel(first)
    engine.cancel(second)
    assert engine.idle and engine.step() == []


def test_every_batch_size_is_recorded_before_requests_come(model, monkeypatch):
    """The first step of a kind compiles, the second is recorded; then requests find nothing changed."""
    steps = []
    healthy = CachedModel.step

    def step(cached, tokens, batch):
        steps.append((len(tokens), batch.takes_all, batch.ends_block))
        return healthy(cached, tokens, batch)

    monkeypatch.setattr(CachedModel, "step", step)
    engine, _ = make_engine(model, 5)
    engine.warm_up()
    assert Counter(steps) == {(size, *kind): 2 for size in (1, 2, 4, 5) for kind in product((False, True), repeat=2)}
    requests = draw_requests(5)
    assert [result(done) for done in engine.complete(requests)] == alone(model, requests)


def test_what_never_fits_is_refused_with_the_number_that_would(model):
    engine, _ = make_engine(model, 2, num_pages=3)
    with pytest.raises(RequestTooLong, match="question 4: a prompt of 20 tokens with 6 new ones is too long") as caught:
        engine.submit(Request(prompt=[1] * 20, max_new_tokens=6, name="question 4"))
    assert caught.value.fits == 25
    engine.submit(Request(prompt=[1] * 20, max_new_tokens=5))
    with pytest.raises(RequestTooLong, match="together 61 fit"):
        make_engine(model)[0].submit(Request(prompt=[1] * 59, max_new_tokens=3))
    assert make_engine(model)[0].complete([Request(prompt=[1] * 59, max_new_tokens=2)])[0].finish_reason == "length"
    with pytest.raises(ValueError, match="3 samples at a time were asked for, 2 fit"):
        engine.submit(Request(prompt=[1], max_new_tokens=1, samples=3))
    with pytest.raises(ValueError, match="q has tokens outside the vocabulary of 31"):
        engine.submit(Request(prompt=[1, 31], max_new_tokens=1, name="q"))
    with pytest.raises(ValueError, match="need a tokenizer"):
        engine.submit(Request(prompt=[1], max_new_tokens=1, stop=("x",)))


def test_what_does_not_fit_now_waits_in_order(model):
    engine, _ = make_engine(model, 2)
    requests = [Request(prompt=[i], max_new_tokens=3) for i in range(5)]
    order = [update.request for update in engine.run(requests) if update.completion is not None]
    assert order == requests


def test_who_needs_no_more_pages_keeps_nobody_waiting(model):
    cached = CachedModel(model, max_sequences=2, max_length=30)
    assert cached.pages.num_pages == 2
    engine = Engine(cached)
    for _ in range(2):
        engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=20))
    for _ in range(2):
        engine.step()
    assert engine.num_waiting == 0
    assert len(engine.step()) == 2


def test_who_would_take_the_pages_of_those_that_run_waits(model, monkeypatch):
    engine, cached = make_engine(model, 2, num_pages=3)
    monkeypatch.setattr(cached, "swap_out", lambda sequence: pytest.fail("it left at once"))
    # Two pages are full, and the next token takes the third.
    requests = [Request(prompt=[1] * 16, max_new_tokens=4), Request(prompt=[2], max_new_tokens=2)]
    engine.submit(requests[0])
    engine.step()
    assert [completion.request for completion in engine.complete(requests[1:])] == requests[1:]


def test_broken_logits_end_only_their_sequence(make_model):
    model = make_model().float()
    requests = [Request(prompt=[i, i], max_new_tokens=4, sampling=Sampling(temperature=0)) for i in range(6)]
    expected = alone(model, requests)
    # The first token of one sequence; nobody else ever reads it.
    read = [{i, *tokens[:-1]} for i, (tokens, _, _) in enumerate(expected)]
    victim = next(i for i in range(6) if sum(expected[i][0][0] in others for others in read) == 1)
    others = [i for i in range(6) if i != victim]
    broken = expected[victim][0][0]
    with torch.no_grad():
        model.embedding.weight[broken] = torch.nan
    found = [result(completion) for completion in make_engine(model)[0].complete(requests)]
    assert [found[i] for i in others] == [expected[i] for i in others]
    assert found[victim] == ([broken], expected[victim][1][:1], "error")
    # The pages that it leaves hold NaN; whoever gets them does not see it.
    engine, _ = make_engine(model, 1, num_pages=1)
    again = engine.complete([requests[victim], requests[others[0]]])
    assert [result(completion) for completion in again] == [found[victim], expected[others[0]]]


FAILING = {
    "model": ("prefill_chunk", "step", "admit", "fork", "swap_out"),
    "cache": ("to_host", "from_host", "copy_row"),
    "runner": ("place", "draw_first", "run"),
}


def test_a_failure_anywhere_loses_no_sequence(model, monkeypatch):
    """Prompts in chunks, samples, and few pages; every third call fails before it does anything."""
    requests = [
        Request(prompt=[i] * (5 + i), max_new_tokens=10, sampling=Sampling(seed=i, repetition_penalty=1.3), samples=2)
        for i in range(3)
    ]
    options = {"num_pages": 5, "prefill_chunk_size": 3}
    expected = [result(completion) for completion in make_engine(model, 4, **options)[0].complete(requests)]
    for part, method in ((part, method) for part, methods in FAILING.items() for method in methods):
        engine, cached = make_engine(model, 4, **options)
        # As on a GPU: tokens that are read to make room must not get lost.
        engine._steps_ahead = 1
        owner, calls = {"model": cached, "cache": cached.cache, "runner": engine._runner}[part], []
        original = getattr(owner, method)

        def sometimes(*arguments, healthy=original, calls=calls, **options):
            calls.append(1)
            if len(calls) % 3 == 1:
                raise MemoryError("no room")
            return healthy(*arguments, **options)

        monkeypatch.setattr(owner, method, sometimes)
        engine.submit(*requests)
        updates = []
        for _ in range(1000):
            with contextlib.suppress(MemoryError):
                updates += engine.step()
                if engine.idle:
                    break
        found = [update.completion for update in updates if update.completion is not None]
        found.sort(key=lambda completion: (requests.index(completion.request), completion.sample))
        assert [result(completion) for completion in found] == expected and len(calls) > 1, method
        for completion in found:
            own = [u.token for u in updates if u.request is completion.request and u.sample == completion.sample]
            assert own == completion.tokens, method
        assert cached.pages.num_free == 5 and cached.num_free_rows == 4, method


def test_scores_that_find_no_memory_are_made_again(model, monkeypatch):
    """Every other time; the piece of the prompt is in the caches by then."""
    request = Request(prompt=list(range(18)), max_new_tokens=2, score_prompt=True, likeliest=2, samples=2)

    def run():
        engine, updates = make_engine(model, 2, prefill_chunk_size=5)[0], []
        engine.submit(request)
        for _ in range(20):
            with contextlib.suppress(MemoryError):
                updates += engine.step()
        assert engine.idle
        return updates

    expected, scores, calls = run(), engine_module._scores, []

    def sometimes(*arguments):
        calls.append(1)
        if len(calls) % 2:
            raise MemoryError("no room")
        return scores(*arguments)

    monkeypatch.setattr(engine_module, "_scores", sometimes)
    found = run()
    assert len(calls) > 4 and [len(update.prompt_scores) for update in found] == [17, 17, 0, 0]
    assert [update.prompt_scores for update in found] == [update.prompt_scores for update in expected]
    assert [(u.sample, u.token, u.score) for u in found] == [(u.sample, u.token, u.score) for u in expected]


def test_a_guess_follows_what_a_failed_step_has_drawn(make_model, monkeypatch):
    """The second prompt finds no memory behind the first, whose token is drawn and not returned yet."""
    requests = [
        Request(prompt=[1, 2, 3] * count, max_new_tokens=8, sampling=Sampling(temperature=0)) for count in (3, 4)
    ]
    model = make_model()
    expected = [completion.tokens for completion in make_engine(model)[0].complete(requests)]
    cached = make_engine(model)[1]
    engine, prefill = Engine(cached, speculate=True), cached.prefill_chunk
    pieces = []

    def second_fails(sequence, tokens, **options):
        pieces.append(len(tokens))
        if len(pieces) == 2:
            raise MemoryError("no room")
        return prefill(sequence, tokens, **options)

    monkeypatch.setattr(cached, "prefill_chunk", second_fails)
    engine.submit(*requests)
    with pytest.raises(MemoryError):
        engine.step()
    found = [update.completion for update in engine.run() if update.completion is not None]
    found.sort(key=lambda completion: requests.index(completion.request))
    assert [completion.tokens for completion in found] == expected
    assert pieces == [9, 12, 12] and engine.guessed_tokens > 0


def test_an_abandoned_run_does_not_spoil_the_next(model):
    first, second = draw_requests(2)
    engine, _ = make_engine(model)
    for _ in engine.run([first]):
        break
    # One of several that cannot run keeps all of them out.
    with pytest.raises(RequestTooLong):
        engine.complete([second, Request(prompt=[1] * 99, max_new_tokens=1)])
    assert engine.num_waiting == 0
    assert [result(completion) for completion in engine.complete([second])] == alone(model, [second])
    assert engine.idle


def test_stop_tokens_and_strings(make_model):
    model = make_model(vocab_size=257).float()
    tokenizer = make_tokenizer("bytes")
    engine, _ = make_engine(model, tokenizer=tokenizer)
    free = engine.complete([Request(prompt=[65, 66], max_new_tokens=30, sampling=Sampling(seed=1))])[0]
    assert free.finish_reason == "length" and len(free.tokens) == 30
    # The text continues the prompt's.
    assert "AB" + free.text == tokenizer.decode([65, 66, *free.tokens])

    def stopped(**options):
        [completion] = make_engine(model, tokenizer=tokenizer)[0].complete(
            [Request(prompt=[65, 66], max_new_tokens=30, sampling=Sampling(seed=1), **options)]
        )
        return completion

    end = free.tokens.index(free.tokens[12])
    by_token = stopped(stop_tokens=(free.tokens[12],))
    assert by_token.finish_reason == "stop" and by_token.tokens == free.tokens[: end + 1]
    assert by_token.text == free.text[: len(by_token.text)]
    string = free.text[9:11]
    by_string = stopped(stop=("never in it", string))
    assert by_string.finish_reason == "stop" and by_string.text == free.text[: free.text.index(string)]
    assert by_string.tokens == free.tokens[: len(by_string.tokens)] and len(by_string.tokens) < 30


@pytest.mark.parametrize("prompt", ["日" * 12, "日🙂" * 9, "ab 日é"])
def test_characters_of_bytes_follow_a_prompt_of_them(model, tmp_path, prompt):
    """As in vocabularies of Llama 2, which read a row of bytes as a whole; the engine looks at the prompt's last 32."""
    pytest.importorskip("tokenizers")
    tokenizer = make_tokenizer(str(write_llama_tokenizer(tmp_path)))
    tokens, answer = (tokenizer.encode_prompt(text).tolist() for text in (prompt, "日本 the"))
    engine, _ = make_engine(model, tokenizer=tokenizer)
    stream = engine._state(Request(prompt=tokens, max_new_tokens=1), 0).stream
    # Without <s> and the space in front of a text.
    assert [stream.add(token) for token in answer[2:]] == ["", "", "日", "", "", "本", " the"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [2**70]}, "a prompt must be whole numbers, got object"),
        ({"prompt": [[1]]}, r"a prompt must be \[T\] with at least one token, got \[1, 1\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"stop": "end"}, "stop must be a sequence of strings, got 'end'"),
        ({"stop": [3]}, r"stop must be a sequence of strings, got \[3\]"),
        ({"sampling": None}, "sampling must be a Sampling, got NoneType"),
    ],
)
def test_bad_requests_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": [1], "max_new_tokens": 1, **options})


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_prompt_may_change_once_the_request_is_made(model, kind):
    options = {"max_new_tokens": 4, "sampling": Sampling(temperature=0, repetition_penalty=2)}
    expected = make_engine(model)[0].complete([Request(prompt=[1, 2, 3] * 7, **options)])[0].tokens
    prompt = kind([1, 2, 3] * 7)
    request = Request(prompt=prompt, **options)
    prompt[:] = [30] * 21
    assert make_engine(model)[0].complete([request])[0].tokens == expected
