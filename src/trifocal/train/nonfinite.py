"""The end of a run whose loss, gradient or weights are not finite."""

import math
from typing import NoReturn

import torch

from trifocal.distributed.parallel import local_shard
from trifocal.train.run_logger import RunLogger
from trifocal.train.setup import TrainSetup
from trifocal.train.step.step import StepResult

_IDS_IN_MESSAGE = 4


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is not finite, and the update was not applied; or the update made weights that
    are not finite, and these are not saved."""

    agreed = True
    """Every process of the run raises it in the same step."""


class FiniteGuard:
    """Ends the run after a step whose loss, gradient or weights are not finite."""

    def __init__(self, setup: TrainSetup, log: RunLogger) -> None:
        self._model, self._processes, self._parallel = setup.model, setup.processes, setup.parallel
        self._log = log
        self._last: StepResult | None = None
        self._unchecked: StepResult | None = None

    def add(self, result: StepResult) -> None:
        """Keep the result of a step for `check_step`."""
        self._last = self._unchecked = result

    def check_step(self) -> None:
        """Raise NonFiniteError, in every process, if the last step was not finite; its update was withheld on the
        device. Called between forward and backward: the device has work while the host waits for the flag.
        """
        result, self._unchecked = self._unchecked, None
        if result is not None and not result.finite.wait():
            self._stop(result)

    def check_weights(self) -> None:
        """Raise NonFiniteError, in every process, if the last update made weights that are not finite."""
        if self._last is None:
            return
        finite = torch.stack([torch.isfinite(local_shard(parameter)).all() for parameter in self._model.parameters()])
        if not all(self._processes.gather(bool(finite.all()))):
            self._stop(self._last, of_weights=True)

    def _stop(self, result: StepResult, *, of_weights: bool = False) -> NoReturn:
        """End the run; every process calls this, and names its own parameters and documents."""
        size, watch = self._processes.size, self._parallel.watch
        named = [(name, p if of_weights else p.grad) for name, p in self._model.named_parameters()]
        bad_here = {name for name, p in named if p is not None and not bool(torch.isfinite(local_shard(p)).all())}
        finite_here = bool(torch.isfinite(result.local_loss)) and (watch is None or watch.finite())
        documents_here = [name for batch in result.batches for name in batch.document_ids]
        gathered = self._processes.gather((bad_here, finite_here, documents_here))
        found, finite, documents_of = zip(*gathered, strict=True)
        bad = [name for name, _ in named if any(name in part for part in found)]
        # After the exchange of gradients all processes have the NaN of one.
        guilty = [rank for rank in range(size) if not finite[rank]] if size > 1 else [0]
        documents = list(dict.fromkeys(name for rank in guilty or range(size) for name in documents_of[rank]))
        loss, norm = result.loss.item(), result.gradient_norm.item()
        more = len(documents) - _IDS_IN_MESSAGE
        end = f"({len(bad)} in all); documents: {', '.join(documents[:_IDS_IN_MESSAGE])}"
        end += f" and {more} more" if more > 0 else ""
        if of_weights:
            message = (
                f"step {result.step}: the update, with a learning rate of {result.learning_rate:g}, made weights that "
                f"are not finite; first parameter: {bad[0]} {end}; no checkpoint holds them"
            )
        else:
            ranks = ", ".join(map(str, guilty)) or "unknown"
            blame = f"from rank{'s' if len(guilty) > 1 else ''} {ranks}: " if size > 1 else ""
            figure = f"gradient norm {norm}" if math.isfinite(loss) else f"loss {loss}"
            first = f"first parameter with a non-finite gradient: {bad[0]}" if bad else "all gradients are finite"
            message = f"step {result.step}: {blame}{figure} is not finite; {first} {end}; the update was not applied"
        self._log.event("non_finite", message, "error")
        raise NonFiniteError(message)
