"""One process of `scale.py`: it trains the rows of a plan, each a whole run of the trainer, in one start.

Started by `scale.py` with torchrun's variables: `scale_worker.py CONFIGS PLAN`. The output of a row goes to a file for
each rank; rank 0 writes the figures.
"""

import gc
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trifocal.distributed import Processes, leave_at_once, processes_started
from trifocal.doctor.needs import Machine, setup_of
from trifocal.models import training_memory
from trifocal.runlog import read_metrics
from trifocal.train import load_config
from trifocal.train.lock import RunLock
from trifocal.train.loop import run_training
from trifocal.train.preflight import choose_device, preflight
from trifocal.train.run_config import RunConfig
from trifocal.train.run_directory import create_run_directory
from trifocal.train.train_setup import TrainSetup

GIB = 2**30
OWN_PHASES = ("data", "forward", "backward", "optimizer")


def train(config: RunConfig, processes: Processes) -> tuple[int, float]:
    """A run to its end, or to a signal: its steps, and the peak of the bytes that it allocated on the fullest GPU."""
    on_gpu = processes.device.type == "cuda"
    before = 0
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    tokenizer, notes = processes.run_on_all(lambda: preflight(config, processes.device, processes.size))
    setup = TrainSetup(config, Path(config.run.directory), processes, tokenizer)
    with RunLock() as lock:
        processes.run_on_rank0(lambda: create_run_directory(config, lock, overwrite=True))
        steps = run_training(setup, notes, None, lock).step
    # The allocator does not count the memory in which graphs keep activations.
    graphs = 0 if setup.graphs is None else setup.graphs.memory_bytes
    return steps, max(processes.gather(torch.cuda.max_memory_allocated() - before + graphs if on_gpu else 0))


def measured(config: RunConfig, configured_interval: int, steps: int, peak: float, size: int) -> dict[str, Any]:
    """The figures of the run's own files."""
    folder = Path(config.run.directory)
    metrics = read_metrics(folder / "metrics.jsonl")
    rows = [row for row in metrics if row["kind"] == "train"]
    # The first half holds compilation and the first exchanges.
    steady = rows[len(rows) // 2 :]
    step_seconds = median(row["step_seconds"] for row in steady)
    saved = [row for row in metrics if row.get("name") == "checkpoint_saved"]
    # The first one warms files and buffers up; the last is never written in the background.
    typical = saved[:-1] if config.checkpoint.asynchronous and len(saved) > 1 else saved
    blocked = typical[-1]["blocked_seconds"]
    beat = json.loads((folder / "heartbeat" / "rank0.jsonl").read_text().splitlines()[-1])["total_seconds"]
    wanted = config.train.steps
    formula = training_memory(config.model, setup_of(config, Machine.here({}), size))
    return {
        "steps": steps,
        "compiled": config.train.compile,
        "tokens_per_second": median(row["tokens_per_second"] for row in steady),
        "step_ms": 1000 * step_seconds,
        "host_ms": 1000 * sum(beat.get(phase, 0.0) for phase in OWN_PHASES) / steps,
        "wait_ms": 1000 * beat.get("wait", 0.0) / steps,
        "data_wait_ms_p95": 1000 * steady[-1]["data_wait_seconds_p95"],
        "phase_seconds": beat,
        "peak_gib_a_gpu": peak / GIB,
        "formula_gib": formula.total / GIB,
        "checkpoint_seconds": [row["save_seconds"] for row in saved],
        "checkpoint_blocked_seconds": blocked,
        "checkpoint_share": blocked / (configured_interval * step_seconds),
        "executed_mfu": steady[-1].get("executed_mfu"),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "outcome": "ended" if steps == wanted else f"stopped at step {steps} of {wanted}",
    }


def main() -> None:
    """Take the rows of the plan."""
    configs, plan = Path(sys.argv[1]), Path(sys.argv[2])
    cases = json.loads(plan.read_text())
    with processes_started(choose_device(cases[0]["flags"]["run.device"])) as processes:
        for case in cases:
            output = os.open(plan.with_name(f"{case['label']}_rank{processes.rank}"), os.O_CREAT | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(output, stream)
            overrides = [f"--{name}={value}" for name, value in case["flags"].items()]
            config = load_config(configs / case["config"], [*overrides, f"--run.directory={plan.parent / 'run'}"])
            interval = load_config(configs / case["checkpoint_config"], []).checkpoint.interval_steps
            steps, peak = train(config, processes)
            if processes.is_rank0:
                found = measured(config, interval, steps, peak, processes.size)
                partial = plan.with_name("partial")
                partial.write_text(json.dumps(found))
                partial.rename(plan.with_name(f"{case['label']}.json"))
            # The next model needs the room, and compiles its own code.
            gc.collect()
            torch._dynamo.reset()
    leave_at_once(0)


if __name__ == "__main__":
    main()
