"""Sequences that four processes share, two by two and all four, against one process in fp64: run by test_context.py."""

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trifocal.distributed.context import make_context_shard
from trifocal.distributed.processes import processes_started
from trifocal.models.choice_teaching import ChoiceTeaching
from trifocal.nn.rope import RopeScaling
from trifocal.ops import Geometry
from trifocal.testing.small_models import make_model, random_tokens, small_config

CPU = torch.device("cpu")
# Cuts into 4 and into 8 chunks, of 26 and 13 tokens: ends lie inside of compressed and selected blocks, and stretches.
ROWS, LENGTH, STRETCH = 2, 104, 5
# Documents of one token, under a compressed block, ending at the end of a chunk (13, 104), over several chunks.
BORDERS = (0, 1, 4, 13, 50, 103, 104, 111, 190, 208)
GEOMETRY = Geometry(4, 2, 8, 4, 1, 1, 19)
# Frequencies depend on the length of each document.
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is run."""

    name: str
    changes: dict[str, Any]
    packed: bool = False
    taught: bool = False
    checkpointing: bool = False


MODELS = {
    "nsa": {},
    "nsa, learned compressor, shared keys, norms": {"compressor": "mlp", "shared_kv": True, "qk_norm": True},
    "nsa, index": {"chooser": "index", "rope_scaling": YARN},
    "nsa, exact": {"selection": "exact"},
    "nsa, random": {"selection": "random"},
    "selected": {"attention": "selected"},
    "selected, index": {"attention": "selected", "chooser": "index"},
    # Of four processes a chunk has just the tokens in front of a query that its window sees.
    "window, dense": {"layer_types": ("window", "dense"), "sliding_window": 14},
    # Of two processes a chunk is longer than the window, of four it is shorter.
    "window, selected, index": {"layer_types": ("window", "selected"), "chooser": "index", "sliding_window": 20},
}
TAUGHT = ("nsa, index", "selected, index", "window, selected, index")


class Choices(TorchDispatchMode):
    """Keeps the blocks that each call chooses while it is entered, [B, T, G, N]."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.trifocal.select_blocks.default, torch.ops.trifocal.select_blocks_by_index.default):
            self.found.append(result)
        return result


def cases():
    """Every model, plain and packed, but for choices that are made alike; the choice is taught where it can be."""
    found = []
    for packed in (False, True):
        for name, changes in MODELS.items():
            if packed and name in ("nsa, exact", "selected"):
                continue
            label = name + (", packed" if packed else "")
            found.append(Case(label, changes, packed, name in TAUGHT, checkpointing=packed and name == "nsa"))
    return found


def run(case, shard):
    """Loss, gradients, choices of the forward pass, and the totals of the teaching."""
    config = small_config(geometry=GEOMETRY, backend="reference", **case.changes)
    model = make_model(config, CPU, torch.float64)
    if case.checkpointing:
        model.set_activation_checkpointing(0, config.num_layers)
    model.context = shard
    tokens = random_tokens((ROWS, LENGTH), 64, CPU)
    # Valid targets are not as many in each chunk.
    targets = tokens.roll(-1, 1).masked_fill(torch.arange(LENGTH) % 13 > 10, -100)
    targets[:, :9] = -100
    given = {}
    layers = config.num_layers
    totals = torch.zeros(layers, 2, dtype=torch.float64)
    if case.taught:
        scales = torch.arange(1, layers + 1, dtype=torch.float64)
        given["teaching"] = ChoiceTeaching(torch.tensor(3), scales, totals, LENGTH, STRETCH)
    if case.packed:
        tokens, targets = tokens.view(1, -1), targets.view(1, -1)
        given["cu_seqlens"] = torch.tensor(BORDERS)
    if shard is not None:
        tokens, targets = shard.local_tokens(tokens), shard.local_tokens(targets)
    with Choices() as choices:
        loss = model(tokens, targets, **given)
    loss.backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return loss.detach(), gradients, choices.found, totals


def runs_alone(processes):
    """Every case in one process; each process takes its part of the cases, and all get all."""
    parts = processes.gather([run(case, None) for case in cases()[processes.rank :: processes.size]])
    return [parts[number % processes.size][number // processes.size] for number in range(len(cases()))]


def difference(case, alone, shard, group):
    """What the processes of a group differ by from one process, relative to the largest entry."""
    received = []

    def counted(*given):
        found = shard.gather(*given)
        received.append(sum(x.nbytes for x in found))
        return found

    together = run(case, dataclasses.replace(shard, gather=counted))

    def summed(x):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    def relative(mine, exact):
        return ((mine - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()

    # Of each layer two choices, one a chunk.
    pairs = zip(together[2][::2], together[2][1::2], strict=True)
    chosen = shard.gather([torch.cat(pair, 1).double() for pair in pairs])
    return {
        "name": f"{case.name}, {shard.size} processes",
        "loss": relative(summed(together[0]), alone[0]),
        "gradients": max(relative(summed(a), b) for a, b in zip(together[1], alone[1], strict=True)),
        "figures": relative(summed(together[3]), alone[3]),
        "choices": len(chosen),
        "choices differ": len(chosen) != len(alone[2])
        or any(not torch.equal(a.int(), b) for a, b in zip(chosen, alone[2], strict=True)),
        "share": relative(together[0], alone[0]),
        # The first exchange is of counts; those of activation checkpointing repeat the others.
        "received": received[1 : 1 + small_config(**case.changes).num_layers],
    }


def main(path, processes):
    """Measure all cases in groups of two, of which each has every other case, and in one of four."""
    found, alone = [], list(zip(cases(), runs_alone(processes), strict=True))
    groups = {2: [dist.new_group([0, 1]), dist.new_group([2, 3])], 4: [dist.new_group([0, 1, 2, 3])]}
    for size, of_size in groups.items():
        number = processes.rank // size
        shard, group = make_context_shard(processes, size), of_size[number]
        found += [difference(case, one, shard, group) for case, one in alone[number :: len(of_size)]]
    # The ranks that begin a group of two; in the group of four all have the same.
    pairs = processes.gather(found)
    rows = {row["name"]: row for rank in (0, 2) for row in pairs[rank]}
    if processes.is_rank0:
        Path(path).write_text(json.dumps(list(rows.values())))


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with processes_started(CPU, timeout_seconds=60) as all_processes:
        main(sys.argv[1], all_processes)
