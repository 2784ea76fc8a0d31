"""What two processes compute, against one: run as two processes by test_gradients.py, which reads the figures.

`python gradients.py FILE`: rank 0 writes, for each case, the largest difference of any parameter's gradient from one
process's, relative to the largest entry of that gradient, and its name.
"""

import dataclasses
import itertools
import json
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from trifocal.checks.seeds import make_model, random_tokens, small_config
from trifocal.distributed import Parallel, Processes, parallelise, processes_started
from trifocal.models import DecoderLM
from trifocal.train.config import OptimizerSection
from trifocal.train.optimizer import gradient_norm, guarded_step, make_optimizer

CPU = torch.device("cpu")
LENGTH = 40


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to take a step."""

    mode: str
    shards: int = 0
    num_layers: int = 2
    checkpointing: bool = False
    accumulation: int = 1
    static_graph: bool = False
    find_unused: bool = False
    reshard: bool = True

    @property
    def name(self) -> str:
        """What differs from the default, in words."""
        values = dataclasses.asdict(self)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return self.mode + "".join(
            f" {key}={value}" for key, value in values.items() if value != defaults.get(key) and key != "mode"
        )


def cases() -> list[Case]:
    """Every mode with and without checkpointing and accumulation; and the reports' own."""
    switches = list(itertools.product((False, True), (1, 2)))
    found = [
        Case(mode, shards=shards, checkpointing=recompute, accumulation=accumulation)
        for mode, shards in (("ddp", 0), ("fsdp", 0), ("hsdp", 1), ("hsdp", 2))
        for recompute, accumulation in switches
    ]
    found += [
        Case("ddp", num_layers=layers, checkpointing=recompute, static_graph=static, find_unused=unused)
        for layers, recompute, (static, unused) in itertools.product(
            (5, 12), (False, True), ((False, False), (True, False), (False, True))
        )
    ]
    found += [Case("ddp", static_graph=True, accumulation=2), Case("fsdp", reshard=False, checkpointing=True)]
    found += [
        Case("fsdp", num_layers=layers, checkpointing=recompute) for layers in (5, 12) for recompute in (False, True)
    ]
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor or the tensor that shards are of."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(case: Case, processes: Processes) -> tuple[DecoderLM, Parallel]:
    """The case's model and its parallel form."""
    model = make_model(small_config(num_layers=case.num_layers), CPU)
    if case.checkpointing:
        model.set_activation_checkpointing(0, case.num_layers)
    options = {"static_graph": case.static_graph, "find_unused_parameters": case.find_unused}
    parallel = parallelise(
        model, processes, case.mode, shards=case.shards, reshard_after_forward=case.reshard, **options
    )
    return model, parallel


def backward(case: Case, parallel: Parallel, processes: Processes, tokens: torch.Tensor) -> None:
    """This process's part of the gradient: its rows, in micro-batches."""
    rows = tokens.chunk(processes.size)[processes.rank]
    for index, batch in enumerate(rows.chunk(case.accumulation)):
        with parallel.micro_batch(last=index == case.accumulation - 1):
            (parallel.module(batch, batch.roll(-1, 1)) / case.accumulation).backward()


def difference(case: Case, processes: Processes) -> tuple[float, str]:
    """Largest relative difference of a gradient from one process's, over two steps, and whose."""
    model, parallel = spread(case, processes)
    alone = make_model(small_config(num_layers=case.num_layers), CPU)
    worst, name = 0.0, ""
    # The second step is the first that a static graph is used in.
    for seed in (1, 2):
        tokens = random_tokens((4, LENGTH), 64, CPU, seed=seed)
        for module in (model, alone):
            module.zero_grad(set_to_none=True)
        alone(tokens, tokens.roll(-1, 1)).backward()
        backward(case, parallel, processes, tokens)
        for (key, parameter), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
            found, exact = whole(parameter.grad), expected.grad
            relative = ((found - exact).abs().max() / exact.abs().max()).item()
            if not relative <= worst:
                worst, name = relative, key
    return worst, name


def bf16_error(mode: str, processes: Processes) -> float:
    """Error of the whole gradient under bf16, relative to its size: against fp32 in one process."""
    config = small_config()
    tokens = random_tokens((4, LENGTH), 64, CPU)
    exact = DecoderLM(config)
    exact.init_weights(0)
    exact(tokens, tokens.roll(-1, 1)).backward()
    case = Case(mode)
    model = DecoderLM(config)
    model.init_weights(0)
    parallel = parallelise(model, processes, mode, precision="bf16")  # type: ignore[arg-type]
    streams: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: streams.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if mode == "none":
            model(tokens, tokens.roll(-1, 1)).backward()
        else:
            backward(case, parallel, processes, tokens)
    assert set(streams) == {torch.float32}, "the residual stream stays fp32"
    assert all(parameter.grad.dtype == parameter.dtype == torch.float32 for parameter in model.parameters())
    difference = [
        (whole(mine.grad) - theirs.grad).square().sum()
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True)
    ]
    return (sum(difference).sqrt() / gradient_norm(exact.parameters())).item()


def five_steps(case: Case, processes: Processes) -> bool:
    """Whether all processes have the same parameters, bit for bit, after five steps that changed all of them."""
    model, parallel = spread(case, processes)
    before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    optimizer = make_optimizer(model, OptimizerSection(learning_rate=1e-2))
    for step in range(5):
        optimizer.zero_grad(set_to_none=True)
        backward(case, parallel, processes, random_tokens((4, LENGTH), 64, CPU, seed=step))
        parameters = list(model.parameters())
        guarded_step(optimizer, parameters, gradient_norm(parameters), torch.zeros(()), 1.0)
    after = [whole(parameter.detach()) for parameter in model.parameters()]
    moved = all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    copies = processes.gather([tensor.numpy() for tensor in after])
    return moved and all((a == b).all() for other in copies[1:] for a, b in zip(copies[0], other, strict=True))


def main(path: Path) -> None:
    """Measure every case."""
    warnings.simplefilter("error")
    figures = {}
    with processes_started(CPU, timeout_seconds=60) as processes:
        for case in cases():
            worst, name = difference(case, processes)
            figures[case.name] = {"difference": max(processes.gather(worst)), "parameter": name}
        for mode, shards in (("ddp", 0), ("fsdp", 0), ("hsdp", 1), ("hsdp", 2)):
            figures[f"{mode} {shards} five steps"] = five_steps(Case(mode, shards, accumulation=2), processes)
        figures["bf16"] = {mode: bf16_error(mode, processes) for mode in ("none", "ddp", "fsdp")}
        if processes.first:
            path.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
