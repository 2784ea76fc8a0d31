"""The choice of the parallel mode, and its effect on a single process."""

import runpy
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.children import environment, free_port
from tests.distributed.workers import Workers
from trifocal.distributed import parallel
from trifocal.distributed.parallel import choose_mode, parallelize
from trifocal.distributed.processes import DistributedContext, processes_started
from trifocal.distributed.rendezvous import places_here
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.testing.small_models import small_config

CPU = torch.device("cpu")
TWO = DistributedContext(0, 2)


def test_one_process_shares_nothing():
    assert choose_mode("auto", DistributedContext(), small_config()) == ("none", "")
    mode, note = choose_mode("fsdp", DistributedContext(), small_config())
    assert mode == "none"
    assert "there is one process" in note


def test_several_processes_need_a_mode():
    with pytest.raises(UserError, match=r'parallel\.mode is "none", but 2 processes were started'):
        choose_mode("none", TWO, small_config())
    assert choose_mode("hsdp", TWO, small_config()) == ("hsdp", "2 processes, hsdp")
    assert choose_mode("auto", TWO, small_config())[0] == "ddp"


def test_a_pytorch_that_has_moved_fsdp_s_collectives_is_told_of_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp._fully_shard._fsdp_collectives", None)
    module = runpy.run_path(str(parallel.__file__))
    with pytest.raises(UserError, match=r'moved FSDP\'s collectives.*set parallel\.mode "ddp"'):
        module["GradientWatch"](CPU).watch_fsdp(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(("gib", "expected"), [(80, "ddp"), (8, "fsdp")])
def test_the_model_is_sharded_where_it_does_not_fit(monkeypatch, gib, expected):
    """16 bytes a parameter may take 60 % of the GPU; 8 GiB hold 322 million parameters that way."""
    memory = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    # The other process has a larger GPU: both decide by the smaller.
    monkeypatch.setattr(DistributedContext, "gather", lambda self, value: [100 * value, value])
    config = small_config(dim=1024, mlp_dim=4096, num_layers=32)
    mode, note = choose_mode("auto", DistributedContext(0, 2, device=torch.device("cuda")), config)
    assert mode == expected
    assert f"of {gib} on each GPU" in note


@pytest.mark.parametrize(
    ("rank", "why"), [(0, "the port is taken, perhaps .*take another"), (1, ".*timed out.*; start all of them")]
)
def test_a_place_to_meet_that_is_taken_or_out_of_reach_is_named(monkeypatch, rank, why):
    port = free_port()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, str(value))
    with socket.socket() as other:
        other.bind(("", port))
        with (
            pytest.raises(UserError, match=rf"cannot connect at 127\.0\.0\.1:{port}: {why}"),
            processes_started(CPU, timeout_seconds=1),
        ):
            pass


WITHOUT_THE_LOCK = """
import sys
import torch
import torch.distributed as dist
from trifocal.distributed.parallel import parallelize
from trifocal.distributed.processes import DistributedContext
from trifocal.models import DecoderLM
from trifocal.testing.small_models import small_config

model = DecoderLM(small_config())
# Each collective leaves a thread of gloo waiting for Python's lock.
sys.setswitchinterval(100)
for _ in range(5):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel = parallelize(model, DistributedContext(), "ddp")
    received, sent = [torch.zeros(1)], torch.zeros(1)
    dist.all_gather(received, sent)
    del received, sent
    dist.destroy_process_group()
    del parallel
"""


def test_a_replicated_model_is_freed_while_a_thread_of_gloo_waits_for_python():
    """The group of processes ends with it; the thread still has the tensors of a collective to free."""
    ended = subprocess.run([sys.executable, "-c", WITHOUT_THE_LOCK], env=environment(), timeout=60)
    assert ended.returncode == 0


LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def set_launched(monkeypatch, variables):
    """A launcher's environment variables: these, and no others."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_single_process_needs_no_launcher(monkeypatch):
    set_launched(monkeypatch, {"WORLD_SIZE": "", "RANK": "0"})
    with processes_started(CPU) as processes:
        assert (processes.rank, processes.size, processes.local_size, processes.restarted) == (0, 1, 1, False)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT are not set; start the processes"),
        ({"RANK": "3"}, "RANK=3, WORLD_SIZE=: expected a RANK"),
        ({"WORLD_SIZE": "two"}, "the environment variable WORLD_SIZE must be a whole number, got 'two'"),
    ],
)
def test_what_a_launcher_left_out_is_named(monkeypatch, variables, message):
    set_launched(monkeypatch, variables)
    with pytest.raises(UserError, match=f"^{message}" if "=" in message else message), processes_started(CPU):
        pass


GATHER = """
import torch
from trifocal.distributed.processes import processes_started
with processes_started(torch.device("cpu")) as processes:
    for each in (processes, processes.new_group()):
        assert each.gather(f"of rank {each.rank}") == ["of rank 0", "of rank 1", "of rank 2"]
        assert each.run_on_rank0(lambda: each.rank) == 0
    assert processes.sum([processes.rank, 1]) == [3, 3]
    assert processes.local_size == 3
    assert processes.async_all_reduce([processes.rank, -processes.rank], "max")() == [2, 0]
"""


def test_values_of_all_processes_come_in_the_order_of_ranks(tmp_path):
    # Some launchers name no place on the machine.
    ended = Workers([["-c", GATHER]] * 3, tmp_path, LOCAL_RANK="", LOCAL_WORLD_SIZE="").join(60)
    assert [end.status for end in ended] == [0, 0, 0], [end.error for end in ended]


TWICE = """
import torch
from trifocal.distributed.parallel import parallelize
from trifocal.distributed.processes import processes_started
from trifocal.models import DecoderLM
from trifocal.testing.small_models import small_config
from trifocal.train.step.optimizer import gradient_norm
for context in (2, 1):
    with processes_started(torch.device("cpu")) as processes:
        model = DecoderLM(small_config())
        parallelize(model, processes, "hsdp", shards=2, context=context)
        tokens = torch.arange(16)[None]
        model(tokens, tokens).backward()
        assert gradient_norm(model.parameters()) > 0
"""


def test_a_process_may_train_twice(tmp_path):
    """By one store, as torchrun keeps it; the second time with other groups."""
    _store, [place, _] = places_here(2)
    common = {name: value for name, value in place.items() if "RANK" not in name}
    ended = Workers([["-c", TWICE]] * 2, tmp_path, **common).join(60)
    assert [end.status for end in ended] == [0, 0], ended


def test_what_shares_a_sequence_or_the_model_must_divide_the_processes():
    for mode, name in (("ddp", "context"), ("hsdp", "shards")):
        with pytest.raises(UserError, match=rf"parallel\.{name} 3 does not divide the 2 processes"):
            parallelize(DecoderLM(small_config()), TWO, mode, **{name: 3})


def test_flat_gradients_are_checked_before_they_are_summed(monkeypatch):
    """The sum has the NaN of any process."""
    monkeypatch.setattr(torch.distributed, "all_reduce", torch.Tensor.zero_)
    watch, flat = parallel.GradientWatch(CPU), parallel.FlatGradients([torch.nn.Parameter(torch.ones(2, 3))])
    for value in (1.0, torch.nan):
        watch.reset()
        flat.views[0][1, 2] = value
        flat.exchange(watch)
        assert watch.finite() == (value == 1) and not flat.views[0].any()
