"""Python processes and scripts that tests start."""

import contextlib
import importlib.util
import itertools
import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
# Under those that systems give to connections, which could take a port between the look at it and its use.
_PORTS = range(20_000, 32_000)
_PORTS_OF_A_WORKER = 400
_ports = itertools.count(os.getpid())


def free_port() -> int:
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


def environment(**variables: object) -> dict[str, str]:
    """This process's variables and some more; the package and the tests come first on Python's path.

    PyTorch's compiler warns about Python 3.13.0, which has nothing to do with the tests.
    """
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    quiet = {"PYTHONWARNINGS": "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"}
    return {**quiet, **os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in variables.items()}}


def children_of(pid: int) -> list[str]:
    """The processes that any thread of a process has started."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            found += (thread / "children").read_text().split()
    return found


def wait_until_gone(pids: Iterable[str], seconds: float = 20) -> None:
    """Fail unless processes end, and are collected, in this time: on a busy machine that takes a moment."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def load_script(path: str) -> ModuleType:
    """Import a script of the repository, such as `benchmarks/scale.py`, without running its `main`."""
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    # A dataclass looks its module up.
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
