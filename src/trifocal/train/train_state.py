"""The progress of a run."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """The counters of a run, the same in every process but for the position in the data.

    Attributes:
        step: Optimizer steps done.
        resume_step: The step of the checkpoint that the run goes on from; None for a new run.
        loss: The last training loss that was read from the device, nats per token.
        data_position: State of this process's loader after the last step.
    """

    step: int = 0
    resume_step: int | None = None
    loss: float | None = None
    data_position: dict[str, Any] = field(default_factory=dict)

    @property
    def steps_here(self) -> int:
        """Steps that this process has taken."""
        return self.step - (self.resume_step or 0)
