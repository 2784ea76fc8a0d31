"""Steps of a configuration, taken in a process of their own, or in one for each GPU: `python -m … CONFIG OUTPUT`.

Rank 0 writes the figures to OUTPUT as JSON. The exit status is 0, 2 for a mistake of the user, and 3 if the memory does
not suffice; the last line of the error output says why.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from trifocal.distributed import DistributedContext, hard_exit, processes_started
from trifocal.errors import UserError, one_line
from trifocal.runlog import Heartbeat, memory_statistics
from trifocal.train.config.check import choose_device, preflight
from trifocal.train.config.load import load_config
from trifocal.train.config.sections import RunConfig
from trifocal.train.coordinator import StepCoordinator
from trifocal.train.out_of_memory import is_out_of_memory
from trifocal.train.setup import TrainSetup
from trifocal.train.step.optimizer import set_learning_rate
from trifocal.train.step.schedule import learning_rate_of
from trifocal.train.step.step import TrainStep
from trifocal.train.stop import StopSignals

OUT_OF_MEMORY = 3


def take_steps(config: RunConfig, processes: DistributedContext, folder: Path) -> dict[str, float]:
    """Take two steps, or one more where code is compiled or recorded; the last one is timed.

    Args:
        config: The configuration.
        processes: This process among those that train.
        folder: For the heartbeat.

    Returns:
        `seconds` of the step, its `tokens` in all processes, and `peak_bytes` of the fullest device.
    """
    train, device = config.train, processes.device
    tokenizer, _ = processes.run_on_all(lambda: preflight(config, device, processes.size))
    setup = TrainSetup(config, folder / "run", processes, tokenizer)
    try:
        step = TrainStep(
            setup.loss_function,
            setup.optimizer,
            device,
            train,
            parallel=setup.parallel,
            graphs=setup.graphs,
            teacher=setup.teacher,
        )
        coordinator, heartbeat = StepCoordinator(processes, setup.teacher), Heartbeat(folder)
        accumulation = train.global_batch_size // (train.micro_batch_size * processes.size)
        count = 3 if train.compile or setup.graphs is not None else 2
        seconds = 0.0
        for number in range(1, count + 1):
            set_learning_rate(setup.optimizer, learning_rate_of(config, number))
            begin = time.perf_counter()
            data = coordinator.next_step(
                setup.loader, accumulation, StopSignals(), heartbeat, step=number, last=number == count
            )
            assert data is not None
            result = step.run(
                number,
                data.batches,
                phases=heartbeat,
                total_targets=data.total_targets,
                documents=data.documents if train.compile or setup.graphs is not None else None,
                eligible=data.eligible,
            )
            result.finite.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begin
        graph_bytes = 0 if setup.graphs is None else setup.graphs.memory_bytes
        peak = memory_statistics(device).peak_allocated_bytes + graph_bytes
    finally:
        setup.loader.close()
        if setup.graphs is not None:
            setup.graphs.release()
    tokens = train.global_batch_size * train.sequence_length
    return {"seconds": seconds, "tokens": tokens, "peak_bytes": max(processes.gather(peak))}


def main(config_file: str, output: str) -> int:
    """Take the steps of a config; returns the exit status."""
    config = load_config(config_file)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="trifocal-doctor-", dir=Path(output).parent) as folder,
            processes_started(choose_device(config.run.device)) as processes,
        ):
            found = take_steps(config, processes, Path(folder))
            if processes.is_rank0:
                Path(output).write_text(json.dumps(found), encoding="utf-8")
    except UserError as error:
        print(one_line(error, 1000), file=sys.stderr)
        return 2
    except Exception as error:
        print(one_line(error, 1000), file=sys.stderr)
        return OUT_OF_MEMORY if is_out_of_memory(error) else 1
    return 0


if __name__ == "__main__":
    hard_exit(main(*sys.argv[1:]))
