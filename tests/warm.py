"""Python processes that are there at once: forked from one that has imported PyTorch and Trifocal already.

A process of its own for each, with its own environment, arguments and output, as `subprocess.Popen` would start it;
what is spared is four seconds of imports. The process that forks does nothing but import: no threads, no GPU.
"""

import atexit
import functools
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.children import ROOT, environment


class Popen:
    """A Python process: the part of `subprocess.Popen` that the tests use.

    Args:
        command: `[sys.executable, SCRIPT, …]` or `[sys.executable, "-c", CODE]`.
        stdout, stderr: Open files, or `subprocess.DEVNULL`.
        env: All its variables.
    """

    def __init__(self, command: Sequence[str], *, stdout: Any, stderr: Any, env: Mapping[str, str]) -> None:
        assert command[0] == sys.executable
        paths = [os.devnull if file == subprocess.DEVNULL else file.name for file in (stdout, stderr)]
        self.pid: int = _ask({"arguments": [*command[1:]], "variables": dict(env), "outputs": paths})
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its status, as of `subprocess`; None while it runs."""
        if self.returncode is None:
            self.returncode = _ask({"status_of": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its status, when it has ended.

        Raises:
            subprocess.TimeoutExpired: If it has not in this time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked Python", timeout or 0.0)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def popen(command: Sequence[str], **options: Any) -> Any:
    """A `Popen`; where there is a GPU the usual one, as a GPU's driver must not be forked."""
    return (subprocess.Popen if torch.cuda.is_available() else Popen)(command, **options)


@functools.cache
def _source() -> subprocess.Popen[str]:
    variables = environment(OMP_NUM_THREADS=1)
    variables.pop("TRITON_INTERPRET", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables,
        cwd=ROOT,
    )  # fmt: skip
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    # Waits for it, and closes the pipes.
    process.communicate()


def _ask(request: dict[str, Any]) -> Any:
    process = _source()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def serve() -> Sequence[str] | None:
    """Answer requests until there are no more; returns the arguments of its program in each forked process."""
    import torch._dynamo  # noqa: F401

    import trifocal.checks.process_worker
    import trifocal.cli.train  # noqa: F401

    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "status_of" in request:
            found, status = os.waitpid(request["status_of"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            sys.stdout.flush()
            answer = os.fork()
            if not answer:
                _become(request)
                return list(request["arguments"])
        print(json.dumps(answer), flush=True)
    return None


def _become(request: dict[str, Any]) -> None:
    """Take on what makes a process: variables, outputs, the path of modules."""
    os.environ.clear()
    os.environ.update(request["variables"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    outputs = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in request["outputs"]]
    for number, file in enumerate((nothing, *outputs)):
        os.dup2(file, number)
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb"))
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]


def run(arguments: Sequence[str]) -> None:
    """What Python does with its command line."""
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    program = serve()
    if program is not None:
        run(program)
