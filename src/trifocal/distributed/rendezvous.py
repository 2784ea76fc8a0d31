"""Rendezvous of the processes of one start, in a store that may hold keys of earlier starts.

torchrun keeps one store when it starts the processes again, and PyTorch would connect them to the addresses of the
earlier start, and wait. So rank 0 makes a name for each start, and gives it to the others.
"""

import json
import socket
import time
import uuid

import torch.distributed as dist

from trifocal.errors import UserError


def places_here(size: int) -> tuple[dist.TCPStore, list[dict[str, str]]]:
    """A store for processes of this machine, and the variables that give each its rank. The caller keeps the store: a
    free port that was only looked up could be taken before rank 0 opens it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    places = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return store, [{name: str(value) for name, value in place.items()} for place in places]


def rendezvous(
    store: dist.Store, rank: int, size: int, *, device: str, restarts: int = 0, timeout_seconds: float
) -> tuple[str, list[str], bool]:
    """Wait for all processes of this start, on one kind of device: a new name for it, the same in all; the host of each
    rank; and whether any machine has started its processes again.
    """
    store = dist.PrefixStore("trifocal", store)
    name = mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", mine)
        name = store.get(mine).decode()
    store.set(f"{name}/here/{rank}", json.dumps([device, socket.gethostname(), restarts]))
    if rank == 0:
        _give_name(store, name, size, timeout_seconds)
    found = [json.loads(store.get(f"{name}/here/{other}")) for other in range(size)]
    for other, (kind, host, _) in enumerate(found):
        if kind != found[0][0]:
            store.set(f"{name}/told/{rank}", "")
            if rank == 0:
                # The store may end with this process.
                store.wait([f"{name}/told/{each}" for each in range(size)])
            raise UserError(
                f"rank {other} on {host} would train on {kind}, and rank 0 on {found[0][1]} on {found[0][0]}; look at "
                f"that machine with trifocal doctor, or name the device for all with --run.device"
            )
    return name, [host for _, host, _ in found], any(count > 0 for *_, count in found)


def _give_name(store: dist.Store, name: str, size: int, timeout_seconds: float) -> None:
    """Answer every process that asks, also one of an earlier start, until all of this start are here."""
    deadline = time.monotonic() + timeout_seconds
    while missing := [rank for rank in range(1, size) if not store.check([f"{name}/here/{rank}"])]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {missing[0]} did not arrive in {timeout_seconds:.0f} s")
        for rank in missing:
            if store.check([f"asks/{rank}"]):
                store.set(store.get(f"asks/{rank}").decode(), name)
        time.sleep(0.02)
