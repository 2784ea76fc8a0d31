"""Faults for the processes that the checks start; each function puts one in, in every process or in one."""

from tests.checks.faults import late_bound_residual
from trifocal.distributed import Parallel
from trifocal.models import DecoderLM


def late_bound_checkpointing(rank):
    DecoderLM._last_residual = late_bound_residual


def only_the_last_micro_batch(rank):
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
