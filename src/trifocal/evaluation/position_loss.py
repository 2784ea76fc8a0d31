"""Loss on validation data, in all and by position: does a longer past help?"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trifocal.data import Batch
from trifocal.evaluation.subject import Subject
from trifocal.models import DecoderLM
from trifocal.ops import Documents
from trifocal.train.step.micro_batch import autocast
from trifocal.train.step.step import batch_loss

_FIRST_BUCKET = 8
# Logits at a time; of a large vocabulary they take more memory than the rest of the model.
_LOGITS_AT_ONCE = 1 << 26


def position_edges(length: int) -> list[int]:
    """Borders of the buckets of positions: 0, 8, 16, 32, … and the length; the last bucket is the longest."""
    edges = [0]
    edge = _FIRST_BUCKET
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


class PositionLosses:
    """Adds up losses by the position of their token in its document: called as a `DecoderLM` with targets.

    `nats` and `counts` are sums over the targets of each bucket, [buckets], fp64 and int64, on the model's device. With
    a model `beside`, `compared` are those of its losses, of the divergence from it, and of targets with the same
    likeliest token, [buckets, 3], fp64.
    """

    def __init__(
        self, model: DecoderLM, edges: Sequence[int], device: torch.device, beside: DecoderLM | None = None
    ) -> None:
        self._model, self._beside = model, beside
        self._ends = torch.tensor(edges[1:], device=device)
        self.nats = torch.zeros(len(edges) - 1, dtype=torch.float64, device=device)
        self.counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device=device)
        self.compared = torch.zeros(len(edges) - 1, 3, dtype=torch.float64, device=device)

    def __call__(self, tokens: Tensor, targets: Tensor, *, cu_seqlens: Documents | None = None) -> Tensor:
        """The mean loss of these targets, as the model's own."""
        hidden = self._model.hidden_states(tokens, cu_seqlens=cu_seqlens).flatten(0, 1)
        flat = targets.flatten()
        if cu_seqlens is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0])
        else:
            positions = cu_seqlens.positions.long()
        rows = max(1, _LOGITS_AT_ONCE // self._model.config.vocab_size)
        theirs = (
            None if self._beside is None else self._beside.hidden_states(tokens, cu_seqlens=cu_seqlens).flatten(0, 1)
        )
        parts, compared = [], []
        for first in range(0, len(flat), rows):
            some = slice(first, first + rows)
            log_q = self._model.logits(hidden[some]).float().log_softmax(-1)
            parts.append(_losses(log_q, flat[some]))
            if self._beside is not None and theirs is not None:
                log_p = self._beside.logits(theirs[some]).float().log_softmax(-1)
                divergence = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
                alike = log_q.argmax(-1) == log_p.argmax(-1)
                compared.append(torch.stack((_losses(log_p, flat[some]), divergence, alike), dim=1))
        losses, valid = torch.cat(parts).double(), flat >= 0
        buckets = torch.searchsorted(self._ends, positions[valid], right=True)
        self.nats.index_add_(0, buckets, losses[valid])
        self.counts.index_add_(0, buckets, torch.ones_like(buckets))
        if compared:
            self.compared.index_add_(0, buckets, torch.cat(compared).double()[valid])
        return losses.sum() / valid.sum().clamp(min=1)


def _losses(log_p: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.nll_loss(log_p, targets, ignore_index=-100, reduction="none")


@torch.no_grad()
def measure_loss(subject: Subject, batches: Sequence[Batch], on_batch: Callable[[int], None]) -> list[dict[str, Any]]:
    """The loss of a model on batches: a row of the task `loss`, then one of `position` for each bucket with targets,
    `first` <= position < `end`, counted from the document's beginning. `on_batch` gets the number that are done.
    """
    length = batches[0].tokens.shape[1]
    edges = position_edges(length)
    losses = PositionLosses(subject.model, edges, subject.device, subject.beside)
    text_bytes = 0
    for done, batch in enumerate(batches, start=1):
        with autocast(subject.device, subject.precision):
            batch_loss(losses, batch, subject.device)
        text_bytes += subject.tokenizer.count_bytes(batch.targets[batch.targets >= 0].numpy())
        on_batch(done)
    assert subject.data is not None
    nats, counts, compared = losses.nats.tolist(), losses.counts.tolist(), losses.compared

    def figures(sums: Tensor, count: int) -> dict[str, float]:
        if subject.beside is None:
            return {}
        return dict(zip(("beside_loss", "divergence", "agreement"), (sums / count).tolist(), strict=True))

    total, targets = sum(nats), max(sum(counts), 1)
    loss = total / targets
    whole = {
        "task": "loss",
        "length": length,
        "sequences": sum(batch.tokens.shape[0] for batch in batches),
        "targets": sum(counts),
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_token": loss / math.log(2),
        "bits_per_byte": total / math.log(2) / text_bytes if subject.data.has_text and text_bytes else None,
        **figures(compared.sum(0), targets),
    }
    return [
        whole,
        *(
            {
                "task": "position",
                "length": length,
                "first": first,
                "end": end,
                "targets": count,
                "loss": nat / count,
                **figures(sums, count),
            }
            for first, end, nat, count, sums in zip(edges[:-1], edges[1:], nats, counts, compared, strict=True)
            if count
        ),
    ]
