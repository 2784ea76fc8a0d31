"""Recall of the choice of blocks on validation data: does it find what full attention would?"""

from collections.abc import Sequence
from typing import Any

import torch

from trifocal.data import Batch
from trifocal.evaluation.subject import Subject, TooShort
from trifocal.telemetry import AttentionTelemetry
from trifocal.train.step.micro_batch import autocast


def measure_choice(subject: Subject, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """The figures of `trifocal.telemetry.statistics.choice_statistics`, mean over the first sequences of batches.

    Args:
        subject: The model, with layers that choose blocks.
        batches: From `read_validation`.

    Returns:
        A row of the task `choice` for each layer, then one of `choice_distance` for each distance at which the exact
        choice finds something, mean over layers: from `first` tokens back up to, not including, `end`.

    Raises:
        TooShort: If no query has a choice.
    """
    telemetry = AttentionTelemetry(subject.model)
    measured = []
    with autocast(subject.device, subject.precision):
        for batch in batches:
            figures = telemetry.figures(batch.tokens[:1].to(subject.device), cu_seqlens=batch.cu_seqlens)
            if not figures["choice_recall"].isnan().any():
                measured.append(figures)
    length = batches[0].tokens.shape[1]
    if not measured:
        raise TooShort(f"no query of {length:,} tokens has more free blocks than it chooses")

    def mean(name: str) -> torch.Tensor:
        return torch.stack([figures[name] for figures in measured]).mean(0)

    recalls = zip(telemetry.layers, mean("choice_recall").tolist(), mean("recall_by_chance").tolist(), strict=True)
    rows: list[dict[str, Any]] = [
        {"task": "choice", "length": length, "layer": layer, "recall": recall, "recall_by_chance": chance}
        for layer, recall, chance in recalls
    ]
    exact, held = (mean(f"{name}_mass_by_distance").mean(0).tolist() for name in ("exact", "held"))
    block = subject.model.config.geometry.selection_block_size
    for number, (most, found) in enumerate(zip(exact, held, strict=True)):
        if most > 0:
            first, end = block * (2**number // 2), block * 2**number
            figures = {"first": first, "end": end, "exact_mass": most, "recall": found / most}
            rows.append({"task": "choice_distance", "length": length, **figures})
    return rows
