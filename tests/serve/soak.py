"""Many clients at a server of a tiny model, of whom a third leave early.

```bash
python -m tests.serve.soak --clients 256 --requests 2000
```
"""

import argparse
import asyncio
import random
import time
from typing import Any, NamedTuple

import openai
import torch

from tests.serve.servers import MAX_LENGTH, Served, serving
from trifocal.inference import Sampling
from trifocal.testing.small_models import make_model, small_config

_KINDS = 12


class Soaked(NamedTuple):
    """What happened.

    Attributes:
        compared: Answers that were those of an engine with nothing else to do.
        cut_off: Clients that left.
    """

    compared: int
    cut_off: int


def soak(served: Served, *, clients: int, requests: int, seed: int = 0) -> Soaked:
    """Send requests of a few kinds, so many at a time, and compare every answer with that of the request alone."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(256) for _ in range(MAX_LENGTH // 2 - 15)] for _ in range(3)]
    kinds = [
        {
            "prompt": beginnings[number % 3][: rng.randint(0, 40)] + [rng.randrange(256)] * rng.randint(1, 15),
            "max_tokens": rng.randint(1, MAX_LENGTH // 4),
            "temperature": 0.0 if number % 3 == 0 else 0.9,
            "seed": number,
        }
        for number in range(_KINDS)
    ]
    expected = [
        served.alone(kind["prompt"], kind["max_tokens"], sampling=Sampling(temperature=kind["temperature"], seed=n))  # type: ignore[arg-type]
        for n, kind in enumerate(kinds)
    ]
    return asyncio.run(_soak(served.url, kinds, expected, clients, requests))


async def _soak(url: str, kinds: list[Any], expected: list[str], clients: int, requests: int) -> Soaked:
    compared = cut_off = 0
    numbers = iter(range(requests))

    async def work() -> None:
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
                    try:
                        request = client.completions.create(model="tiny", **kind)
                        text = (await asyncio.wait_for(request, (number % 7) / 200)).choices[0].text
                    except TimeoutError:
                        text = ""
                else:
                    text = (await client.completions.create(model="tiny", **kind)).choices[0].text
                if leaves:
                    cut_off += 1
                else:
                    compared += 1
                    assert text == expected[number % len(kinds)], (number, text)

    await asyncio.gather(*(work() for _ in range(clients)))
    return Soaked(compared, cut_off)


def main() -> None:
    """Print what happened; fails if an answer differs or a page is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    decoder = make_model(small_config(vocab_size=257), torch.device("cpu"), torch.float32).eval()
    begin = time.monotonic()
    with serving(decoder, max_sequences=32, num_pages=150, spare_rows=8) as served:
        result = soak(served, clients=options.clients, requests=options.requests)
        assert served.all_free(), "pages were lost"
        print(served.worker.metrics.text(served.worker.gauges))
    print(f"{result}, no page lost, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
