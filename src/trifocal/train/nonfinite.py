"""The end of a run whose loss, gradient or weights are not finite: the dump and the error."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from trifocal.distributed import DistributedContext, Parallel, gather_full_model
from trifocal.models import DecoderLM, save_weights
from trifocal.runlog.traces.base import local_shard
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
    """Ends the run after a step whose loss, gradient or weights are not finite.

    Args:
        setup: The run.
        log: Takes the event.
    """

    def __init__(self, setup: TrainSetup, log: RunLogger) -> None:
        self._model, self._processes, self._parallel = setup.model, setup.processes, setup.parallel
        self._folder = setup.directory / "dumps"
        self._log = log
        self._last: StepResult | None = None
        self._unchecked: StepResult | None = None

    def add(self, result: StepResult) -> None:
        """Keep the result of a step for `check_step`."""
        self._last = self._unchecked = result

    def check_step(self) -> None:
        """Raise if the last step was not finite. Its update was withheld on the device, its gradients are still there.

        Called between the next step's forward and backward: the device has work while the host waits for the flag.

        Raises:
            NonFiniteError: In every process.
        """
        result, self._unchecked = self._unchecked, None
        if result is not None and not result.finite.wait():
            self._stop(result)

    def check_weights(self) -> None:
        """Raise if the last update made weights that are not finite: no later step is there to show it.

        All processes call this.

        Raises:
            NonFiniteError: In every process.
        """
        if self._last is None:
            return
        finite = torch.stack([torch.isfinite(local_shard(parameter)).all() for parameter in self._model.parameters()])
        if not all(self._processes.gather(bool(finite.all()))):
            self._stop(self._last, of_weights=True)

    def _stop(self, result: StepResult, *, of_weights: bool = False) -> NoReturn:
        error = dump_non_finite(
            result, self._model, self._folder, self._processes, self._parallel, of_weights=of_weights
        )
        self._log.metrics.event(result.step, "non_finite", str(error), severity="error")
        raise error


def dump_non_finite(
    result: StepResult,
    model: DecoderLM,
    directory: Path,
    processes: DistributedContext,
    parallel: Parallel,
    *,
    of_weights: bool = False,
) -> NonFiniteError:
    """Write a dump of a step that is not finite, and make the error that ends the run.

    Every process calls this: all have the same flag, and each names its own bad gradients and documents.

    The dump, `step_*/`, holds `summary.json` (loss, norm, parameters with bad gradients, document ids),
    `batch.pt` (the micro-batches; `batch_rank*.pt` of several processes) and the weights that the step started from,
    which are also the current ones. Where the weights are at fault, they are those that the step has made.

    Args:
        result: The step; its gradients are still in the parameters.
        model: The model.
        directory: The run's `dumps`.
        processes: This process among those of the run.
        parallel: The parallelized model.
        of_weights: The step was finite and its update made weights that are not.

    Returns:
        The error, to be raised. Its message names the rank, the step, the first parameter and the documents.
    """
    mine = _Part(
        [name for name, p in model.named_parameters() if not _is_finite(p if of_weights else p.grad)],
        bool(torch.isfinite(result.local_loss)) and (parallel.watch is None or parallel.watch.finite()),
        [name for batch in result.batches for name in batch.document_ids],
        [batch.sample_index for batch in result.batches],
    )
    parts = processes.gather(mine)
    found = {name for part in parts for name in part.bad}
    bad = [name for name, _ in model.named_parameters() if name in found]
    guilty = [rank for rank, part in enumerate(parts) if not part.finite] if processes.size > 1 else [0]
    guilty_parts = [parts[rank] for rank in guilty] or parts
    documents = list(dict.fromkeys(name for part in guilty_parts for name in part.documents))
    summary = {
        "step": result.step,
        "loss_nats_per_token": result.loss.item(),
        "gradient_norm": result.gradient_norm.item(),
        "learning_rate": result.learning_rate,
        f"parameters_with_non_finite_{'value' if of_weights else 'gradient'}": bad,
        "document_ids": documents,
        "sample_indices": [index for part in guilty_parts for index in part.sample_indices],
    }
    if processes.size > 1 and not of_weights:
        summary["ranks"] = guilty
    where = _write_dump(result, model, directory, processes, summary)
    shown = ", ".join(documents[:_IDS_IN_MESSAGE])
    more = len(documents) - _IDS_IN_MESSAGE
    end = f"({len(bad)} in all); documents: {shown}{f' and {more} more' if more > 0 else ''}"
    if of_weights:
        return NonFiniteError(
            f"step {result.step}: the update, with a learning rate of {result.learning_rate:g}, made weights that are "
            f"not finite; first parameter: {bad[0]} {end}; no checkpoint holds them; {where}"
        )
    return NonFiniteError(
        f"step {result.step}: {_blame(guilty, processes)}{_bad_figure(summary)} is not finite; "
        f"{f'first parameter with a non-finite gradient: {bad[0]}' if bad else 'all gradients are finite'} {end}; "
        f"the update was not applied; {where}"
    )


def _write_dump(
    result: StepResult, model: DecoderLM, directory: Path, processes: DistributedContext, summary: dict[str, Any]
) -> str:
    """Write the files of a dump; returns the end of a sentence with their folder, or with the error."""
    folder = directory / f"step_{result.step:08d}"
    whole = gather_full_model(model, processes)
    try:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        name = "batch.pt" if processes.size == 1 else f"batch_rank{processes.rank}.pt"
        torch.save([batch._asdict() for batch in result.batches], folder / name)
        if whole is not None:
            (folder / "summary.json").write_text(json.dumps(summary, indent=1))
            save_weights(whole, folder / "weights")
    except (OSError, RuntimeError) as error:  # PyTorch raises a RuntimeError when the disk is full.
        return f"the dump could not be written: {error}"
    return f"dump in {folder}"


def _blame(guilty: list[int], processes: DistributedContext) -> str:
    if processes.size == 1:
        return ""
    if not guilty:
        return "from an unknown rank: "
    return f"from rank{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))}: "


def _bad_figure(summary: dict[str, Any]) -> str:
    loss = summary["loss_nats_per_token"]
    return f"gradient norm {summary['gradient_norm']}" if math.isfinite(loss) else f"loss {loss}"


@dataclass(frozen=True)
class _Part:
    """The bad gradients, documents and rows of one process."""

    bad: list[str]
    finite: bool
    documents: list[str]
    sample_indices: list[int]


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(local_shard(tensor)).all())
