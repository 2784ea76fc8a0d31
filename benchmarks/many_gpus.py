"""Everything that needs more than two GPUs, on all GPUs of this machine, in ten minutes.

    python benchmarks/many_gpus.py                                # all parts, on all GPUs
    python benchmarks/many_gpus.py --parts layer tests            # some of them
    python benchmarks/many_gpus.py --device cpu --gpus 2 --tiny   # does the script work?

| part | what runs |
|---|---|
| `layer` | `context.py`: one layer, 1 x 1,048,576 tokens, 64/4 heads of 128, on all GPUs |
| `text` | `scale.py`: the production model on packed text, 8 sequences a GPU: one GPU, and DDP, FSDP2 and HSDP on all |
| `losses` | `context.py`: ten steps of a model whose rows all GPUs share, beside one GPU's, in bf16 and in fp32 |
| `tests` | `pytest`: the tests of several GPUs, among them a rank that is killed while all run |
| `short` | `context.py`: the layer at 262,144 tokens, which one GPU holds, on one and on all |
| `fewer` | `context.py`: the layer at 1,048,576 tokens on a half of the GPUs, a quarter and so on, where they hold it |

The most important parts come first. One that does not end in its time is stopped by SIGTERM, as by a scheduler; what it
has measured by then counts. Both files of results are written after every part, and beside them the output of each part
that did not end well, `many_gpus_PART.log`.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from context import compared
from lib.processes import STOP_SECONDS
from lib.results import RESULTS, ResultFile
from trifocal.cli.output import unwinding_signals

HERE = Path(__file__).parent
TESTS = [str(HERE.parent / "tests" / "gpu" / f"test_{name}.py") for name in ("distributed", "dumps")]
# The most that each part may take. On four GPUs all together are expected to take 500.
SECONDS = {"layer": 150.0, "text": 260.0, "losses": 200.0, "tests": 240.0, "short": 100.0, "fewer": 120.0}
LEAST_SECONDS = 20.0
LONG, SHORT = 2**20, 2**18
# Published for a million tokens on 8 H800, 64/4 heads of 128: the attention alone, without the projections of a layer.
SFNSA = {"sfnsa_forward_ms": 575.6, "sfnsa_backward_ms": 1509.2}
COLUMNS = (
    "mode", "gpus", "tokens", "status", "outcome", "forward_ms", "ms", *SFNSA, "tokens_per_second", "step_ms",
    "base_gpus", "times_base", "times_one_gpu", "efficiency", "exposed_share", "peak_gib", "peak_gib_a_gpu",
    "precision", "losses", "largest_difference", "first_loss", "last_loss", "warnings",
)  # fmt: skip


def command(part: str, seconds: float, options: argparse.Namespace) -> list[str]:
    """What a part runs, without Python's name; a script is given its folder of results later."""
    size, tiny = options.gpus, ["--tiny"] if options.tiny else []
    if part == "tests":
        workers = [] if options.device == "cpu" else ["-n", str(2 * size), "--maxschedchunk", "1"]
        return ["-m", "pytest", "-v", "-p", "no:cacheprovider", *TESTS, *workers]
    common = ["--device", options.device, *tiny, "--commit", options.commit]
    if part == "text":
        return [
            str(HERE / "scale.py"), *common, "--gpus", str(size), "--parts", "one", "speed",
            "--modes", "ddp", "fsdp", "hsdp", "--checkpointing", "none", "--graphs", "true",
            "--compile", "false" if options.tiny else "true", "--steps", "8" if options.tiny else "100",
            "--budget", str(seconds), "--limit", "100",
            "--set", "data.source=builtin", f"data.streams={size}",
        ]  # fmt: skip
    script = [str(HERE / "context.py"), *common, "--limit", str(seconds)]
    if part == "losses":
        return [*script, "--parts", "losses", "--gpus", str(size)]
    halves = [str(size >> shift) for shift in range(1, size.bit_length())]
    gpus = {"layer": [str(size)], "short": ["1", str(size)], "fewer": halves}[part]
    tokens = 208 if options.tiny else SHORT if part == "short" else LONG
    return [*script, "--parts", "layer", "--gpus", *gpus, "--tokens", str(tokens), "--calls", "3"]


def run(arguments: Sequence[str], log: Path, seconds: float) -> str:
    """Run Python; what does not end in its time is stopped, and nothing of it outlives the call.

    Returns:
        How it ended: "ok", or in words.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        status = process.wait(seconds)
        return f"failed: exit status {status}" if status else "ok"
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        # A script ends the processes that it started; SIGKILL would leave them on the GPUs.
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def with_published(row: dict[str, Any]) -> dict[str, Any]:
    """The row beside what is published for the same layer."""
    return row | (SFNSA if (row["part"], row["gpus"], row["tokens"]) == ("layer", 8, LONG) else {})


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
    notes = [
        "Layer: times of the slowest process and memory of the fullest GPU, the projections of a layer included; `ms` "
        "is forward and backward.",
        "SFNSA: published for 8 H800, the attention alone, mean compression. It keeps no outputs of branches, so its "
        "backward time holds another forward pass; a training call there is the sum of both, 2,085 ms.",
        "Losses: differences are from one GPU in fp32; rows that all share may err twice as much as on one in bf16.",
        "Text: one is a single GPU; 8 sequences a GPU, recorded steps, no activation checkpointing.",
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts:
            begin, folder, log = time.monotonic(), Path(scratch) / part, Path(scratch) / f"{part}.log"
            # Time to stop it has to be left.
            seconds = min(SECONDS[part], deadline - begin - STOP_SECONDS)
            if seconds < LEAST_SECONDS:
                parts.append({"name": part, "status": "left out: no time", "seconds": 0.0})
            else:
                given = command(part, seconds, options)
                status = run(given if part == "tests" else [*given, "--output", str(folder)], log, seconds)
                rows += [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())["rows"]]
                parts.append({"name": part, "status": status, "seconds": time.monotonic() - begin})
                said = log.read_text(errors="replace").splitlines() or [""]
                if part == "tests":
                    parts[-1]["output"] = said[-1].strip("= ")
                if status != "ok":
                    shutil.copy(log, options.output / f"many_gpus_{part}.log")
                    print("\n".join(said[-60:]), flush=True)
            print(json.dumps(parts[-1]), flush=True)
            layers = compared([row for row in rows if row["part"] == "layer"])
            others = [row for row in rows if row["part"] != "layer"]
            file.write([*map(with_published, layers), *others], notes=notes, columns=COLUMNS, parts=parts)
    print(file.page.read_text())
    return int(any(part["status"] != "ok" for part in parts))


if __name__ == "__main__":
    sys.exit(main())
