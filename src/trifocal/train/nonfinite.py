"""What to tell, and to keep, when a loss or a gradient is not finite."""

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from trifocal.models import DecoderLM, save_weights
from trifocal.train.step import StepResult

_IDS_IN_MESSAGE = 4


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is not finite. The update was not applied."""


def stop_non_finite(result: StepResult, model: DecoderLM, learning_rate: float, directory: Path) -> NonFiniteError:
    """Write a dump of a step that went wrong, and make the error that ends the run.

    The dump, `step_*/`, holds `summary.json` (loss, norm, parameters with bad gradients, document ids),
    `batch.pt` (the micro-batches) and the weights that the step started from, which are also the current ones.

    Args:
        result: The step; its gradients are still in the parameters.
        model: The model.
        learning_rate: Of the step.
        directory: The run's `dumps`.

    Returns:
        The error, to be raised. Its message names the step, the first parameter and the documents.
    """
    bad = [name for name, parameter in model.named_parameters() if not _is_finite(parameter.grad)]
    documents = list(dict.fromkeys(name for batch in result.batches for name in batch.document_ids))
    loss, norm = result.loss.item(), result.gradient_norm.item()
    folder = directory / f"step_{result.step:08d}"
    summary = {
        "step": result.step,
        "loss_nats_per_token": loss,
        "gradient_norm": norm,
        "learning_rate": learning_rate,
        "parameters_with_non_finite_gradient": bad,
        "document_ids": documents,
        "sample_indices": [batch.sample_index for batch in result.batches],
    }
    where = f"dump in {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
        torch.save([batch._asdict() for batch in result.batches], folder / "batch.pt")
        save_weights(model, folder / "weights")
    except OSError as error:
        where = f"the dump could not be written: {error}"
    shown = ", ".join(documents[:_IDS_IN_MESSAGE])
    more = len(documents) - _IDS_IN_MESSAGE
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    first = f"first parameter with a non-finite gradient: {bad[0]}" if bad else "all gradients are finite"
    return NonFiniteError(
        f"step {result.step}: {what} is not finite; {first} ({len(bad)} in all); documents: {shown}"
        f"{f' and {more} more' if more > 0 else ''}; the update was not applied; {where}"
    )


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(torch.isfinite(gradient).all())
