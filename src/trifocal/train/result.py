"""What a run has come to when it ends."""

from dataclasses import dataclass
from pathlib import Path

from trifocal.train.evaluate import Evaluation


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        directory: The run.
        step: Optimizer steps done.
        finished: Whether all steps are done; False after an interruption.
        loss: The last training loss known, nats per token.
        evaluation: The last evaluation of this process.
        sample: The last sample of this process.
        is_rank0: Whether this is rank 0, which speaks for all.
        skipped_documents: Bad documents that were skipped, by all processes; none of them counts twice.
    """

    directory: Path
    step: int
    finished: bool
    loss: float | None
    evaluation: Evaluation | None
    sample: str | None
    is_rank0: bool = True
    skipped_documents: int = 0
