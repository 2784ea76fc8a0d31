"""Faults for the processes that the checks start; each function puts one in, in every process or in one."""

import torch
from torch.utils.checkpoint import checkpoint

from trifocal.distributed import Parallel, gradient_watch
from trifocal.models import DecoderLM
from trifocal.nn import Block


def late_bound_checkpointing(rank: int) -> None:
    """`checkpoint(lambda x: block(x), x)` in a loop: every layer is computed again as the last one."""

    def last_residual(self, tokens, cu_seqlens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self._checkpointed_layers:
                x = checkpoint(lambda inp: Block.forward(block, inp), x, use_reentrant=False)  # noqa: B023
            else:
                x = block(x)
        return x

    DecoderLM._last_residual = last_residual


def no_exchange(rank: int) -> None:
    """Gradients are never exchanged: each process goes its own way."""
    healthy = Parallel.micro_batch
    Parallel.micro_batch = lambda self, *, last: healthy(self, last=False)


def not_averaged(rank: int) -> None:
    """The sum over processes where the mean was promised."""

    def added(bucket):
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    gradient_watch._average = added


def last_micro_batch_alone(rank: int) -> None:
    """Under sharding, the gradients of the earlier micro-batches are lost."""
    healthy = Parallel.micro_batch

    def micro_batch(self, *, last):
        if last:
            for group in [part._get_fsdp_state()._fsdp_param_group for part in self.module.modules()
                          if hasattr(part, "_get_fsdp_state")]:  # fmt: skip
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
        return healthy(self, last=last)

    Parallel.micro_batch = micro_batch


def own_learning_rate(rank: int) -> None:
    """One process takes larger steps."""
    from trifocal.checks import process_worker

    healthy = process_worker.make_optimizer

    def make_optimizer(model, section):
        optimizer = healthy(model, section)
        for group in optimizer.param_groups:
            group["lr"] *= 1 + rank
        return optimizer

    process_worker.make_optimizer = make_optimizer


def death(rank: int) -> None:
    """One process ends with an error."""
    if rank == 1:
        raise MemoryError("no more")
