"""Python processes and scripts that tests start."""

import contextlib
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from trifocal.runlog.proc import process_state

ROOT = Path(__file__).parents[1]
# Under those that systems give to connections, which could take a port between the look at it and its use.
_PORTS = range(20_000, 32_000)
_PORTS_OF_A_WORKER = 400
_ports = itertools.count(os.getpid())


def free_port():
    """A free port, from a range of this test worker's own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_ports, _PORTS_OF_A_WORKER):
        port = _PORTS[(worker * _PORTS_OF_A_WORKER + number % _PORTS_OF_A_WORKER) % len(_PORTS)]
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")


def environment(**variables):
    """This process's variables and some more; the package and the tests come first on Python's path.

    Triton's interpreter is for a test's own kernels. PyTorch's compiler warns about Python 3.13.0, which has nothing to
    do with the tests. A fault or `abort_with_stacks` leaves Python's stacks.
    """
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    always = {
        "PYTHONWARNINGS": "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
        "PYTHONFAULTHANDLER": "1",
    }
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**always, **own, "PYTHONPATH": path, **{name: str(value) for name, value in variables.items()}}


def children_of(pid):
    """The processes that any thread of a process has started."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            found += (thread / "children").read_text().split()
    return found


def wait_for_end(process, seconds):
    """The status of a process; if it does not end in this time, fail with its stacks and those of its children."""
    try:
        return int(process.wait(seconds))
    except subprocess.TimeoutExpired:
        stacks = abort_with_stacks([process.pid])
        raise AssertionError(f"process {process.pid} did not end in {seconds} s\n{stacks}") from None


def abort_with_stacks(pids):
    """End processes and all that they have started by SIGABRT, and return the ends of what they wrote then.

    Python writes its stacks to standard error if `environment` is a process's; a run writes them to its `dumps`.
    """
    found = list(map(str, pids))
    for pid in found:  # It grows meanwhile.
        with contextlib.suppress(OSError):
            found += children_of(int(pid))
    lines, files = [], {}
    for pid in found:
        with contextlib.suppress(OSError):
            lines.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')[:200]}")
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                path = descriptor.readlink()
                if path.is_file() and (descriptor.name == "2" or path.name.startswith("stacks_rank")):
                    files[path] = None
    deadline = time.monotonic() + 10
    # The outermost first, before it sees what it waits for end; one after the other, for they may share a file.
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGABRT)
        while time.monotonic() < deadline and process_state(int(pid)) not in "XZ":
            time.sleep(0.01)
    return "\n".join([*lines, *(f"{path}:\n{path.read_text(errors='replace')[-8000:]}" for path in files)])


def load_script(path):
    """Import a script of the repository, such as `benchmarks/scale.py`, without running its `main`."""
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    # A dataclass looks its module up.
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
