"""Rendezvous of the processes of one start, in a store that may hold keys of earlier starts.

torchrun keeps one store through its restarts, with the keys of earlier starts. Its count of restarts does not identify
a start: each machine counts its own failures, and a machine that restarts because another one failed counts none.
So rank 0 makes a name for each start, and gives it to the others.
"""

import json
import socket
import time
import uuid

import torch.distributed as dist

from trifocal.errors import UserError

_INTERVAL_SECONDS = 0.02


def places_here(size: int) -> tuple[dist.TCPStore, list[dict[str, str]]]:
    """Make a store for processes of this machine, and the environment variables that give each its rank.

    The caller keeps the store, as torchrun does: a free port that was only looked up could be taken before rank 0
    opens it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    places = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return store, [{name: str(value) for name, value in place.items()} for place in places]


def rendezvous(
    store: dist.Store, rank: int, size: int, *, device: str, timeout_seconds: float
) -> tuple[str, list[str]]:
    """Wait until all processes of this start have arrived.

    Args:
        store: Common to all processes; may hold keys of earlier starts.
        rank: Rank of this process.
        size: Number of processes.
        device: The kind of device that this process trains on.
        timeout_seconds: The longest wait.

    Returns:
        A name for this start, the same in all processes and new; and the host of each rank.

    Raises:
        UserError: In every process, if the kinds of device differ: NCCL and gloo cannot be mixed.
        RuntimeError: If a process does not arrive in time.
    """
    store = dist.PrefixStore("trifocal", store)
    name = _name_given(store, size, timeout_seconds) if rank == 0 else _name_asked(store, rank)
    store.set(f"{name}/here/{rank}", json.dumps([device, socket.gethostname()]))
    found = [json.loads(store.get(f"{name}/here/{other}")) for other in range(size)]
    for other, (kind, host) in enumerate(found):
        if kind != found[0][0]:
            store.set(f"{name}/told/{rank}", "")
            if rank == 0:
                # The store may end with this process.
                store.wait([f"{name}/told/{each}" for each in range(size)])
            raise UserError(
                f"rank {other} on {host} would train on {kind}, and rank 0 on {found[0][1]} on {found[0][0]}; look at "
                f"that machine with trifocal doctor, or name the device for all with --run.device"
            )
    return name, [host for _, host in found]


def _name_asked(store: dist.Store, rank: int) -> str:
    mine = uuid.uuid4().hex
    store.set(f"asks/{rank}", mine)
    name = store.get(f"answer/{mine}").decode()
    store.set(f"{name}/came/{rank}", "")
    return name


def _name_given(store: dist.Store, size: int, timeout_seconds: float) -> str:
    """Answer every process that asks, also one of an earlier start, until all of this start have the name."""
    name = uuid.uuid4().hex[:12]
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    deadline = time.monotonic() + timeout_seconds
    while missing:
        for rank in sorted(missing):
            if store.check([f"{name}/came/{rank}"]):
                missing.remove(rank)
            elif store.check([f"asks/{rank}"]) and (asks := store.get(f"asks/{rank}")) != answered.get(rank):
                store.set(f"answer/{asks.decode()}", name)
                answered[rank] = asks
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} did not arrive in {timeout_seconds:.0f} s")
        time.sleep(_INTERVAL_SECONDS)
    return name
