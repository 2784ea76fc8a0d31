"""The engine's recorded steps on a GPU: likeliest tokens, kept prefixes, guessed tokens."""

from dataclasses import replace

import pytest
import torch

from tests.devices import NEEDS_GPU
from trifocal.inference import CachedModel, Engine, Request, Sampling
from trifocal.inference.recorded_work import RecordedWork
from trifocal.models import DecoderLM, ModelConfig

pytestmark = list(NEEDS_GPU)

CONFIG = ModelConfig(
    vocab_size=257, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64, mlp_dim=128
)


def test_steps_of_every_kind_draw_the_same():
    """Greedy, in fp32: a guess differs from one token at a time by rounding alone."""
    model = DecoderLM(CONFIG)
    model.init_weights(0)
    model.to("cuda").eval()
    prompt = [*range(60)] * 20
    requests = [
        Request(prompt=[*prompt, number], max_new_tokens=60, sampling=Sampling(temperature=0), likeliest=number)
        for number in range(3)
    ]
    sizes = {"max_sequences": 4, "max_length": 1400, "prefill_chunk_size": 512}
    plain = Engine(CachedModel(model, **sizes)).complete(requests)
    engine = Engine(CachedModel(model, spare_rows=4, **sizes), speculate=True)
    engine.warm_up()
    scores = []
    for _ in range(2):
        for update in engine.run(requests):
            scores.append(update.score)
            if update.completion is not None:
                [expected] = [c for c in plain if c.request is update.request]
                assert update.completion.tokens == expected.tokens
                assert update.completion.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-3)
    assert engine.reused_tokens >= 3 * 1024 and engine.guessed_tokens > 0
    # The likeliest token is the drawn one.
    assert all(score.likeliest[0][1] == score.log_probability for score in scores if score.likeliest)


def test_work_beyond_the_limit_runs_unrecorded():
    work, x = RecordedWork(torch.device("cuda"), most=1), torch.zeros(2, device="cuda")
    calls = []
    for _ in range(4):
        for key in range(2):
            work.run(key, lambda key=key: calls.append(key) or x[key].add_(1))
    # Of the first key, the second call records.
    assert calls.count(0) == 2 and calls.count(1) == 4 and x.tolist() == [4, 4]


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recorded_chunks_give_equal_bits(dtype, attention):
    """Unrecorded, while it is recorded, replayed, behind a kept past; and in fp32 what unpadded chunks give."""
    model = DecoderLM(replace(CONFIG, attention=attention))
    model.init_weights(0)
    model.to("cuda").eval()
    sizes = {"max_sequences": 3, "max_length": 1400, "prefill_chunk_size": 512, "dtype": dtype}
    plain, recorded = CachedModel(model, **sizes), CachedModel(model, record_chunks=True, **sizes)
    tokens = torch.randint(257, (1400,), generator=torch.Generator().manual_seed(0))
    for length in (1, 256, 300, 512, 700, 1024, 1399):
        found = []
        for _ in range(4):
            sequence, other = recorded.admit(), recorded.admit()
            logits = [recorded.prefill(sequence, tokens[:length])]
            # Another prompt of the same chunks, before the first one goes on.
            recorded.prefill(other, tokens.flip(0)[:length])
            logits += [recorded.decode([sequence], tokens[None, length : length + 1])[0, 0]]
            found.append(torch.stack(logits))
            recorded.free(sequence)
            recorded.free(other)
        assert all(torch.equal(each, found[0]) for each in found[1:]), length
        whole = length - length % 512
        if 0 < whole < length:
            past = recorded.admit()
            recorded.prefill(past, tokens[:whole])
            fork = recorded.fork(past)
            assert torch.equal(recorded.prefill(fork, tokens[whole:length]), found[0][0]), length
            recorded.free(past)
            recorded.free(fork)
        if dtype == torch.float32:
            alone = plain.admit()
            expected = [plain.prefill(alone, tokens[:length])]
            expected += [plain.decode([alone], tokens[None, length : length + 1])[0, 0]]
            plain.free(alone)
            torch.testing.assert_close(found[0], torch.stack(expected), rtol=0, atol=1e-3)
