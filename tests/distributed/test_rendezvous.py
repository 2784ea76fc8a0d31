"""A start gets its own name, in a store that remembers starts before it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from trifocal.distributed.rendezvous import rendezvous
from trifocal.errors import UserError


def start(store, kinds, restarts=0):
    """A process for each kind of device, in a thread each; calls that return the result of each, or raise its error.

    The last one is on a machine that has counted `restarts`.
    """
    size = len(kinds)
    with ThreadPoolExecutor(size) as pool:
        # The last rank first: nobody waits for an order.
        found = [
            pool.submit(
                rendezvous,
                store,
                rank,
                size,
                device=kinds[rank],
                restarts=restarts * (rank == size - 1),
                timeout_seconds=20.0,
            )
            for rank in reversed(range(size))
        ]
    return [each.result for each in reversed(found)]


def test_every_start_has_its_own_name():
    """Also where one process of an earlier start was the only one of it that came."""
    store = dist.HashStore()
    first = {found()[::2] for found in start(store, ["cpu"] * 3)}
    dist.PrefixStore("trifocal", store).set("asks/2", "of a process that is gone")
    second = {found()[::2] for found in start(store, ["cpu"] * 3, restarts=1)}
    ((name, again),), ((other_name, other_again),) = first, second
    assert name != other_name
    assert (again, other_again) == (False, True), "one machine has counted, and all know"


def test_kinds_of_devices_that_differ_are_refused_in_all():
    for name in start(dist.HashStore(), ["cuda", "cuda", "cpu"]):
        with pytest.raises(UserError, match=r"^rank 2 on .* would train on cpu, and rank 0 on .* on cuda; look at "):
            name()


def test_a_process_that_does_not_come_is_named():
    with pytest.raises(RuntimeError, match="rank 1 did not arrive in 0 s"):
        rendezvous(dist.HashStore(), 0, 2, device="cpu", timeout_seconds=0.1)
