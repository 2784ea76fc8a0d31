"""Parallelizing a model from outside: DDP, FSDP2 and HSDP on a two-dimensional mesh.

The loss of a process is its share of the mean over the global batch, so gradients must be summed over the processes.
PyTorch's wrappers average them; the training step multiplies its loss by `size` to get the sum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trifocal.distributed.context import make_context_shard
from trifocal.distributed.processes import DistributedContext
from trifocal.errors import UserError
from trifocal.models import DecoderLM, ModelConfig, parameter_count
from trifocal.models.decoder import meta_model

try:
    # The default collectives, which classes below extend, are in a private module.
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
except ImportError:
    DefaultAllGather = DefaultReduceScatter = object  # type: ignore[misc,assignment]

Mode = Literal["none", "ddp", "fsdp", "hsdp"]

# Weights, two moments, and gradients in DDP's buckets, each fp32.
DDP_BYTES_PER_PARAMETER = 16
# The model takes at most this share of a GPU; the rest is for activations.
_SHARE_FOR_MODEL = 0.6


def choose_mode(wanted: str, processes: DistributedContext, config: ModelConfig) -> tuple[Mode, str]:
    """The parallel mode, by the model's size if "auto" is wanted, and a sentence for the log, which may be empty."""
    size = processes.size
    if size == 1:
        asked = wanted not in ("auto", "none")
        return "none", f'parallel.mode "{wanted}" has no effect: there is one process' if asked else ""
    if wanted == "none":
        raise UserError(f'parallel.mode is "none", but {size} processes were started; use "auto", or start one')
    if wanted != "auto":
        return wanted, f"{size} processes, {wanted}"  # type: ignore[return-value]
    needed = parameter_count(config) * DDP_BYTES_PER_PARAMETER
    if processes.device.type != "cuda":
        return "ddp", f"{size} processes, ddp: chosen on a CPU"
    # The smallest GPU decides, so that all processes choose the same mode.
    memory = min(processes.gather(torch.cuda.get_device_properties(processes.device).total_memory))
    fits = needed <= _SHARE_FOR_MODEL * memory
    why = f"the whole model takes {needed / 2**30:.1f} GiB of {memory / 2**30:.0f} on each GPU"
    return ("ddp", f"{size} processes, ddp: {why}") if fits else ("fsdp", f"{size} processes, fsdp: {why}")


Observer = Callable[[str, str, Tensor, Sequence[Tensor]], Callable[[], None]]
"""Called when an exchange begins, with its kind, its name, the buffer and the parameters in it. Returns a function that
is called at the end of the exchange (on a GPU, when the end is queued)."""


class GradientWatch:
    """Keeps, on the device, the largest absolute entry of the gradients that this process sends: behind the exchange
    all have the NaN of one. The `observer`, if any, is called at every exchange.
    """

    def __init__(self, device: torch.device) -> None:
        self.observer: Observer | None = None
        self._largest = torch.zeros((), device=device)

    def check(self, buffer: Tensor) -> None:
        """Update the largest entry with a buffer of gradients; NaN and infinity are kept."""
        largest = torch.linalg.vector_norm(buffer.detach(), ord=torch.inf).float()
        torch.maximum(self._largest, largest, out=self._largest)

    def reset(self) -> None:
        """Start a new step."""
        self._largest.zero_()

    def finite(self) -> bool:
        """Whether all gradients since `reset` were finite; waits for the device."""
        return bool(torch.isfinite(self._largest))

    def watch_ddp(self, module: DistributedDataParallel, *, one_by_one: bool = False) -> None:
        """Check every bucket before DDP averages it; `one_by_one` sends each gradient by itself, as rounding depends on
        the place in a bucket, and DDP rebuilds these after its first step.
        """

        def average(_state: None, bucket: dist.GradBucket) -> Future[Tensor]:
            self.check(bucket.buffer())
            end = self.observed("all_reduce", f"bucket {bucket.index()}", bucket.buffer(), bucket.parameters())
            averaged = _average_one_by_one(bucket) if one_by_one else allreduce_hook(None, bucket)  # type: ignore[arg-type]
            if end is None:
                return averaged

            def noted(done: Future[Tensor]) -> Tensor:
                end()
                return done.value()

            return averaged.then(noted)

        module.register_comm_hook(None, average)

    def watch_fsdp(self, module: nn.Module) -> None:
        """Check the gradients of every sharded module before they are reduced and scattered, which with one shard a
        replica does not happen.
        """
        if DefaultAllGather is object:
            raise UserError(
                f"torch {torch.__version__} has moved FSDP's collectives, so that gradients cannot be checked before "
                'they are reduced; set parallel.mode "ddp", or install an earlier torch'
            )
        for path, part in module.named_modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(_AllGather(self, path or "model"))
                part.set_custom_reduce_scatter(_ReduceScatter(self, path or "model"))

    def observed(
        self, kind: str, name: str, buffer: Tensor, parameters: Sequence[Tensor] = ()
    ) -> Callable[[], None] | None:
        """Tell the observer of an exchange that begins; returns the function for its end, if there is an observer."""
        return None if self.observer is None else self.observer(kind, name, buffer, parameters)


def _average_one_by_one(bucket: dist.GradBucket) -> Future[Tensor]:
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    works = [dist.all_reduce(gradient, async_op=True) for gradient in bucket.gradients()]
    for work in works:
        # On a GPU the stream waits, not the host.
        work.wait()
    averaged: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
    averaged.set_result(buffer)
    return averaged


def _call_at_end(work: Any, end: Callable[[], None] | None) -> Any:
    if end is not None and work is None:
        end()
    elif end is not None:
        work.get_future().then(lambda done: end())
    return work


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, watch: GradientWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        self._watch.check(input_tensor)
        end = self._watch.observed("reduce_scatter", self._name, input_tensor)
        return _call_at_end(super().__call__(output_tensor, input_tensor, *args, **options), end)


class _AllGather(DefaultAllGather):
    def __init__(self, watch: GradientWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, output_tensor: Tensor, *args: Any, **options: Any) -> Any:
        end = self._watch.observed("all_gather", self._name, output_tensor)
        return _call_at_end(super().__call__(output_tensor, *args, **options), end)


class FlatGradients:
    """The gradients of a replicated model, one tensor with `views` to fill: a recorded graph runs no hooks of DDP."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        trained = list(parameters)
        sizes = [parameter.numel() for parameter in trained]
        self._all = torch.zeros(sum(sizes), dtype=trained[0].dtype, device=trained[0].device)
        self.views: list[Tensor] = [
            part.view_as(parameter) for part, parameter in zip(self._all.split(sizes), trained, strict=True)
        ]

    def exchange(self, watch: GradientWatch) -> None:
        """Sum the gradients over all processes; `watch` sees this process's gradients before."""
        watch.check(self._all)
        dist.all_reduce(self._all)


class Parallel:
    """A model as its `size` processes train it: `module` is what a training step calls. `watch` checks this process's
    gradients, None for one process; with `exchange_after` they are in `flat_gradients`.
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
        # DDP learns a static graph in its first backward, which must exchange. So each micro-batch of the first step
        # exchanges; and of all steps, if the first after a resume must round like any other.
        self._learning = isinstance(module, DistributedDataParallel) and module.static_graph
        self._learnt_after_a_step = not repeatable

    def begin_step(self) -> None:
        """Start a new step: forget the gradients of the last one."""
        if self.watch is not None:
            self.watch.reset()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward: only the last micro-batch exchanges gradients, and others add up locally."""
        exchanges = last or self.mode != "ddp" or self._learning
        with nullcontext() if exchanges else self.module.no_sync():  # type: ignore[operator]
            if self.mode in ("fsdp", "hsdp"):
                self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
                self.module.set_is_last_backward(last)  # type: ignore[operator]
            yield
        self._learning = self._learning and not (last and self._learnt_after_a_step)

    def exchange_gradients(self) -> None:
        """Sum the flat gradients over the processes, after all micro-batches of a step."""
        if self.flat_gradients is not None:
            assert self.watch is not None
            self.flat_gradients.exchange(self.watch)

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place and on its device."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    @property
    def sharded(self) -> bool:
        """Whether a forward pass needs every process."""
        return self.mode in ("fsdp", "hsdp")


def parallelize(
    model: DecoderLM,
    processes: DistributedContext,
    mode: Mode,
    *,
    precision: str = "fp32",
    shards: int = 0,
    reshard_after_forward: bool = True,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    exchange_after: bool = False,
    repeatable: bool = False,
    context: int = 1,
) -> Parallel:
    """Parallelize a model, which is the same in all processes, in a mode from `choose_mode`. UserError if `shards` or
    `context`, as of the section `parallel`, does not divide the processes.

    Under fsdp and hsdp its parameters are replaced by shards, so make the optimizer after; with "bf16" these are
    collected as bf16, and gradients are reduced in fp32. With `exchange_after` a model under ddp stays unwrapped, as
    CUDA graphs run no hooks: the caller fills the views of `flat_gradients`, and `exchange_gradients` sums them. If
    `repeatable`, ddp exchanges each gradient by itself, and with a static graph in every micro-batch, so that a resumed
    run rounds like an uninterrupted one; other modes always do.
    """
    # Before the groups of rows: PyTorch keeps meshes, with the names of their groups, for later trainings of a process.
    mesh = _mesh(processes, mode, shards) if mode in ("fsdp", "hsdp") else None
    if context > 1:
        if processes.size % context:
            raise UserError(f"parallel.context {context} does not divide the {processes.size} processes")
        model.context = make_context_shard(processes, context)
    if mode == "none":
        return Parallel(model, mode, processes.size, None)
    watch = GradientWatch(processes.device)
    if mode == "ddp" and exchange_after:
        return Parallel(
            model, mode, processes.size, watch, FlatGradients(p for p in model.parameters() if p.requires_grad)
        )
    if mode == "ddp":
        # Gradients are views of the buckets: no second copy.
        module = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        watch.watch_ddp(module, one_by_one=repeatable)
        # The module's attributes are freed in order, and the reducer must not free the process group: it would hold
        # Python's lock while it waits for a thread of gloo, which may wait for the lock to free a tensor.
        module.process_group = module.__dict__.pop("process_group")
        return Parallel(module, mode, processes.size, watch, repeatable=repeatable)
    options: dict[str, Any] = {"mesh": mesh}
    if precision == "bf16":
        # The residual stream stays fp32: no cast at the input of a block, and the embedding returns fp32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output.float())
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, **options)
    # They run parts of the model by themselves.
    for name in ("hidden_states", "logits"):
        register_fsdp_forward_method(model, name)
    watch.watch_fsdp(model)
    return Parallel(model, mode, processes.size, watch)


def _mesh(processes: DistributedContext, mode: Mode, shards: int) -> DeviceMesh:
    kind, size = processes.device.type, processes.size
    if mode == "fsdp":
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    shards = shards or processes.local_size
    if size % shards:
        raise UserError(f"parallel.shards {shards} does not divide the {size} processes")
    # `init_device_mesh` would split the NCCL communicator, and PyTorch would warn of options that Gloo does not know.
    ranks = torch.arange(size).view(-1, shards)
    groups = [dist.new_subgroups_by_enumeration(places.tolist())[0] for places in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=("replicate", "shard"))


def gather_full_model(model: DecoderLM, processes: DistributedContext) -> DecoderLM | None:
    """The model itself with whole parameters, in rank 0; None elsewhere. All processes call this."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model if processes.is_rank0 else None
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not processes.is_rank0:
        return None
    whole = meta_model(model.config)
    whole.load_state_dict(state, assign=True)
    return whole


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
