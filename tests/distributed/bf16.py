"""The error of a whole gradient under bf16, in every mode: run as two processes by test_gradients.py."""

import json
import sys
import warnings
from pathlib import Path

import torch

from trifocal.checks.process_worker import Case, backward, full_tensor
from trifocal.distributed.parallel import parallelize
from trifocal.distributed.processes import processes_started
from trifocal.models import DecoderLM
from trifocal.testing.small_models import random_tokens, small_config
from trifocal.train.step.optimizer import gradient_norm

CPU = torch.device("cpu")
LENGTH = 40


def bf16_error(mode, processes):
    """Error of the whole gradient under bf16, relative to its size: against fp32 in one process."""
    config = small_config()
    tokens = random_tokens((4, LENGTH), 64, CPU)
    exact = DecoderLM(config)
    exact.init_weights(0)
    exact(tokens, tokens.roll(-1, 1)).backward()
    case = Case(mode)
    model = DecoderLM(config)
    model.init_weights(0)
    parallel = parallelize(model, processes, mode, precision="bf16")
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: streams.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if mode == "none":
            model(tokens, tokens.roll(-1, 1)).backward()
        else:
            backward(case, model, parallel, processes, tokens)
    assert set(streams) == {torch.float32}, "the residual stream stays fp32"
    assert all(parameter.grad.dtype == parameter.dtype == torch.float32 for parameter in model.parameters())
    difference = [
        (full_tensor(mine.grad) - theirs.grad).square().sum()
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True)
    ]
    return (sum(difference).sqrt() / gradient_norm(exact.parameters())).item()


if __name__ == "__main__":
    warnings.simplefilter("error")
    with processes_started(CPU, timeout_seconds=60) as processes:
        errors = {mode: bf16_error(mode, processes) for mode in ("none", "ddp", "fsdp")}
        if processes.is_rank0:
            Path(sys.argv[1]).write_text(json.dumps(errors))
