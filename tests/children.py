"""Python processes that tests start."""

import itertools
import os
import socket
from pathlib import Path

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
    """This process's variables and some more; the package and the tests come first on Python's path."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in variables.items()}}
