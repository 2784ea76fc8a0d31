"""The processes of a run, and collectives between their hosts.

`torchrun`, or another launcher, starts them and gives each its rank in environment variables; without one there is one
process, and every collective is immediate. Collectives of the hosts use gloo, even if tensors use NCCL, so that they
never wait for a GPU.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

from trifocal.distributed.rendezvous import rendezvous
from trifocal.errors import UserError

T = TypeVar("T")

_RECORDED_COLLECTIVES = 2000
_RENDEZVOUS = ("RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class DistributedContext:
    """This process, number `rank` of `size`, among those of the run, of which this machine has `local_size`; a single
    one has no `store` for notes. `restarted` says whether the launcher has started any of them again.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    restarted: bool = False
    store: dist.Store | None = None
    group: dist.ProcessGroup | None = None

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which writes files that are written once."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum the values over all processes, in double precision; whole numbers up to 2^53 are exact."""
        return self.async_all_reduce(values)()

    def async_all_reduce(
        self, values: Sequence[float], operation: Literal["sum", "max"] = "sum"
    ) -> Callable[[], list[float]]:
        """Begin to reduce values over all processes; the function that is returned waits for the result."""
        if self.size == 1:
            return lambda: list(values)
        reduced = torch.tensor(values, dtype=torch.float64)
        kind = dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM
        work = dist.all_reduce(reduced, kind, group=self.group, async_op=True)

        def answer() -> list[float]:
            work.wait()
            return list(reduced.tolist())

        return answer

    def gather(self, value: T) -> list[T]:
        """Collect a value from every process, in the order of ranks; it can be anything that pickles."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def new_group(self) -> "DistributedContext":
        """The same processes in a new process group, for collectives in another thread; all processes call this."""
        return self if self.size == 1 else replace(self, group=dist.new_group(backend="gloo"))

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Call a function in every process, and return this one's result; if it raises in any, it raises in all: the
        UserError or OSError of the lowest rank, which is named, else RuntimeError.
        """
        if self.size == 1:
            return action()
        error: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        self.raise_on_all(error)
        return result  # type: ignore[no-any-return]

    def run_on_rank0(self, action: Callable[[], T]) -> T:
        """Call a function in rank 0 only, and return its result, or raise its error, in all processes."""
        return self.gather(self.run_on_all(lambda: action() if self.is_rank0 else None))[0]  # type: ignore[return-value]

    def raise_on_all(self, error: Exception | None) -> None:
        """Raise in every process if there is an error in any; see `run_on_all`."""
        # The parts of the error: not every exception can be pickled.
        user, number = isinstance(error, UserError), getattr(error, "errno", None)
        text = str(error) if user or isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        found = self.gather(None if error is None else (user, isinstance(error, OSError), number, text))
        for rank, one in enumerate(found):
            if one is not None:
                if error is not None and rank == self.rank:
                    raise error
                user, disk, number, text = one
                message = f"rank {rank}: {text}"
                if disk:
                    raise OSError(number, message) if number is not None else OSError(message)
                raise (UserError if user else RuntimeError)(message) from error


def hard_exit(status: int) -> NoReturn:
    """End this process without the clean-up of gloo and NCCL, which would wait for a lost process, or abort this one
    while the interpreter shuts down.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def rank_and_size() -> tuple[int, int]:
    """Rank and number of processes by the launcher's variables; 0 and 1 without a launcher."""
    size, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if not 0 <= rank < size:
        named = ", ".join(f"{name}={os.environ.get(name, '')}" for name in ("RANK", "WORLD_SIZE"))
        raise UserError(
            f"{named}: expected a RANK from 0 to WORLD_SIZE - 1; start the processes with torchrun, or unset both for "
            "a single process"
        )
    missing = [name for name in _RENDEZVOUS if not os.environ.get(name)]
    if size > 1 and missing:
        raise UserError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set; start the "
            "processes with torchrun, set what is missing, or unset WORLD_SIZE for a single process"
        )
    return rank, size


def _number(name: str, default: int) -> int:
    """The whole number in an environment variable; one that is empty is not set."""
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise UserError(f"the environment variable {name} must be a whole number, got {text!r}")
    return int(text or default)


def _common_store(timeout: timedelta) -> Any:
    """The common store of all processes."""
    _number("MASTER_PORT", 0)
    try:
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    except dist.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        why = str(error).partition("\n")[0].rstrip(".")
        what = "start all of them, with the same MASTER_ADDR and MASTER_PORT, where each can reach rank 0"
        if "EADDRINUSE" in why:
            why, what = "the port is taken, perhaps by another run", "take another (--master-port, or MASTER_PORT)"
        raise UserError(f"the processes of this run cannot connect at {place}: {why}; {what}") from error


@contextmanager
def processes_started(device: torch.device, *, timeout_seconds: float = 600.0) -> Iterator[DistributedContext]:
    """Join the processes that torchrun started, or a single one, on a kind of device: each takes its own GPU."""
    timeout = timedelta(seconds=timeout_seconds)
    rank, size = rank_and_size()
    # Each machine counts its own failures: one that is started again because of another counts none.
    restarts = _number("TORCHELASTIC_RESTART_COUNT", 0)
    if size == 1:
        yield DistributedContext(device=device, restarted=restarts > 0)
        return
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        # PyTorch's record of the last collectives, which a stall's dump reads, under the newer of its names.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES))
    # Collectives in a graph must use the same buffers as others: a process may replay a micro-batch of a sharded model
    # while another computes the first one of its kind.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    store = _common_store(timeout)
    start, hosts, restarted = rendezvous(
        store, rank, size, device=device.type, restarts=restarts, timeout_seconds=timeout_seconds
    )
    # Launchers of one process a machine name neither.
    local_rank = _number("LOCAL_RANK", hosts[:rank].count(hosts[rank]))
    local_size = _number("LOCAL_WORLD_SIZE", hosts.count(hosts[rank]))
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{local_size} processes were started on this machine, and PyTorch sees {torch.cuda.device_count()} "
                "GPUs here; lower --nproc-per-node, or take --run.device cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        # Addresses of an earlier start are in the same store.
        store=dist.PrefixStore(f"{start}/group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    # Its own connection: the watching thread must not wait for requests of the training thread.
    notes = dist.PrefixStore(f"{start}/notes", store.clone())
    try:
        yield DistributedContext(rank, size, local_size, device, restarted, notes)
    except Exception as error:
        # After an error of only this process, NCCL would wait for the others. The process ends anyway.
        if isinstance(error, UserError) or getattr(error, "agreed", False):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
