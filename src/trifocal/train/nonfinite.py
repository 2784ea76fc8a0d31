"""What to tell, and to keep, when a loss, a gradient or a weight is not finite."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trifocal.distributed import Parallel, Processes, whole_model
from trifocal.models import DecoderLM, save_weights
from trifocal.train.optimizer import own_part
from trifocal.train.step import StepResult

_IDS_IN_MESSAGE = 4


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is not finite, and the update was not applied; or the update made weights that
    are not finite, and these are not saved."""

    agreed = True
    """Every process of the run raises it in the same step."""


def weights_are_finite(model: DecoderLM, processes: Processes) -> bool:
    """Whether all weights are finite, in every process; all of them call this."""
    finite = torch.stack([torch.isfinite(own_part(parameter)).all() for parameter in model.parameters()]).all()
    return all(processes.gather(bool(finite)))


def stop_non_finite(
    result: StepResult,
    model: DecoderLM,
    learning_rate: float,
    directory: Path,
    processes: Processes | None = None,
    parallel: Parallel | None = None,
    *,
    of_weights: bool = False,
) -> NonFiniteError:
    """Write a dump of a step that went wrong, and make the error that ends the run.

    Every process calls this: all of them know that the step went wrong, each knows its own part in it.

    The dump, `step_*/`, holds `summary.json` (loss, norm, parameters with bad gradients, document ids),
    `batch.pt` (the micro-batches; `batch_rank*.pt` of several processes) and the weights that the step started from,
    which are also the current ones. Where the weights are at fault, they are those that the step has made.

    Args:
        result: The step; its gradients are still in the parameters.
        model: The model.
        learning_rate: Of the step.
        directory: The run's `dumps`.
        processes: This process among those of the run.
        parallel: How the model is spread over them.
        of_weights: The step was sound and its update made weights that are not finite.

    Returns:
        The error, to be raised. Its message names the rank, the step, the first parameter and the documents.
    """
    processes = processes or Processes()
    names = [name for name, _ in model.named_parameters()]
    mine = _Part(
        [name for name, p in model.named_parameters() if not _is_finite(p if of_weights else p.grad)],
        bool(torch.isfinite(result.local_loss))
        and (parallel is None or parallel.watch is None or parallel.watch.finite()),
        [name for batch in result.batches for name in batch.document_ids],
        [batch.sample_index for batch in result.batches],
    )
    parts = processes.gather(mine)
    found = {name for part in parts for name in part.bad}
    bad = [name for name in names if name in found]
    guilty = [rank for rank, part in enumerate(parts) if not part.finite] if processes.size > 1 else [0]
    shown_parts = [parts[rank] for rank in guilty] or parts
    documents = list(dict.fromkeys(name for part in shown_parts for name in part.documents))
    loss, norm = result.loss.item(), result.gradient_norm.item()
    folder = directory / f"step_{result.step:08d}"
    summary = {
        "step": result.step,
        "loss_nats_per_token": loss,
        "gradient_norm": norm,
        "learning_rate": learning_rate,
        f"parameters_with_non_finite_{'value' if of_weights else 'gradient'}": bad,
        "document_ids": documents,
        "sample_indices": [index for part in shown_parts for index in part.sample_indices],
    }
    if processes.size > 1 and not of_weights:
        summary["ranks"] = guilty
    whole = whole_model(model, processes)
    where = f"dump in {folder}"
    try:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        name = "batch.pt" if processes.size == 1 else f"batch_rank{processes.rank}.pt"
        torch.save([batch._asdict() for batch in result.batches], folder / name)
        if whole is not None:
            (folder / "summary.json").write_text(json.dumps(summary, indent=1))
            save_weights(whole, folder / "weights")
    except (OSError, RuntimeError) as error:  # What PyTorch makes of a full disk is no OSError.
        where = f"the dump could not be written: {error}"
    shown = ", ".join(documents[:_IDS_IN_MESSAGE])
    more = len(documents) - _IDS_IN_MESSAGE
    last = f"documents: {shown}{f' and {more} more' if more > 0 else ''}"
    if of_weights:
        return NonFiniteError(
            f"step {result.step}: the update, with a learning rate of {learning_rate:g}, made weights that are not "
            f"finite; first parameter: {bad[0]} ({len(bad)} in all); {last}; no checkpoint holds them; {where}"
        )
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    first = f"first parameter with a non-finite gradient: {bad[0]}" if bad else "all gradients are finite"
    who = ""
    if processes.size > 1:
        ranks = f"rank{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))}" if guilty else "an unknown rank"
        who = f"from {ranks}: "
    return NonFiniteError(
        f"step {result.step}: {who}{what} is not finite; {first} ({len(bad)} in all); {last}; "
        f"the update was not applied; {where}"
    )


@dataclass(frozen=True)
class _Part:
    """What one process knows of the step."""

    bad: list[str]
    finite: bool
    documents: list[str]
    sample_indices: list[int]


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(own_part(tensor)).all())
