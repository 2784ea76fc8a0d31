"""The result of a run."""

from dataclasses import dataclass
from pathlib import Path

from trifocal.train.validation_loss import Evaluation


@dataclass(frozen=True)
class TrainResult:
    """The end of a run.

    Attributes:
        directory: The run.
        step: Optimizer steps done.
        finished: Whether all steps are done; False after an interruption.
        loss: The last training loss that was logged, nats per token.
        evaluation: The last evaluation of this process.
        sample: The last sample of this process.
        is_rank0: Whether this is rank 0, which prints the result.
        skipped_documents: Bad documents that all processes skipped, each counted once.
    """

    directory: Path
    step: int
    finished: bool
    loss: float | None
    evaluation: Evaluation | None
    sample: str | None
    is_rank0: bool = True
    skipped_documents: int = 0
