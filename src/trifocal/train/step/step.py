"""One optimizer step: forward and backward over the micro-batches of a global batch, then the guarded update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trifocal.data import Batch
from trifocal.distributed.parallel import Parallel
from trifocal.models.decoder import Distillation
from trifocal.ops.devices import to_device
from trifocal.runlog.heartbeat import Phases
from trifocal.train.choice_teacher import ChoiceTeacher
from trifocal.train.config.sections import TrainSection
from trifocal.train.step.cuda_graphs import MicroBatchGraphs
from trifocal.train.step.micro_batch import LossFunction, autocast, call_with, model_inputs
from trifocal.train.step.optimizer import DeviceFlag, gradient_norm, guarded_step

_MicroBatch = tuple[Batch, float, int]
"""A micro-batch, its share in the step's loss, and its packed documents."""


@dataclass
class StepResult:
    """The result of a step; its tensors stay on the device.

    Attributes:
        step: Its number, from 1.
        batches: Its micro-batches, on the host.
        learning_rate: Learning rate of the step, without the factors of single groups.
        loss: Mean loss over all valid targets of the global batch, nats per token.
        local_loss: This process's share of it; the shares add up to it.
        gradient_norm: 2-norm of the whole gradient before clipping.
        finite: Whether both are finite; if not, the update was not applied.
        choice: Loss, without its weight, and recall of the choice of each layer, [layers, 2]; None if it is not taught.
        divergence: Mean divergence from the frozen model over the same targets as the loss, nats; None without one.
    """

    step: int
    batches: Sequence[Batch]
    learning_rate: float
    loss: Tensor
    local_loss: Tensor
    gradient_norm: Tensor
    finite: DeviceFlag
    choice: Tensor | None = None
    divergence: Tensor | None = None


def batch_loss(
    loss_function: LossFunction, batch: Batch, device: torch.device, *, pad_documents: bool = False, documents: int = 0
) -> Tensor:
    """Mean loss over the valid targets of a batch on the host; `pad_documents`, `documents` as of `model_inputs`."""
    inputs = model_inputs(batch, pad_documents=pad_documents, documents=documents)
    return call_with(loss_function, [to_device(tensor, device) for tensor in inputs], batch.rows.shape)


class TrainStep:
    """Takes the optimizer steps of a run; the caller sets the learning rate of the fused AdamW before each.

    `before_backward` is called once in a step, between the first forward and the first backward: the place to check the
    step before, whose gradients still exist, without an idle device. `graphs` of the loss function are replayed instead
    of calling it; then it comes before the first. The loss function was given the `teaching` of the teacher, and the
    distillation.
    """

    def __init__(
        self,
        loss_function: LossFunction,
        optimizer: torch.optim.AdamW,
        device: torch.device,
        config: TrainSection,
        *,
        before_backward: Callable[[], None] = lambda: None,
        parallel: Parallel | None = None,
        graphs: MicroBatchGraphs | None = None,
        teacher: ChoiceTeacher | None = None,
        distillation: Distillation | None = None,
    ) -> None:
        self.loss_function, self.optimizer, self.graphs = loss_function, optimizer, graphs
        self._device, self._config = device, config
        self._before_backward, self._teacher, self._distillation = before_backward, teacher, distillation
        self._parallel = parallel or Parallel(loss_function, "none", 1, None)  # type: ignore[arg-type]

    def run(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        phases: Phases,
        forward_phase: str = "forward",
        total_targets: int | None = None,
        documents: Sequence[int] | None = None,
        eligible: Sequence[float] | None = None,
    ) -> StepResult:
        """Take one step, numbered from 1; nothing waits for the device.

        Each micro-batch weighs as its valid targets, so the gradient is that of the mean over the global batch, however
        it is cut. `total_targets` and `eligible` (queries that teach the choice of each layer) are those of all
        processes, by default of `batches`; `documents` the packed documents of each micro-batch, the largest number in
        any process if all must compute the same kind at a time.
        """
        counts = [batch.valid_targets for batch in batches]
        total = max(sum(counts) if total_targets is None else total_targets, 1)
        weights = [count / total for count in counts]
        if self._teacher is not None:
            self._teacher.begin(step, self._teacher.eligible(batches, step) if eligible is None else eligible)
        if self._distillation is not None:
            self._distillation.total.zero_()
        micro_batches = list(zip(batches, weights, documents or [0] * len(batches), strict=True))
        if self.graphs is None:
            loss_sum = self._add_gradients(micro_batches, phases, forward_phase)
        else:
            loss_sum = self._replay_gradients(self.graphs, micro_batches, phases, forward_phase)
        with phases.phase("optimizer"):
            local_loss = loss_sum.clone() if self._parallel.size > 1 else loss_sum
            self._parallel.sum(loss_sum)
            groups = self.optimizer.param_groups
            apart, choice, divergence = [], None, None
            if self._teacher is not None:
                apart, choice = self._teacher.index_parameters, self._teacher.figures()
                self._parallel.sum(choice)
            if self._distillation is not None:
                divergence = self._parallel.sum(self._distillation.total / total)
            ids = set(map(id, apart))
            parameters = [one for group in groups for one in group["params"] if id(one) not in ids]
            norm = gradient_norm(parameters)
            finite = guarded_step(self.optimizer, parameters, norm, loss_sum, self._config.gradient_clip_norm, apart)
        rate = groups[0]["lr"] / groups[0]["lr_factor"]
        return StepResult(step, batches, rate, loss_sum, local_loss, norm, finite, choice, divergence)

    def _add_gradients(self, micro_batches: Sequence[_MicroBatch], phases: Phases, forward_phase: str) -> Tensor:
        """Forward and backward of all micro-batches; returns the sum of their weighted losses."""
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        for index, (batch, weight, documents) in enumerate(micro_batches):
            with self._parallel.micro_batch(last=index == len(micro_batches) - 1):
                with phases.phase(forward_phase), autocast(self._device, self._config.precision):
                    loss = weight * batch_loss(
                        self.loss_function, batch, self._device, pad_documents=self._config.compile, documents=documents
                    )
                if index == 0:
                    self._before_backward()
                    self.optimizer.zero_grad(set_to_none=True)
                    self._parallel.begin_step()
                with phases.phase("backward"):
                    # The wrappers average gradients over the processes: times their number, that is the sum.
                    (loss * self._parallel.size).backward()
                    loss_sum += loss.detach()
        return loss_sum

    def _replay_gradients(
        self, graphs: MicroBatchGraphs, micro_batches: Sequence[_MicroBatch], phases: Phases, forward_phase: str
    ) -> Tensor:
        """Forward and backward of all micro-batches by graphs; returns the sum of their weighted losses."""
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        self._before_backward()
        graphs.begin_step()
        self._parallel.begin_step()
        for batch, weight, documents in micro_batches:
            with phases.phase(forward_phase):
                loss_sum += graphs.add_gradients(batch, weight, documents)
        with phases.phase("backward"):
            self._parallel.exchange_gradients()
        return loss_sum
