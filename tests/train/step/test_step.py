"""The gradient of a step is that of the mean over the whole global batch, however the batch is cut."""

import itertools

import pytest
import torch

from tests.train.tiny import make_config
from trifocal.data import Loader, make_tokenizer
from trifocal.models import DecoderLM
from trifocal.train.step.optimizer import make_optimizer
from trifocal.train.step.step import TrainStep

CPU = torch.device("cpu")


def read_batches(config, micro_batch_size, count):
    with Loader(
        config.data,
        tokenizer=make_tokenizer("bytes"),
        sequence_length=config.train.sequence_length,
        batch_size=micro_batch_size,
        vocab_size=257,
    ) as loader:
        return [next(loader) for _ in range(count)]


def gradients(config, batches, heartbeat, train):
    model = DecoderLM(config.model)
    model.init_weights(5)
    result = TrainStep(model, make_optimizer(model, config.optimizer), CPU, train).run(1, batches, phases=heartbeat)
    assert result.finite.wait()
    collected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(collected) == len(list(model.parameters())), "every parameter gets a gradient"
    return result.loss.item(), result.gradient_norm.item(), collected


def test_loss_and_gradient_are_those_of_the_mean_over_valid_targets(tmp_path, heartbeat):
    """Against float64 and one document at a time, in one batch and in micro-batches of unequal weight."""
    config = make_config(tmp_path, "--train.gradient_clip_norm", "0")
    batches = read_batches(config, 1, 12)
    assert len({batch.valid_targets for batch in batches}) > 1, "equal weights would not tell a mean of means apart"
    assert any(batch.cu_seqlens is not None for batch in batches)
    cuts = [batches, read_batches(config, 2, 6), read_batches(config, 12, 1)]
    found = [gradients(config, cut, heartbeat, config.train) for cut in cuts]
    exact = DecoderLM(config.model)
    exact.init_weights(5)
    exact.double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        tokens, targets = batch.tokens.flatten(), batch.targets.flatten()
        length = batch.tokens.shape[1]
        borders = list(range(0, tokens.numel() + 1, length)) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
        for start, end in itertools.pairwise(borders):
            log_p = exact(tokens[None, start:end]).log_softmax(-1)[0]
            for position, target in enumerate(targets[start:end].tolist()):
                if target >= 0:
                    total = total - log_p[position, target]
                    count += 1
    (total / count).backward()
    exact_norm = torch.stack([parameter.grad.norm() for parameter in exact.parameters()]).norm().item()
    for loss, norm, computed in found:
        assert loss == pytest.approx((total / count).item(), rel=1e-6)
        assert norm == pytest.approx(exact_norm, rel=1e-5)
        for name, parameter in exact.named_parameters():
            torch.testing.assert_close(computed[name].double(), parameter.grad, rtol=1e-3, atol=1e-6)
