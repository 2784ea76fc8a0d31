"""Commands on a CPU beside other work: PyTorch's default threads, passive ones, one, and those that a command chooses.

    python benchmarks/cpu_threads.py                       # training, tokens a second, in four to five minutes
    python benchmarks/cpu_threads.py --command generate    # evaluate, serve: seconds of a fixed task

The other work is a Python process in an endless loop, or a training with the same setting. All share `--cores` cores.
The machine must have nothing else to do.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lib.recorder import child_environment
from lib.results import ResultFile, cpu_name
from trifocal.cli.output import unwinding_signals
from trifocal.cli.threads import VARIABLES

CONFIG = Path(__file__).parent.parent / "configs" / "demo.toml"
COMPANY = ("nothing", "a busy process", "a training")
# Longest wait for the first step or the server's start.
START_SECONDS = 120.0
# In the table of seconds, less is better.
UNITS = {"train": "tokens_per_second", "generate": "seconds", "evaluate": "seconds", "serve": "seconds"}


def settings(cores: int) -> dict[str, dict[str, str]]:
    """The variables of each column. All cores by a variable are the default, without a choice."""
    return {
        "default": {"OMP_NUM_THREADS": str(cores)},
        "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
        "one_thread": {"OMP_NUM_THREADS": "1"},
        "chosen": {},
    }


@contextlib.contextmanager
def running(command: Sequence[str], variables: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in a file, killed at the end with all that it started."""
    environment = {name: value for name, value in child_environment().items() if name not in VARIABLES}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env={**environment, **variables},
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(found: Callable[[], Any], process: subprocess.Popen[bytes], log: Path, seconds: float) -> Any:
    """The first answer that is not false; an error if the process ends before, or none comes in time."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no answer from {process.args}:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)
    return answer


def training(run: Path) -> list[str]:
    """A training without an end and without pauses, with a row of metrics a step."""
    flags = {
        "run.directory": run, "run.device": "cpu", "train.steps": 10**6, "log.interval_steps": 1,
        "evaluate.interval_steps": 0, "checkpoint.interval_steps": 10**6 // 2, "log.sample_interval_steps": 0,
        "log.telemetry_interval_steps": 0,
    }  # fmt: skip
    return ["-m", "trifocal", "train", str(CONFIG), *(f"--{name}={value}" for name, value in flags.items())]


def steps_of(run: Path) -> list[tuple[float, int]]:
    """Time and tokens so far of each step of a training."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["unix_time_seconds"], row["tokens_seen"]) for row in rows if row["kind"] == "train"]


def train_rate(folder: Path, variables: Mapping[str, str], settle: float, seconds: float) -> float:
    """Tokens a second of a training, from `settle` seconds after its first step on."""
    run, log = folder / "measured", folder / "measured.log"
    with running(training(run), variables, log) as process:
        wait_for(lambda: steps_of(run), process, log, START_SECONDS)
        time.sleep(settle)
        first = len(steps_of(run))
        time.sleep(seconds)
        # Of slow steps three at least.
        (begin, before), *_, (end, after) = wait_for(
            lambda: steps_of(run)[first - 1 :] if len(steps_of(run)) >= first + 3 else None, process, log, START_SECONDS
        )
        return (after - before) / (end - begin)


def command_seconds(command: str, folder: Path, variables: Mapping[str, str], tokens: int) -> float:
    """Seconds of a fixed task of the package's model: of the whole process, or of one answer of a server."""
    log = folder / "measured.log"
    if command == "serve":
        with running(["-m", "trifocal", "serve", "demo", "--port", "0", "--device", "cpu"], variables, log) as process:
            said = wait_for(lambda: log.read_text().partition(" is served on ")[2], process, log, START_SECONDS)
            body = {"model": "demo", "prompt": "def ", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            request = urllib.request.Request(
                said.split()[0] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            begin = time.monotonic()
            with urllib.request.urlopen(request) as answer:
                answer.read()
            return time.monotonic() - begin
    flags = {
        "generate": ["--prompt", "def ", "--max-new-tokens", str(tokens), "--temperature", "0",
                     "--stop-at-document-end", "false"],
        "evaluate": ["--source", "builtin", "--only", "loss", "--sequence-length", "1024",
                     "--sequences", "2", "--output", str(folder / "out.json")],
    }[command]  # fmt: skip
    begin = time.monotonic()
    with running(["-m", "trifocal", command, "demo", "--device", "cpu", *flags], variables, log) as process:
        process.wait()
        if process.returncode:
            raise RuntimeError(log.read_text(errors="replace")[-2000:])
    return time.monotonic() - begin


def measure(options: argparse.Namespace, beside: str, variables: Mapping[str, str]) -> float:
    """One cell of the table."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, company = Path(name), ["-c", "while True: pass"]
        if beside == "a training":
            company = training(folder / "beside")
        if beside != "nothing":
            log = folder / "beside.log"
            process = stack.enter_context(running(company, variables, log))
            if beside == "a training":
                wait_for(lambda: steps_of(folder / "beside"), process, log, START_SECONDS)
        if options.command == "train":
            return train_rate(folder, variables, options.settle, options.seconds)
        return command_seconds(options.command, folder, variables, options.tokens)


def share_of_best(row: Mapping[str, Any], columns: Sequence[str], unit: str) -> float:
    """The speed of the chosen threads as a share of the best column's."""
    values = [row[column] for column in columns]
    return min(values) / row["chosen"] if unit == "seconds" else row["chosen"] / max(values)


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", choices=UNITS, default="train")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--settle", type=float, default=4.0, help="seconds of a training before the measurement")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training to measure")
    parser.add_argument("--tokens", type=int, default=100, help="to generate")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    columns, unit, rows = settings(options.cores), UNITS[options.command], []
    for beside in COMPANY:
        row: dict[str, Any] = {"beside": beside, "unit": unit}
        for name, variables in columns.items():
            row[name] = measure(options, beside, variables)
            print(f"{options.command} beside {beside}, {name}: {row[name]:,.1f} {unit}", flush=True)
        rows.append({**row, "chosen_share_of_best": share_of_best(row, list(columns), unit)})
    file = ResultFile(
        f"cpu_threads_{options.command}", f"Threads on a CPU: trifocal {options.command} beside other work",
        folder=options.output, commit=options.commit, device=cpu_name(),
    )  # fmt: skip
    notes = [
        f"On {options.cores} cores. default: all; passive: OMP_WAIT_POLICY=PASSIVE; chosen: no variable is set. "
        "The training beside has the same setting.",
    ]
    print(file.write(rows, notes=notes).read_text())
    return 0


if __name__ == "__main__":
    with unwinding_signals():
        sys.exit(main())
