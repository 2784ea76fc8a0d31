"""The optimizer of a model's parameters, and a step that never applies a gradient which is not finite."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trifocal.distributed.parallel import local_shard
from trifocal.errors import UserError
from trifocal.nn.chooser import IndexHeads
from trifocal.nn.gate import SigmoidGate
from trifocal.train.config.sections import OptimizerSection
from trifocal.train.step.muon import MuonWithAdamW


class DeviceFlag:
    """A boolean scalar on its way to the host; `wait` waits only for it, not for work that was queued after it."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._copied: torch.cuda.Event | None = None
        if value.is_cuda:
            self._value = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> bool:
        """Wait for the value."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._value)


def make_optimizer(model: nn.Module, config: OptimizerSection) -> torch.optim.AdamW:
    """Fused AdamW over what is trained: only matrices of linear maps decay, and an index has its own rate. With "muon",
    Muon trains the matrices of the layers but those of gates and an index. `set_learning_rate` comes before every step.
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    index = index_parameters(model)
    apart = set(map(id, index))
    trained = [one for one in model.parameters() if one.requires_grad]
    decayed = [one for one in trained if id(one) in matrices - apart]
    spared = [one for one in trained if id(one) not in matrices | apart]
    factor = config.adamw_lr_factor if config.kind == "muon" else 1.0
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay, "lr_factor": factor},
        {"params": spared, "weight_decay": 0.0, "lr_factor": factor},
        {"params": index, "weight_decay": config.weight_decay, "lr_factor": factor * config.index_lr_factor},
    ]
    kind: type[torch.optim.AdamW] = torch.optim.AdamW
    if config.kind == "muon":
        kind = MuonWithAdamW
        layers = getattr(model, "blocks", nn.ModuleList())
        inner = {id(module.weight) for module in layers.modules() if isinstance(module, nn.Linear)}
        inner -= {id(module.proj.weight) for module in layers.modules() if isinstance(module, SigmoidGate)}
        groups[0]["params"] = [one for one in decayed if id(one) not in inner]
        by_muon = [one for one in decayed if id(one) in inner]
        if not by_muon:
            raise UserError('optimizer.kind "muon" has no matrix of a layer to train here; take "adamw"')
        groups.insert(0, {**groups[0], "params": by_muon, "momentum": config.momentum, "lr_factor": 1.0})
    optimizer = kind(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
    set_learning_rate(optimizer, config.learning_rate)
    return optimizer


def freeze(model: nn.Module, only: str) -> None:
    """Freeze what `train.only` leaves as it is."""
    if only == "chooser":
        model.requires_grad_(False)
        for parameter in index_parameters(model):
            parameter.requires_grad_()


def index_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the index heads, which only the loss of the choice trains."""
    return [one for module in model.modules() if isinstance(module, IndexHeads) for one in module.parameters()]


def set_learning_rate(optimizer: torch.optim.AdamW, learning_rate: float) -> None:
    """Set the learning rate of the next step, in each group times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_factor"]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of the whole gradient over all shards, fp32, on the device; NaN or infinite where any entry is."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    first = gradients[0] if gradients else None
    if not isinstance(first, DTensor):
        return torch.nn.utils.get_total_norm(gradients)
    # Over local shards, then one all-reduce: operations on many DTensors cost the host milliseconds.
    with torch.no_grad():
        norm = torch.nn.utils.get_total_norm([local_shard(gradient) for gradient in gradients])
    square = norm.double().square()
    for dimension, placement in enumerate(first.placements):
        if placement.is_shard():
            dist.all_reduce(square, group=first.device_mesh.get_group(dimension))
    return square.sqrt().float()


def guarded_step(
    optimizer: torch.optim.AdamW,
    parameters: list[nn.Parameter],
    norm: Tensor,
    loss: Tensor,
    clip_norm: float,
    apart: list[nn.Parameter] | None = None,
) -> DeviceFlag:
    """Clip and take one step, unless the loss or the gradient is not finite: then nothing changes. Returns whether it
    is taken, which the host may know before the update has ended.

    The device decides: the fused kernel skips the update where `found_inf` is set, as for a gradient scaler. `norm` is
    that of the gradient of `parameters`; those of `apart` are clipped by their own. A `clip_norm` of 0 does not clip.
    """
    norms = [(parameters, norm)] + ([(apart, gradient_norm(apart))] if apart else [])
    finite = torch.isfinite(torch.stack([loss, *(part for _, part in norms)])).all()
    flag = DeviceFlag(finite)
    if clip_norm:
        for clipped, part in norms:
            torch.nn.utils.clip_grads_with_norm_(clipped, clip_norm, torch.where(finite, part, 0.0))
    optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
    optimizer.step()
    return flag
