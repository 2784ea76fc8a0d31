"""Everything that needs more than two GPUs, on all GPUs of this machine, in ten minutes.

    python benchmarks/many_gpus.py                                # all parts, on all GPUs
    python benchmarks/many_gpus.py --parts layer tests            # some of them
    python benchmarks/many_gpus.py --device cpu --gpus 2 --tiny   # does the script work?

| part | on | what runs |
|---|---|---|
| `layer` | all | `context.py`: one layer, 1 x 1,048,576 tokens, 64/4 heads of 128 |
| `text_one` | one | `scale.py`: the production model on packed text, 8 sequences |
| `short_one` | one | `context.py`: the layer at 262,144 tokens, which one GPU holds |
| `losses_fp32`, `losses_bf16` | one | `context.py`: ten steps of a model, in fp32 and in bf16 |
| `text` | all | the production model under DDP, FSDP2 and HSDP, 8 sequences a GPU |
| `losses` | all | the ten steps in bf16, with rows that all GPUs share |
| `short` | all | the layer at 262,144 tokens |
| `tests` | all | `pytest`: the tests of several GPUs, among them a rank that is killed while all run |
| `fewer` | some | the layer at 1,048,576 tokens on a half of the GPUs, a quarter and so on, where they hold it |

The most important parts come first. Parts on one GPU that follow one another run at the same time, each on its own GPU;
all others run by themselves. One that does not end in its time is stopped by SIGTERM, as by a scheduler; what it has
measured by then counts. Both files of results are written after every part, and beside them the output of each part
that did not end well, `many_gpus_PART.log`.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import context
import scale
from lib.processes import STOP_SECONDS
from lib.results import RESULTS, ResultFile
from trifocal.cli.output import unwinding_signals

HERE = Path(__file__).parent
TESTS = [str(HERE.parent / "tests" / "gpu" / f"test_{name}.py") for name in ("distributed", "dumps")]
# The most that each part may take. All are expected to take 510 on four GPUs, or 545 where nothing is compiled yet.
SECONDS = {
    "layer": 150.0, "text_one": 160.0, "short_one": 120.0, "losses_fp32": 120.0, "losses_bf16": 120.0, "text": 260.0,
    "losses": 100.0, "short": 60.0, "tests": 200.0, "fewer": 120.0,
}  # fmt: skip
ON_ONE = ("text_one", "short_one", "losses_fp32", "losses_bf16")
LEAST_SECONDS = 10.0
# A worker for each test: none waits for another.
WORKERS = 20
LONG, SHORT = 2**20, 2**18
# Published for a million tokens on 8 H800, 64/4 heads of 128: only the attention, without the projections of a layer.
SFNSA = {"sfnsa_forward_ms": 575.6, "sfnsa_backward_ms": 1509.2}
COLUMNS = (
    "mode", "gpus", "tokens", "status", "outcome", "forward_ms", "ms", *SFNSA, "tokens_per_second", "step_ms",
    "checkpoint_blocked_seconds", "base_gpus", "times_base", "times_one_gpu", "efficiency", "exposed_share", "peak_gib",
    "peak_gib_a_gpu", "precision", "losses", "largest_difference", "first_loss", "last_loss", "warnings",
)  # fmt: skip
NOTES = (
    "Layer: times of the slowest process and memory of the fullest GPU, the projections of a layer included; `ms` "
    "is forward and backward.",
    "SFNSA: published for 8 H800, only the attention, mean compression. It keeps no outputs of branches, so its "
    "backward time holds another forward pass; a training call there is the sum of both, 2,085 ms.",
    "Losses: differences are from one GPU in fp32; rows that all share may err twice as much as on one in bf16.",
    "Text: one is a single GPU; 8 sequences a GPU, recorded steps, no activation checkpointing.",
    *scale.NOTES,
)


@dataclasses.dataclass
class Part:
    """A part of the run: its most seconds, where it writes, its one GPU (None: all), and how it ended."""

    name: str
    seconds: float
    folder: Path
    gpu: str | None = None
    status: str = "left out: no time"
    took: float = 0.0

    @property
    def log(self) -> Path:
        """Its output."""
        return self.folder.with_suffix(".log")

    def rows(self) -> list[dict[str, Any]]:
        """What it has measured so far."""
        return [row for path in sorted(self.folder.glob("*.json")) for row in json.loads(path.read_text())["rows"]]

    def summary(self) -> dict[str, Any]:
        """Its line in the table of parts; rows that had no time are no success."""
        cut = [row for row in self.rows() if row.get("outcome", "").startswith(("left out: no time", "stopped"))]
        status = f"cut by time: {len(cut)} of {len(self.rows())} rows" if cut else self.status
        line = {"name": self.name, "status": status, "seconds": self.took}
        if self.name == "tests" and self.log.exists():
            said = self.log.read_text(errors="replace")
            line["output"] = said.rstrip().rpartition("\n")[2].strip("= ")
            if status.startswith(("stopped", "interrupted")):
                line["output"] = f"{said.count(' PASSED')} passed, {said.count(' FAILED')} failed by then"
        return line


def command(part: Part, options: argparse.Namespace) -> list[str]:
    """What a part runs, without Python's name."""
    size, tiny = options.gpus, ["--tiny"] if options.tiny else []
    if part.name == "tests":
        workers = [] if options.device == "cpu" else ["-n", str(WORKERS)]
        return ["-m", "pytest", "-v", "-p", "no:cacheprovider", *TESTS, *workers]
    common = ["--device", options.device, *tiny, "--commit", options.commit, "--output", str(part.folder)]
    if part.name.startswith("text"):
        return [
            str(HERE / "scale.py"), *common, "--gpus", "1" if part.name == "text_one" else str(size),
            # Its imports take a part of the time.
            "--budget", str(part.seconds - 15), "--set", f"data.streams={size}",
        ]  # fmt: skip
    script = [str(HERE / "context.py"), *common, "--limit", str(part.seconds)]
    if part.name.startswith("losses"):
        _, _, precision = part.name.partition("_")
        own = ["--gpus", "1", "--precisions", precision] if precision else ["--gpus", str(size)]
        return [*script, "--parts", "losses", *own]
    halves = [str(size >> shift) for shift in range(1, size.bit_length())]
    gpus = {"short_one": ["1"], "fewer": halves}.get(part.name, [str(size)])
    tokens = 208 if options.tiny else SHORT if part.name.startswith("short") else LONG
    return [*script, "--parts", "layer", "--gpus", *gpus, "--tokens", str(tokens), "--calls", "3"]


def groups(names: Sequence[str], size: int) -> Iterator[list[str]]:
    """The parts that run at the same time: each by itself, but those on one GPU together, as many as there are GPUs."""
    group: list[str] = []
    for name in names:
        if group and not (name in ON_ONE and group[0] in ON_ONE and len(group) < size):
            yield group
            group = []
        group.append(name)
    yield group


def run(group: Sequence[tuple[Part, Sequence[str]]]) -> None:
    """Run Python for each part; what does not end in its time is stopped, and nothing of it outlives the call."""
    begin = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for part, arguments in group:
            part.status = "interrupted"
            own = {} if part.gpu is None else {"CUDA_VISIBLE_DEVICES": part.gpu}
            with part.log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **own},
                )  # fmt: skip
            processes.append(process)
        while any(part.status == "interrupted" for part, _ in group):
            time.sleep(0.05)
            passed = time.monotonic() - begin
            for (part, _), process in zip(group, processes, strict=True):
                if part.status != "interrupted":
                    continue
                status, part.took = process.poll(), passed
                if status is not None:
                    part.status = f"failed: exit status {status}" if status else "ok"
                elif passed > part.seconds:
                    part.status = f"stopped after {part.seconds:.0f} s"
                    process.send_signal(signal.SIGTERM)
    finally:
        # A script ends the processes that it started; SIGKILL would leave them on the GPUs.
        for process in processes:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all parts, beside their bases and beside what is published for the same layer."""
    text = [row for row in rows if row["part"] == "text"]
    others = context.compared([row for row in rows if row not in text])
    published = [
        row | (SFNSA if (row["part"], row["gpus"], row["tokens"]) == ("layer", 8, LONG) else {}) for row in others
    ]
    return [*published, *scale.compared(text)]


@unwinding_signals()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run every part; the exit status is 1 if one did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--parts", nargs="+", choices=tuple(SECONDS), default=list(SECONDS))
    parser.add_argument("--seconds", type=float, default=570.0, help="for all parts; later ones are left out")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="short sequences, small models, few steps")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.gpus < 2:
        parser.error("there are not two GPUs here; --device cpu --gpus 2 --tiny needs none")
    file = ResultFile(
        f"many_gpus_{options.gpus}", f"What needs several GPUs, on {options.gpus}",
        folder=options.output, commit=options.commit,
    )  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(options.gpus)))).split(",")
    parts: list[Part] = []
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.seconds

    def report(group: Sequence[Part]) -> None:
        rows[:] = compared([row for part in parts for row in part.rows()])
        file.write(rows, notes=NOTES, columns=COLUMNS, parts=[part.summary() for part in parts])
        for part in group:
            print(json.dumps(part.summary()), flush=True)
            if part.status != "ok" and part.log.exists():
                shutil.copy(part.log, options.output / f"many_gpus_{part.name}.log")
                print("\n".join(part.log.read_text(errors="replace").splitlines()[-60:]), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for names in groups(options.parts, options.gpus):
            # Time to stop them has to be left.
            left = deadline - time.monotonic() - STOP_SECONDS
            group = [
                Part(name, min(SECONDS[name], left), Path(scratch) / name, gpu if name in ON_ONE else None)
                for name, gpu in zip(names, itertools.cycle(visible), strict=False)
            ]
            parts += group
            try:
                if left >= LEAST_SECONDS:
                    run([(part, command(part, options)) for part in group])
            finally:
                report(group)
        bad = [part for part in parts if part.summary()["status"] != "ok"]
    print(file.page.read_text())
    return int(bool(bad) or any(row.get("status", "").startswith(("failed", "refused")) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
