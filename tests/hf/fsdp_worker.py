"""Training through accelerate's FSDP2 on the CPU, and the same in one process."""

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from trifocal.hf import TrifocalForCausalLM
from trifocal.ops import Geometry
from trifocal.testing.small_models import make_model, random_tokens, small_config

STEPS = 3
PROCESSES = 2


def train(model, accelerator):
    """A few steps on a batch of four rows, of which each process has its share; the model and the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    rank, size = 0, 1
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        rank, size = accelerator.process_index, accelerator.num_processes
    losses = []
    for step in range(STEPS):
        tokens = random_tokens((4, 40), 64, torch.device("cpu"), seed=step)[rank::size]
        # Packed documents, so that nothing but the model knows where they begin.
        positions = torch.cat((torch.arange(25), torch.arange(15)))[None]
        loss = model(tokens, position_ids=positions, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() if accelerator is None else accelerator.reduce(loss.detach(), "mean")
        losses.append(float(mean))
    return model, losses


def tiny_model():
    """The model that all begin with; every query teaches its index, so that nothing is drawn."""
    config = small_config(chooser="index", geometry=Geometry(4, 2, 4, 3, 1, 1, 8))
    model = TrifocalForCausalLM.from_decoder(make_model(config, torch.device("cpu"), torch.float64))
    for block in model.model.blocks:
        block.attention.choice_loss_stretch = 1
    return model


def train_sharded(rank, port, out):
    """One of the processes; rank 0 writes losses and whole weights."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in places.items()})
    # Threads of the process that this one was forked from are not there, and OpenMP would wait for them.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # The process that this one was forked from may have trained too.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    # accelerate turns the plugin on for GPUs alone; what it does with a model is the same here.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    model, losses = train(tiny_model(), accelerator)
    weights = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    if rank == 0:
        blocks = [type(block).__name__ for block in model.model.blocks]
        torch.save({"losses": losses, "weights": weights, "blocks": blocks}, out)
    torch.distributed.destroy_process_group()
