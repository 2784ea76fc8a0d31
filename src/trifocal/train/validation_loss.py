"""Loss on validation documents."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from trifocal.data import Batch, DataConfig, Tokenizer
from trifocal.data.loader import read_validation
from trifocal.distributed.processes import DistributedContext
from trifocal.models import DecoderLM
from trifocal.train.config.sections import RunConfig
from trifocal.train.step.micro_batch import autocast
from trifocal.train.step.step import batch_loss


@dataclass(frozen=True)
class Evaluation:
    """Loss on validation documents: nats per token, their exponential, and bits for each byte of the text that the
    targets stand for, None where there is no text.

    With several sources it has the evaluation of each by its string; the first three are then means over the sources,
    whatever their weights, the second the exponential of the mean.
    """

    validation_loss: float
    perplexity: float
    bits_per_byte: float | None
    of_sources: dict[str, "Evaluation"] = field(default_factory=dict)


def read_validation_batches(
    config: RunConfig, tokenizer: Tokenizer, local_tokens: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[Batch]:
    """The batches of a run's evaluations; see `read_validation`."""
    return read_validation(
        config.data,
        tokenizer=tokenizer,
        sequence_length=config.train.sequence_length,
        sequences=config.evaluate.sequences,
        at_once=config.train.evaluated_at_once,
        vocab_size=config.model.vocab_size,
        local_tokens=local_tokens,
    )


@torch.no_grad()
def evaluate(
    model: DecoderLM,
    batches: Sequence[Batch],
    *,
    tokenizer: Tokenizer,
    data: DataConfig,
    device: torch.device,
    precision: str,
    processes: DistributedContext | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Mean loss over the valid targets of some batches, at least one among them; of several sources, whose batches
    follow one another, equally many of each, of each.

    Several processes share the batches; those that share sequences get their parts of the same ones. Losses are added
    up in the order of the batches, so that the sum does not depend on the number of processes; and each runs the model
    equally often, as a sharded model requires. `on_batch` is called with the number of batches done by all.
    """
    processes = processes or DistributedContext()
    counts = [batch.valid_targets for batch in batches]
    losses: dict[int, float] = {}
    sharing = 1 if model.context is None else model.context.size
    groups = processes.size // sharing
    for first in range(0, len(batches), groups):
        index = min(first + processes.rank // sharing, len(batches) - 1)
        with autocast(device, precision):
            losses[index] = batch_loss(model, batches[index], device).item()
        on_batch(min(first + groups, len(batches)))
    local_bytes = [tokenizer.count_bytes(batch.targets[batch.targets >= 0].numpy()) for batch in batches]
    of_ranks = processes.gather((losses, local_bytes))
    text_bytes = [sum(found) for found in zip(*(found for _, found in of_ranks[:sharing]), strict=True)]
    for rank in range(0, processes.size, sharing):
        shares = [found for found, _ in of_ranks[rank : rank + sharing]]
        losses.update({index: sum(share[index] for share in shares) for index in shares[0]})
    found, number = {}, len(batches) // len(data.sources)
    for first, source in enumerate(data.sources):
        own = range(first * number, (first + 1) * number)
        nats, targets, size = 0.0, sum(counts[index] for index in own), sum(text_bytes[index] for index in own)
        for index in own:
            nats += counts[index] * losses[index]
        bits = nats / math.log(2) / size if data.has_text and size else None
        found[source] = _evaluation(nats / max(targets, 1), bits)
    if len(found) == 1:
        return found[data.name]
    of_bytes = [own.bits_per_byte for own in found.values() if own.bits_per_byte is not None]
    loss = statistics.fmean(own.validation_loss for own in found.values())
    return replace(_evaluation(loss, statistics.fmean(of_bytes) if of_bytes else None), of_sources=found)


def _evaluation(loss: float, bits_per_byte: float | None) -> Evaluation:
    return Evaluation(loss, math.exp(loss) if loss < 700 else math.inf, bits_per_byte)
