"""The number of threads that a command computes with follows the load, unless the user or the run fixes it."""

import itertools

import pytest
import torch

import trifocal.cli.threads as module
from trifocal.cli.threads import VARIABLES, Load, Threads, free_cores

CPU = torch.device("cpu")


@pytest.fixture
def cores(monkeypatch):
    """A machine with some cores, on which nobody has set a number of threads."""
    before = torch.get_num_threads()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "core_quota", lambda: float("inf"))

    def make(count):
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(count)))
        torch.set_num_threads(count)

    yield make
    torch.set_num_threads(before)


def following(*others):
    """Threads that look at loads of other programs, in cores, one a second, and the sentences of all looks."""
    own = iter(range(len(others) + 2))
    busy = itertools.accumulate(others, lambda work, other: work + other + 1, initial=0.0)
    # Clocks long past, so that each look is due.
    loads = (Load(float(-1000 + second), work, float(next(own))) for second, work in enumerate(busy))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_at_start", lambda: next(loads, None))
        patch.setattr(module, "read_load", lambda: next(loads, None))
        threads = Threads(CPU)
        return threads, [threads.look() for _ in others]


def test_free_cores():
    def free(others, cores=2, quota=float("inf")):
        return free_cores(Load(10.0, 100.0, 50.0), Load(12.0, 100.0 + 2 * others + 3.0, 53.0), cores, quota)

    assert [free(others) for others in (0.0, 0.4, 0.6, 1.0, 2.0, 3.0)] == [2, 2, 1, 1, 1, 1]
    # Ticks are counted coarsely: own work may come to more than all.
    assert free(-0.2) == 2
    assert free(5.3, cores=16) == 11
    assert [free(10.0, cores=64, quota=quota) for quota in (2.0, 0.5, 100.0)] == [2, 1, 54]


def test_a_busy_program_leaves_one_of_two_threads_until_it_ends(cores):
    cores(2)
    _, sentences = following(0.1, 0.9)
    assert torch.get_num_threads() == 1
    assert not sentences[0]
    assert sentences[1].startswith("computes with 1 of 2 CPU threads")
    assert "OMP_NUM_THREADS=2" in sentences[1]

    cores(2)
    # Two free looks are no end yet, three are.
    _, sentences = following(0.9, 0.0, 0.0, 1.0, 0.0, 0.0)
    assert torch.get_num_threads() == 1
    cores(2)
    _, sentences = following(0.9, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    assert torch.get_num_threads() == 1
    cores(2)
    _, sentences = following(0.9, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    assert torch.get_num_threads() == 2
    # Once is enough.
    assert [bool(sentence) for sentence in sentences] == [True, *[False] * 6]


def test_looks_are_a_second_apart(cores, monkeypatch):
    cores(2)
    now = Load(module.time.monotonic(), 0.0, 0.0)
    reads = iter([now])
    monkeypatch.setattr(module, "load_at_start", lambda: now._replace(clock=now.clock - 2))
    monkeypatch.setattr(module, "read_load", lambda: next(reads))
    threads = Threads(CPU)
    assert threads.look() == threads.look() == ""
    assert torch.get_num_threads() == 2
    assert next(reads, None) is None


@pytest.mark.parametrize("why", [*VARIABLES, "fixed", "one thread", "no readings"])
def test_what_somebody_set_is_not_touched(why, cores, monkeypatch):
    cores(1 if why == "one thread" else 2)
    if why in VARIABLES:
        monkeypatch.setenv(why, "2")
    loads = iter([None] if why == "no readings" else [Load(-2.0, 0.0, 0.0), Load(-1.0, 9.0, 0.0)])
    before = torch.get_num_threads()
    monkeypatch.setattr(module, "load_at_start", lambda: next(loads))
    monkeypatch.setattr(module, "read_load", lambda: next(loads))
    threads = Threads(CPU, fixed=why == "fixed")
    assert threads.look() == ""
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("chosen", [False, True])
def test_beside_a_gpu_there_is_one_thread(chosen, cores, monkeypatch):
    cores(2)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert Threads(torch.device("cuda")).look() == ""
    assert torch.get_num_threads() == (2 if chosen else 1)
