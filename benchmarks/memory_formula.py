"""Train presets for three steps on this GPU and compare the memory formula with PyTorch's allocator.

    python benchmarks/memory_formula.py                 # every case, with the kernels and with the reference
    python benchmarks/memory_formula.py --only shake paper
    torchrun --nproc-per-node=2 benchmarks/memory_formula.py --only ddp fsdp

Each case builds its model anew and takes three steps of the trainer's own code on random tokens; the peak is that of
the last two. The exit status is 1 if a case is off by more than 10 %. To find the tensors that a formula lacks, train
the case with `--trace.what memory` and open the snapshot in pytorch.org/memory_viz.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trifocal.bench.results import ResultFile
from trifocal.data import Batch
from trifocal.distributed import parallelize, processes_started
from trifocal.doctor.needs import Machine, setup_of
from trifocal.models import DecoderLM, training_memory
from trifocal.runlog import Heartbeat
from trifocal.train import load_config
from trifocal.train.arguments import override
from trifocal.train.graphs import MicroBatchGraphs
from trifocal.train.optimizer import make_optimizer
from trifocal.train.step import TrainStep

CONFIGS = Path(__file__).parent.parent / "configs"
GIB = 2**30
ALLOWED = 0.10


@dataclass(frozen=True)
class Case:
    """A preset, the flags that differ from it, and whether its rows are passed as packed documents."""

    name: str
    config: str
    flags: dict[str, Any] = field(default_factory=dict)
    packed: bool = False


# Cases are compiled and recorded only if their flags ask for it.
EAGER = {"train.compile": "false", "train.cuda_graphs": "false"}
COMPILED, RECORDED = {"train.compile": "true"}, {"train.cuda_graphs": "true"}
CHECKPOINTED, KEPT = ({"train.activation_checkpointing": kind} for kind in ("all", "none"))
REFERENCE = {"model.backend": "reference"}
SHAKE = "m7c_shake.toml"
CASES = (
    Case("shake", SHAKE, CHECKPOINTED),
    Case("shake, kept", SHAKE, KEPT),
    Case("shake, packed", SHAKE, CHECKPOINTED, packed=True),
    Case("shake, fp32", SHAKE, {**KEPT, "train.precision": "fp32"}),
    Case("shake, half", SHAKE, {"train.activation_checkpointing": "0:6"}),
    Case("8 sequences", SHAKE, {**CHECKPOINTED, "train.micro_batch_size": 8, "train.global_batch_size": 8}),
    Case("long", "m7c_long.toml", {**KEPT, "train.sequence_length": 32768, "train.global_batch_size": 1}),
    Case("long, checkpointed", "m7c_long.toml", {"train.sequence_length": 32768, "train.global_batch_size": 1}),
    Case("dense", SHAKE, {**KEPT, "model.attention": "dense"}),
    Case("dense, checkpointed", SHAKE, {**CHECKPOINTED, "model.attention": "dense"}),
    Case("paper", "paper_layer.toml"),
    Case("wide, 4 layers", "wide_1b3.toml", {"model.num_layers": 4, "train.global_batch_size": 1}),
    Case("minimal", "minimal.toml"),
    Case("showcase", "showcase.toml", {}, packed=True),
    Case("shake, reference", SHAKE, {**CHECKPOINTED, **REFERENCE}),
    Case("shake, reference, kept", SHAKE, {**KEPT, **REFERENCE}),
    Case("shake, reference, packed", SHAKE, {**KEPT, **REFERENCE}, packed=True),
    Case("shake, recorded", SHAKE, {**CHECKPOINTED, **RECORDED}),
    Case("shake, recorded, kept", SHAKE, {**KEPT, **RECORDED}),
    Case("shake, compiled", SHAKE, {**CHECKPOINTED, **COMPILED}),
    Case("shake, compiled, kept", SHAKE, {**KEPT, **COMPILED}),
    Case("shake, compiled, recorded", SHAKE, {**CHECKPOINTED, **COMPILED, **RECORDED}),
    Case("shake, compiled, recorded, kept", SHAKE, {**KEPT, **COMPILED, **RECORDED}),
    Case("shake, reference, compiled", SHAKE, {**CHECKPOINTED, **COMPILED, **REFERENCE}),
    Case("shake, reference, compiled, kept", SHAKE, {**KEPT, **COMPILED, **REFERENCE}),
)
# Under torchrun, as many sequences a process.
SHARED = (
    Case("ddp", SHAKE, {**CHECKPOINTED, "parallel.mode": "ddp"}),
    Case("fsdp", SHAKE, {**CHECKPOINTED, "parallel.mode": "fsdp"}),
    Case("fsdp, wide", "wide_1b3.toml", {"parallel.mode": "fsdp"}),
    Case("ddp, accumulation", SHAKE, {**CHECKPOINTED, "parallel.mode": "ddp", "accumulation": 2}),
    Case("fsdp, accumulation", SHAKE, {**CHECKPOINTED, "parallel.mode": "fsdp", "accumulation": 2}),
)


def measure(case: Case, processes: Any) -> dict[str, Any]:
    """Train, and compare."""
    flags = {"run.device": "cuda", **EAGER, **case.flags}
    config = load_config(CONFIGS / case.config)
    if processes.size > 1:
        whole = config.train.micro_batch_size * processes.size * flags.pop("accumulation", 1)
        flags["train.global_batch_size"] = whole
    config = override(config, [f"--{name}={value}" for name, value in flags.items()])
    device, train = processes.device, config.train
    mode = config.parallel.mode if processes.size > 1 else "none"
    setup = replace(setup_of(config, Machine.here({}), processes.size, mode), packed=case.packed)
    estimate = training_memory(config.model, setup)

    model = DecoderLM(config.model).to(device)
    model.set_activation_checkpointing(*train.checkpointed_layers(config.model.num_layers))
    parallel = parallelize(model, processes, mode, precision=train.precision, exchange_after=setup.cuda_graphs)
    if train.compile:
        model.compile_training()
    graphs = None
    if setup.cuda_graphs:
        graphs = MicroBatchGraphs(parallel.module, model.parameters(), device, train.precision, parallel)
    optimizer = make_optimizer(model, config.optimizer)
    train_step = TrainStep(parallel.module, optimizer, device, train, parallel=parallel, graphs=graphs)
    batches = [batch(config, case.packed) for _ in range(setup.micro_batches)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Heartbeat(Path(folder) / "heartbeat", processes.rank, 3600.0, device=device) as heartbeat,
    ):
        for step in range(1, 4):
            if step == 2:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            result = train_step.run(
                step,
                batches,
                phases=heartbeat,
                total_targets=processes.size * sum(int((batch.targets >= 0).sum()) for batch in batches),
            )
        assert result.finite.wait(), "a loss or gradient was not finite"
    # The allocator does not count the memory of graphs.
    peak = torch.cuda.max_memory_allocated(device) + (graphs.memory_bytes if graphs is not None else 0)
    return {
        "case": case.name,
        "backend": setup.backend if config.model.attention == "nsa" else "dense",
        "gpus": processes.size,
        "measured_gib": peak / GIB,
        "formula_gib": estimate.total / GIB,
        "formula_over_measured": estimate.total / peak,
        "moment": estimate.moment,
        "compiled": train.compile,
        **{f"{part}_gib": getattr(estimate, part) / GIB for part in ("weights", "optimizer", "gradients", "copies")},
        **{f"{part}_gib": getattr(estimate, part) / GIB for part in ("activations", "working", "workspace")},
    }


def batch(config: Any, packed: bool) -> Batch:
    """Random tokens; with two borders in the micro-batch if it is to be packed."""
    shape = (config.train.micro_batch_size, config.train.sequence_length)
    tokens = torch.randint(0, config.model.vocab_size, shape)
    borders = torch.tensor([0, shape[1] // 3, tokens.numel()], dtype=torch.int32) if packed else None
    return Batch(tokens, tokens, borders, (), 0, 0)


def main() -> int:
    """Measure the cases; the exit status is 1 if one is off by too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    cases = SHARED if several else CASES
    parser.add_argument("--only", nargs="+", choices=[case.name for case in cases], default=[c.name for c in cases])
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    with processes_started(torch.device("cuda"), timeout_seconds=300.0) as processes:
        file = ResultFile(
            f"memory_formula_{processes.size}", "The memory formula beside the allocated memory",
            folder=options.output, commit=options.commit,
        )  # fmt: skip
        for case in cases:
            if case.name not in options.only:
                continue
            rows.append(measure(case, processes))
            gc.collect()
            # cuBLAS keeps 32 MiB for each stream that ever multiplied: a recorded case's would count in all after it.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            if processes.is_rank0:
                print(json.dumps(rows[-1]), flush=True)
                notes = ["The most that PyTorch's allocator held in steps 2 and 3; random tokens."]
                file.write(rows, notes=notes)
        if processes.is_rank0:
            print(file.page.read_text())
    return int(any(abs(row["formula_over_measured"] - 1) > ALLOWED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
