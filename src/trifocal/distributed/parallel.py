"""Spreading a model over processes, from outside: DDP, FSDP2 and both together on a two-dimensional mesh.

The trainer's losses are shares of the mean over the whole global batch, and so its gradients must be added up over
the processes. PyTorch's wrappers average; the trainer multiplies by `size` to undo that.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trifocal.distributed.flat_gradients import FlatGradients
from trifocal.distributed.gradient_watch import GradientWatch
from trifocal.distributed.processes import Processes
from trifocal.errors import UserError
from trifocal.models import DecoderLM, ModelConfig, parameter_count

Mode = Literal["none", "ddp", "fsdp", "hsdp"]

# Weights, two moments, and gradients in DDP's buckets, each fp32.
DDP_BYTES_PER_PARAMETER = 16
# What is left of a GPU for activations, at least.
_SHARE_FOR_MODEL = 0.6


def choose_mode(wanted: str, processes: Processes, config: ModelConfig) -> tuple[Mode, str]:
    """The mode that `parallel.mode` means here.

    Args:
        wanted: "auto" or a mode.
        processes: Of the run.
        config: The model, whose size decides under "auto".

    Returns:
        The mode, and a sentence that says what was chosen and why; empty for a single process that wanted no more.

    Raises:
        UserError: If several processes were started with "none".
    """
    size = processes.size
    if size == 1:
        alone = wanted in ("auto", "none")
        return "none", "" if alone else f'parallel.mode is "{wanted}", but there is one process: nothing is shared'
    if wanted == "none":
        raise UserError(f'parallel.mode is "none", but {size} processes were started; use "auto", or start one')
    if wanted != "auto":
        return wanted, f"{size} processes, {wanted}"  # type: ignore[return-value]
    needed = parameter_count(config) * DDP_BYTES_PER_PARAMETER
    if processes.device.type != "cuda":
        return "ddp", f"{size} processes, ddp: chosen on a CPU"
    # The smallest decides, so that all decide alike.
    memory = min(processes.gather(torch.cuda.get_device_properties(processes.device).total_memory))
    fits = needed <= _SHARE_FOR_MODEL * memory
    why = f"the whole model takes {needed / 2**30:.1f} GiB of {memory / 2**30:.0f} on each GPU"
    return ("ddp", f"{size} processes, ddp: {why}") if fits else ("fsdp", f"{size} processes, fsdp: {why}")


class Parallel:
    """A model in the form that its processes train.

    Made by `parallelize`; without arguments to it, a plain model in one process.

    Attributes:
        mode: How it is spread.
        size: Processes.
        module: What a training step calls, before compilation.
        watch: Whether this process's own gradient was finite, before the others' were added; None for one process.
        flat_gradients: Under ddp with `exchange_after`, where the gradients are; None otherwise.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: Mode,
        size: int,
        watch: GradientWatch | None,
        flat_gradients: FlatGradients | None = None,
        repeatable: bool = False,
    ) -> None:
        self.module, self.mode, self.size, self.watch = module, mode, size, watch
        self.flat_gradients = flat_gradients
        # DDP learns a static graph in its first exchange, which must not be put off. So the first step's micro-batches
        # are exchanged one by one, and all steps' where the first after a resume must round like any other.
        self._learning = isinstance(module, DistributedDataParallel) and module.static_graph
        self._learnt_after_a_step = not repeatable

    def begin_step(self) -> None:
        """Forget the step before; its gradients are gone."""
        if self.watch is not None:
            self.watch.reset()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: only the last one of a step exchanges gradients.

        The ones before add up in each process. Under fsdp that keeps a whole gradient a process.
        """
        exchanges = last or self.mode != "ddp" or self._learning
        with nullcontext() if exchanges else self.module.no_sync():  # type: ignore[operator]
            if self.mode in ("fsdp", "hsdp"):
                self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
                self.module.set_is_last_backward(last)  # type: ignore[operator]
            yield
        self._learning = self._learning and not (last and self._learnt_after_a_step)

    def exchange_gradients(self) -> None:
        """Add up the flat gradients, once all micro-batches of a step have added to them."""
        if self.flat_gradients is not None:
            assert self.watch is not None
            self.flat_gradients.exchange(self.watch)

    def sum(self, value: Tensor) -> Tensor:
        """Add up a tensor over the processes, in place and on its device."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    @property
    def sharded(self) -> bool:
        """Whether a forward pass needs every process."""
        return self.mode in ("fsdp", "hsdp")


def parallelize(
    model: DecoderLM,
    processes: Processes,
    mode: Mode,
    *,
    precision: str = "fp32",
    shards: int = 0,
    reshard_after_forward: bool = True,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    exchange_after: bool = False,
    repeatable: bool = False,
) -> Parallel:
    """Spread a model over the processes; it is the same in all of them before.

    Args:
        model: On its device. Under fsdp and hsdp its parameters are replaced by shards, so make the optimizer after.
        processes: Of the run.
        mode: From `choose_mode`.
        precision: "bf16" collects and computes with bf16 copies of the shards under fsdp and hsdp; gradients are
            added up in fp32, and weights stay fp32.
        shards: Processes that share one copy under hsdp; 0: those of one machine.
        reshard_after_forward: Give a block's weights back between forward and backward.
        static_graph: DDP's option of that name.
        find_unused_parameters: DDP's option of that name; this model has none.
        exchange_after: Under ddp, leave the model as it is, and send all gradients together after backward: for graphs
            that were recorded, which run no hooks. The caller zeroes `flat_gradients`, lets its micro-batches add to
            them, and calls `exchange_gradients`, which adds up and does not average.
        repeatable: Under ddp, exchange each gradient by itself, and with a static graph those of every micro-batch, so
            that a resumed run rounds as an uninterrupted one. (The other ways of exchanging always do.)

    Raises:
        UserError: If `shards` does not divide the processes.
    """
    if mode == "none":
        return Parallel(model, mode, processes.size, None)
    watch = GradientWatch(processes.device)
    if mode == "ddp" and exchange_after:
        return Parallel(model, mode, processes.size, watch, FlatGradients(model.parameters()))
    if mode == "ddp":
        # Gradients stay in the buckets that are sent: no second copy, and nothing to write back.
        module = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        watch.watch_ddp(module, one_by_one=repeatable)
        return Parallel(module, mode, processes.size, watch, repeatable=repeatable)
    options: dict[str, Any] = {"mesh": _mesh(processes, mode, shards)}
    if precision == "bf16":
        # The residual stream stays fp32: nothing is cast on the way into a block, and the embedding gives fp32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        model.embedding.register_forward_hook(_to_fp32)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, **options)
    # Generation calls the model's parts by themselves.
    for name in ("hidden_states", "logits"):
        register_fsdp_forward_method(model, name)
    watch.watch_fsdp(model)
    return Parallel(model, mode, processes.size, watch)


def _to_fp32(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.float()


def _mesh(processes: Processes, mode: Mode, shards: int) -> dist.DeviceMesh:
    kind, size = processes.device.type, processes.size
    if mode == "fsdp":
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    shards = shards or processes.local_size
    if size % shards:
        raise UserError(f"parallel.shards {shards} does not divide the {size} processes")
    return init_device_mesh(kind, (size // shards, shards), mesh_dim_names=("replicate", "shard"))


def whole_model(model: DecoderLM, processes: Processes) -> DecoderLM | None:
    """The model itself with whole parameters, in rank 0; None elsewhere.

    Every process must call this with a sharded model.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model if processes.is_rank0 else None
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not processes.is_rank0:
        return None
    with torch.device("meta"):
        whole = DecoderLM(model.config)
    whole.load_state_dict(state, assign=True)
    return whole
