"""The error of a whole gradient under bf16, alone and of two processes that share a sequence.

`python context_bf16.py PATH DEVICE LENGTH`, in two processes: run by tests/gpu/test_distributed.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trifocal.distributed import DistributedContext, processes_started
from trifocal.distributed.context import make_context_shard
from trifocal.models import DecoderLM
from trifocal.nn.context import ContextShard
from trifocal.ops import Geometry
from trifocal.testing.small_models import random_tokens, small_config

GEOMETRY = Geometry(32, 16, 64, 8, 1, 2, 128)


def gradient(
    processes: DistributedContext, length: int, packed: bool, shard: ContextShard | None, *, exact: bool = False
) -> list[torch.Tensor]:
    """The whole gradient, in fp32."""
    config = small_config(
        geometry=GEOMETRY, head_dim=64, value_dim=64, num_heads=8, backend="reference" if exact else "auto"
    )
    model = DecoderLM(config)
    model.init_weights(0)
    model.to(processes.device)
    model.context = shard
    tokens = random_tokens((1, length), 64, processes.device)
    given: dict[str, Any] = {}
    if packed:
        given["cu_seqlens"] = torch.tensor([0, length // 3, length // 2 + 1, length])
    targets = tokens.roll(-1, 1)
    if shard is not None:
        tokens, targets = shard.local_tokens(tokens), shard.local_tokens(targets)
    with torch.autocast(processes.device.type, dtype=torch.bfloat16, enabled=not exact):
        model(tokens, targets, **given).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    if shard is not None:
        for one in gradients:
            dist.all_reduce(one)
    return gradients


def norm(tensors: list[torch.Tensor]) -> float:
    """The 2-norm of all together."""
    return torch.stack([x.square().sum() for x in tensors]).sum().sqrt().item()


def main(path: str, processes: DistributedContext, length: int) -> None:
    """Errors relative to the size of the gradient: plain and packed, each alone and shared."""
    shard = make_context_shard(processes, processes.size)
    found = {}
    for kind, packed in (("plain", False), ("packed", True)):
        exact = gradient(processes, length, packed, None, exact=True)
        size = norm(exact)
        for name, given in (("alone", None), ("shared", shard)):
            mine = gradient(processes, length, packed, given)
            found[f"{kind} {name}"] = norm([a - e for a, e in zip(mine, exact, strict=True)]) / size
    if processes.is_rank0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with processes_started(torch.device(sys.argv[2]), timeout_seconds=60) as all_processes:
        main(sys.argv[1], all_processes, int(sys.argv[3]))
