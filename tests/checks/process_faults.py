"""Faults for the processes that the checks start; each function puts one in, in every process or in one."""

from torch.utils.checkpoint import checkpoint

from trifocal.distributed import Parallel
from trifocal.models import DecoderLM
from trifocal.nn import Block


def late_bound_checkpointing(rank: int) -> None:
    """`checkpoint(lambda x: block(x), x)` in a loop: every layer is computed again as the last one."""

    def last_residual(self, tokens, documents, lessons):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self._checkpointed_layers:
                x = checkpoint(lambda inp: Block.forward(block, inp), x, use_reentrant=False)  # noqa: B023
            else:
                x = block(x)
        return x

    DecoderLM._last_residual = last_residual


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


def death(rank: int) -> None:
    """One process ends with an error."""
    if rank == 1:
        raise MemoryError("no more")
