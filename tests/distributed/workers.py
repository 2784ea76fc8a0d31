"""Real processes for the tests, given their places as torchrun gives them, on the CPU over gloo."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests import children, warm


@dataclass
class Ended:
    """The end of a process: status, output, and seconds since its start."""

    status: int
    out: str
    error: str
    seconds: float


class Workers:
    """Processes that train together, by the arguments of each rank's Python; their outputs go to a folder."""

    def __init__(self, commands, folder, **environment):
        port = children.free_port()
        self.folder = folder
        self.begin = time.monotonic()
        self.processes = []
        for rank, command in enumerate(commands):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(commands), "LOCAL_WORLD_SIZE": len(commands)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1}
            place |= {"GLOO_SOCKET_IFNAME": "lo"}
            variables = children.environment(**(place | environment))
            with (folder / f"out{rank}").open("wb") as out, (folder / f"error{rank}").open("wb") as error:
                started = warm.popen([sys.executable, *command], stdout=out, stderr=error, env=variables)
            self.processes.append(started)

    def error(self, rank):
        return (self.folder / f"error{rank}").read_text(errors="replace")

    def out(self, rank):
        return (self.folder / f"out{rank}").read_text(errors="replace")

    def send(self, number, *ranks):
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def wait_for(self, path, timeout=60):
        """Wait until a file is there."""
        deadline = time.monotonic() + timeout
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} never came\n{self.error(0)}\n{self.error(1)}"
            assert all(process.poll() is None for process in self.processes), f"{self.error(0)}\n{self.error(1)}"
            time.sleep(0.02)

    def join(self, timeout=90, ranks=None):
        """Wait for some or all to end; the others are killed."""
        deadline = time.monotonic() + timeout
        ended = []
        try:
            for rank in range(len(self.processes)) if ranks is None else ranks:
                status = self.processes[rank].wait(max(0.1, deadline - time.monotonic()))
                ended.append(Ended(status, self.out(rank), self.error(rank), time.monotonic() - self.begin))
        except subprocess.TimeoutExpired:
            stacks = children.abort_with_stacks(process.pid for process in self.processes if process.poll() is None)
            stderr = "\n".join(self.error(rank)[-3000:] for rank in range(len(self.processes)))
            raise AssertionError(f"a process did not end in {timeout} s\n{stacks}\n{stderr}") from None
        finally:
            for process in self.processes:
                if ranks is None and process.poll() is None:
                    process.kill()
                    process.wait()
        return ended

    def finish(self, timeout=120):
        """Wait for all to end, and to end well."""
        ended = self.join(timeout)
        assert not any(end.status for end in ended), "\n".join(end.error for end in ended)
        return ended

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def train(folder, config, *flags, size=2, fault="", rank_flags=None, **environment):
    """`trifocal train` in several processes, with a fault of tests/distributed/faults.py in some of them."""
    command = [str(Path(__file__).with_name("faults.py")), fault, "train", *([str(config)] if config else []), *flags]
    commands = [[*command, *(rank_flags or {}).get(rank, ())] for rank in range(size)]
    logs = folder / f"logs{time.monotonic_ns()}"
    logs.mkdir(parents=True)
    return Workers(commands, logs, **environment)
