"""Python processes that start at once: forked from a server that has imported PyTorch and Trifocal already.

Each is a process with its own environment, arguments and output, as `subprocess.Popen` would start it;
what is spared is four seconds of imports.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from tests.children import environment

_PRELOADED = ["torch._dynamo", "trifocal.checks.process_worker", "trifocal.cli.train", "tests.frozen"]


class Popen:
    """A Python process: the part of `subprocess.Popen` that the tests use.

    The command is `[sys.executable, SCRIPT, …]`, or has `-m` or `-c`; outputs are open files or constants of
    `subprocess`; `env` are all its variables.
    """

    def __init__(self, command, *, stdout, stderr, env, start_new_session=False):
        assert command[0] == sys.executable
        same = {subprocess.DEVNULL: os.devnull, subprocess.STDOUT: None}
        paths = [same[file] if isinstance(file, int) else file.name for file in (stdout, stderr)]
        arguments = (list(command[1:]), dict(env), paths, start_new_session)
        self._process = _server().Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked Python", timeout or 0.0)
        return self.returncode

    def send_signal(self, number):
        # The server reaps one that has just ended before its status can be read here; `subprocess` does the same.
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def take_the_place_of_subprocess(patch, module):
    """Let the processes of a module, `package.module`, be warm ones."""
    constants = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    patch.setattr(f"{module}.subprocess", SimpleNamespace(Popen=popen, **constants))


def popen(command, **options):
    """A `Popen`; where there is a GPU the usual one, as a GPU's driver must not be forked."""
    return (subprocess.Popen if torch.cuda.is_available() else Popen)(command, **options)


@functools.cache
def _server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # The server keeps the variables that it starts with, and Triton reads them when it is imported.
    with mock.patch.dict(os.environ, environment(OMP_NUM_THREADS=1), clear=True):
        ensure_running()
    return context


def _run(arguments, variables, outputs, leads_a_session):
    """Take on the variables and outputs, and do what Python does with its command line."""
    if leads_a_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    for number, path in enumerate(outputs, start=1):
        os.dup2(1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if variables.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
