"""`trifocal generate` from the shell: start, loading and 512 tokens, and when the first text is there."""

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from trifocal.bench.decoding_options import DecodingBench
from trifocal.bench.recorder import OK
from trifocal.paths import user_path

NOTES = (
    "shell: trifocal generate on a trained run in a fresh process, standard output read as it comes; medians, and the "
    "slowest, of calls behind a first one that fills the caches of kernels and files.",
)
NEW_TOKENS = 512
_PROMPT = "The "


class ShellTimes(NamedTuple):
    """Seconds from the start of a command to its first new text, and to its end."""

    first_text: float
    end: float


def bench_shell(bench: DecodingBench) -> None:
    """Measure the command; the row is in the recorder."""
    options = bench.options
    run = str(user_path(options.run, "--run"))
    command = [
        sys.executable, "-m", "trifocal", "generate", run, "--prompt", _PROMPT, "--max-new-tokens", str(NEW_TOKENS),
        "--stop-at-document-end", "false", "--device", options.device,
    ]  # fmt: skip

    def figures() -> dict[str, Any]:
        time_command(command, _PROMPT)
        times = [time_command(command, _PROMPT) for _ in range(options.repeats)]
        return {
            "new_tokens": NEW_TOKENS,
            "seconds": statistics.median(run.end for run in times),
            "slowest_seconds": max(run.end for run in times),
            "first_text_seconds": statistics.median(run.first_text for run in times),
        }

    row = bench.recorder.measure({"part": "shell", "run": options.run}, figures)
    figure = f"{row['seconds']:.2f} s" if row["status"] == OK else row["status"]
    bench.recorder.say(f"trifocal generate, {NEW_TOKENS} tokens: {figure}")


def time_command(command: Sequence[str], prompt: str) -> ShellTimes:
    """Time a command that writes a prompt and then what it adds.

    Raises:
        RuntimeError: If it fails, or adds nothing; with the last line of its standard error.
    """
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        text, first = b"", 0.0
        # Whatever is there, however little.
        while piece := process.stdout.read1():  # type: ignore[attr-defined]
            text += piece
            if not first and len(text) > len(prompt.encode()):
                first = time.perf_counter() - begin
        errors = process.stderr.read().decode(errors="replace").strip().splitlines()
        code = process.wait()
    if code or not first:
        raise RuntimeError(f"exit status {code}: {errors[-1] if errors else 'no new text'}")
    return ShellTimes(first, time.perf_counter() - begin)
