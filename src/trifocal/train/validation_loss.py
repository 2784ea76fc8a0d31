"""Loss on validation documents."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trifocal.data import Batch, DataConfig, Tokenizer, read_validation
from trifocal.distributed import DistributedContext
from trifocal.models import DecoderLM
from trifocal.train.config.sections import RunConfig
from trifocal.train.step.micro_batch import autocast
from trifocal.train.step.step import batch_loss


@dataclass(frozen=True)
class Evaluation:
    """Loss on validation documents.

    Attributes:
        validation_loss: Nats per token.
        perplexity: Its exponential.
        bits_per_byte: Bits for each byte of the text that the targets stand for, which makes tokenizers comparable;
            None where there is no text.
    """

    validation_loss: float
    perplexity: float
    bits_per_byte: float | None


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
    """Mean loss over the valid targets of some batches, at least one among them.

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
    local_bytes = sum(tokenizer.count_bytes(batch.targets[batch.targets >= 0].numpy()) for batch in batches)
    of_ranks = processes.gather((losses, local_bytes))
    text_bytes = sum(found for _, found in of_ranks[:sharing])
    for rank in range(0, processes.size, sharing):
        shares = [found for found, _ in of_ranks[rank : rank + sharing]]
        losses.update({index: sum(share[index] for share in shares) for index in shares[0]})
    nats = 0.0
    for index, count in enumerate(counts):
        nats += count * losses[index]
    loss = nats / max(sum(counts), 1)
    bits_per_byte = nats / math.log(2) / text_bytes if data.parsed.has_text and text_bytes else None
    return Evaluation(loss, math.exp(loss) if loss < 700 else math.inf, bits_per_byte)
