"""Many clients at once: answers stay the same, pages come back, a queue has its bound."""

import asyncio
import contextlib
import random
import threading
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tests.serve.servers import MAX_LENGTH, SEQUENCES, serving
from tests.written_runs import wait_for
from trifocal.inference import Completion, Request, Sampling, TokenScore, Update
from trifocal.serve.app import _AnswerResponse
from trifocal.serve.worker import Updates, Worker


def test_many_clients_get_the_answers_of_one(decoder):
    """A third of them leaves early; pages are so few that sequences are swapped out."""
    rng = random.Random(0)
    beginnings = [[rng.randrange(256) for _ in range(MAX_LENGTH // 2 - 15)] for _ in range(3)]
    kinds = [
        {
            "prompt": beginnings[number % 3][: rng.randint(0, 40)] + [rng.randrange(256)] * rng.randint(1, 15),
            "max_tokens": rng.randint(1, MAX_LENGTH // 4),
            "temperature": 0.0 if number % 3 == 0 else 0.9,
            "seed": number,
        }
        for number in range(12)
    ]
    with serving(decoder, num_pages=30, max_sequences=8, spare_rows=6) as served:
        expected = [
            served.alone(kind["prompt"], kind["max_tokens"], sampling=Sampling(temperature=kind["temperature"], seed=n))
            for n, kind in enumerate(kinds)
        ]
        compared, cut_off = asyncio.run(soak(served.url, kinds, expected, clients=32, requests=60))
        assert served.worker.metrics.reused_tokens > 0 and (compared, cut_off) == (40, 20)
        assert served.all_free()


async def soak(url, kinds, expected, *, clients, requests):
    """Send requests of a few kinds, from as many clients at a time; how many answers were compared, and cut off."""
    compared = cut_off = 0
    numbers = iter(range(requests))

    async def work():
        nonlocal compared, cut_off
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            for number in numbers:
                kind, leaves = kinds[number % len(kinds)], number % 3 == 2
                # Half of those that leave wait for a few tokens, half for a whole answer.
                if number % 2:
                    stream = await client.completions.create(model="tiny", stream=True, **kind)
                    text, events = "", 0
                    async for event in stream:
                        text, events = text + event.choices[0].text, events + 1
                        if leaves and events > number % 5:
                            break
                    await stream.close()
                elif leaves:
                    with contextlib.suppress(TimeoutError):
                        request = client.completions.create(model="tiny", **kind)
                        await asyncio.wait_for(request, (number % 7) / 200)
                else:
                    text = (await client.completions.create(model="tiny", **kind)).choices[0].text
                cut_off += leaves
                if not leaves:
                    compared += 1
                    assert text == expected[number % len(kinds)], (number, text)

    await asyncio.gather(*(work() for _ in range(clients)))
    return compared, cut_off


def test_who_leaves_frees_its_pages_within_a_step(decoder):
    """In the middle of a stream, and of an answer that is given as a whole."""
    with serving(decoder, max_length=5000, max_sequences=1) as served:
        options = {"model": "tiny", "prompt": "x" * 50, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        steps = []
        healthy = served.worker._engine.step

        def step():
            steps.append(served.model.pages.num_free)
            return healthy()

        served.worker._engine.step = step
        stream = served.client().completions.create(stream=True, **options)
        next(iter(stream))
        stream.close()
        assert served.all_free()
        with pytest.raises(openai.APITimeoutError):
            served.client(timeout=0.3).completions.create(**options)
        assert served.all_free() and len(steps) < 3000
        assert 'trifocal_requests_total{end="cancelled"} 2' in served.worker.metrics.text({})


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_leaves_no_task(stream):
    """Nothing would ever wake a task that waits for more of an answer."""

    class Idle:
        @contextlib.contextmanager
        def open(self, requests):
            yield Updates()

    async def leave():
        begun = asyncio.Event()

        async def receive():
            if stream:
                await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            begun.set()

        call = SimpleNamespace(requests=[], stream=stream)
        await _AnswerResponse(Idle(), None, call, SimpleNamespace(open=True))({}, receive, send)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        return (await asyncio.wait(left, timeout=5))[1] if left else left

    assert asyncio.run(leave()) == set()


def test_tokens_come_together_while_the_event_loop_is_busy():
    """Those of the first step at once, all others when the loop has had its rest, or when nothing runs any more."""
    request, score = Request(prompt=[1], max_new_tokens=10), TokenScore(-1.0, [])
    done = Completion(request, 0, [*range(10)], [-1.0] * 10, "", "length")

    class Steps:
        idle, left = True, 10

        def submit(self, *_):
            self.idle = False

        def step(self):
            self.left -= 1
            self.idle = not self.left
            return [Update(request, 0, 9 - self.left, score, "", done if self.idle else None, [])]

    engine = Steps()
    looks, posts = list[int](), list[Any]()
    worker = Worker(engine, engine, max_open=1, before_step=lambda: looks.append(engine.left))
    worker._loop = SimpleNamespace(call_soon_threadsafe=lambda function, *given: posts.append(given))
    worker._thread.start()
    worker._inbox.put(("submit", [request]))
    wait_for(lambda: len(posts) == 2)
    worker.stop()
    assert [[update.token for update in updates] for updates, _ in posts] == [[0], [*range(1, 10)]]
    assert [ended for _, ended in posts] == [[], [request]]
    assert looks[:10] == [*range(10, 0, -1)]


@pytest.mark.parametrize("ends", ["by a cancelled request", "by a failure for good"])
def test_an_answer_that_is_held_back_does_not_wait_for_the_end_of_another(ends, capsys, monkeypatch):
    """The loop has had no rest since the first token when the other request, the only one left, comes to its end."""
    mine, other = (Request(prompt=[1], max_new_tokens=2) for _ in range(2))
    done = Completion(mine, 0, [5, 6], [-1.0] * 2, "", "length")

    class Steps:
        idle, count, broken = True, 0, False

        def check(self):
            if self.broken:
                raise RuntimeError("it is broken")

        def submit(self, *_):
            self.idle = False

        def cancel(self, _):
            self.check()
            self.idle = True

        def step(self):
            self.check()
            self.count += 1
            score, completion = TokenScore(-1.0, []), done if self.count == 2 else None
            return [Update(mine, 0, 4 + self.count, score, "", completion, [])] if self.count <= 2 else []

    engine = Steps()
    worker, posts = Worker(engine, engine, max_open=2), list[Any]()
    worker._loop = SimpleNamespace(call_soon_threadsafe=lambda *call: posts.append(call))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    worker._thread.start()
    worker._inbox.put(("submit", [mine, other]))
    wait_for(lambda: engine.count > 2)
    assert len(posts) == 1
    if ends == "by a failure for good":
        engine.broken = True
    else:
        worker._inbox.put(("cancel", [other]))
    wait_for(lambda: len(posts) > 1)
    assert posts[1][0] == worker._deliver and posts[1][1][0].completion is done and posts[1][2] == [mine]
    if ends == "by a failure for good":
        wait_for(lambda: not worker._thread.is_alive())
        assert "it is broken" in capsys.readouterr().err
    else:
        worker.stop()


def test_a_full_queue_refuses(decoder):
    with serving(decoder, max_length=5000, max_waiting=1) as served:
        options = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        streams = [served.client().completions.create(stream=True, **options) for _ in range(SEQUENCES + 1)]
        wait_for(lambda: served.worker.gauges["requests_running"] == SEQUENCES)
        assert served.worker.gauges["requests_waiting"] == 1
        with pytest.raises(openai.RateLimitError, match="too many requests are waiting") as caught:
            served.client().completions.create(**options)
        assert caught.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        assert served.all_free()
        assert served.client().completions.create(**options | {"max_tokens": 2}).choices
