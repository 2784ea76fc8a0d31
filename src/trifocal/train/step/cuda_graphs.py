"""Forward and backward of a micro-batch as one CUDA graph: recorded once, then started with a single call.

A graph reads and writes fixed memory. So inputs are copied into its tensors, gradients are collected in buffers
that stay. Document boundaries are padded to a fixed number, with empty documents behind the last one; where there are
more, there is a second graph. Under bf16 a graph reads bf16 copies of the matrices, made once a step, and leaves their
gradients in bf16. Eager passes give the same bits; a compiler may round at other places.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from trifocal.data import Batch
from trifocal.distributed.parallel import Parallel, local_shard
from trifocal.ops.devices import to_device
from trifocal.train.config.sections import TrainSection
from trifocal.train.step.micro_batch import LossFunction, autocast, call_with, model_inputs

Result = TypeVar("Result")


class _Recording(NamedTuple):
    """A recorded micro-batch: what it writes, and what it reads (the weight comes last)."""

    replay: Callable[[], None]
    results: list[Tensor]
    inputs: list[Tensor]


class MatrixCopies:
    """bf16 copies of the trained matrices of linear maps, kept in place: leaves of autograd, by the matrix's id."""

    def __init__(self, model: nn.Module) -> None:
        # Not of adapters, which may compute with their matrices in another type.
        self._linears = [
            module for module in model.modules() if type(module) is nn.Linear and module.weight.requires_grad
        ]
        self._matrices = [linear.weight for linear in self._linears]
        self._copies = [nn.Parameter(matrix.detach().bfloat16()) for matrix in self._matrices]
        self.of = dict(zip(map(id, self._matrices), self._copies, strict=True))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the matrices as they are now."""
        if self._copies:
            torch._foreach_copy_(tuple(self._copies), tuple(self._matrices))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the copies inside."""
        for linear, copy in zip(self._linears, self._copies, strict=True):
            linear.weight = copy
        try:
            yield
        finally:
            for linear, matrix in zip(self._linears, self._matrices, strict=True):
                linear.weight = matrix


class GraphRecorder:
    """Records work on a CUDA device in one pool of `memory_bytes`, which the allocator does not count as allocated."""

    def __init__(self, device: torch.device) -> None:
        self.memory_bytes = 0
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Result]) -> Result:
        """Do work on the recording's stream, so that kernels are compiled and libraries loaded; returns its result."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def record(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Record work that waits for no kernel: a call that does it, and its result, which every call overwrites."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Threads that pin memory for other tensors must not spoil the recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        self.memory_bytes += torch.cuda.memory_reserved(self._device) - before
        # From now on the passes use the recordings' own memory.
        torch.cuda.reset_peak_memory_stats(self._device)
        return graph.replay, result


class MicroBatchGraphs:
    """Computes weighted losses and collects their gradients, by graphs.

    The first micro-batch of a kind is computed without a graph, which compiles its kernels; the second is recorded and
    replayed. So each is computed once, as a sharded model requires, whose passes hold collectives. Parameters keep
    their memory; `loss_function` is the model, called as `DecoderLM` with targets.
    """

    def __init__(
        self,
        loss_function: LossFunction,
        model: nn.Module,
        device: torch.device,
        precision: str,
        parallel: Parallel | None = None,
    ) -> None:
        self._loss_function = loss_function
        self._device, self._precision = device, precision
        sharded = parallel is not None and parallel.sharded
        # FSDP averages gradients over the processes: times their number, that is the sum.
        self._factor = parallel.size if parallel is not None and sharded else 1
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._copies = MatrixCopies(model) if precision == "bf16" and not sharded else None
        copy_of = {} if self._copies is None else self._copies.of
        self._leaves = [copy_of.get(id(parameter), parameter) for parameter in self._parameters]
        flat = None if parallel is None else parallel.flat_gradients
        self._gradients = flat.views if flat is not None else list(map(torch.zeros_like, self._parameters))
        self._local_gradients = list(map(local_shard, self._gradients))
        self._begun = False
        self._known: set[tuple[int, ...]] = set()
        self._recordings: dict[tuple[int, ...], _Recording] = {}
        self._recorder = GraphRecorder(device)

    @property
    def memory_bytes(self) -> int:
        """Memory of the graphs, which the allocator does not count as allocated."""
        return self._recorder.memory_bytes

    @property
    def recordings(self) -> int:
        """Kinds of micro-batches that have been recorded."""
        return len(self._recordings)

    def begin_step(self) -> None:
        """Begin a step: its first micro-batch's gradients take the place of the last step's."""
        self._begun = False
        if self._copies is not None:
            self._copies.refresh()

    def add_gradients(self, batch: Batch, weight: float, documents: int = 0) -> Tensor:
        """Add the gradient of `weight * loss` of a batch on the host; returns `weight * loss`, which the next one of
        its kind may overwrite. `documents`, see `model_inputs`, makes those of all processes of one kind.
        """
        inputs = model_inputs(batch, pad_documents=True, documents=documents)
        rows = batch.rows.shape
        kind = (*rows, *(size for tensor in inputs for size in tensor.shape))
        inputs.append(torch.tensor(weight))
        recording = self._recordings.get(kind)
        if recording is None:
            placed = [to_device(tensor, self._device) for tensor in inputs]
            if kind not in self._known:
                self._known.add(kind)
                return self._collect(self._recorder.warm_up(lambda: self._pass(placed, rows)))
            recorded = self._recorder.record(lambda: self._pass(placed, rows))
            recording = self._recordings[kind] = _Recording(*recorded, placed)
        for fixed, given in zip(recording.inputs, inputs, strict=True):
            fixed.copy_(given.pin_memory(), non_blocking=True)
        recording.replay()
        return self._collect(recording.results)

    def release(self) -> None:
        """Free the graphs. NCCL does not end while a graph holds its collectives."""
        self._known.clear()
        self._recordings.clear()

    def _pass(self, inputs: list[Tensor], rows: torch.Size) -> list[Tensor]:
        """The weighted loss, and the gradient of each leaf (of this process's shard)."""
        *tensors, weight = inputs
        self._drop_gradients()
        with nullcontext() if self._copies is None else self._copies.in_place():
            with autocast(self._device, self._precision):
                loss = call_with(self._loss_function, tensors, rows)
            weighted = loss * weight
            (weighted * self._factor).backward()
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
        self._drop_gradients()
        return [weighted.detach(), *map(local_shard, gradients)]

    def _drop_gradients(self) -> None:
        # A leaf without a gradient takes the next one as it is: nothing is added, and nothing copied.
        for leaf in self._leaves:
            leaf.grad = None

    def _collect(self, results: list[Tensor]) -> Tensor:
        """Take a micro-batch's gradients to the parameters' own, which stay; returns its loss."""
        loss, *gradients = results
        collect = torch._foreach_add_ if self._begun else torch._foreach_copy_
        # One kernel takes many tensors of one type.
        for dtype in {gradient.dtype for gradient in gradients}:
            pairs = [pair for pair in zip(self._local_gradients, gradients, strict=True) if pair[1].dtype == dtype]
            collect([total for total, _ in pairs], [gradient for _, gradient in pairs])
        for parameter, total in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = total
        self._begun = True
        return loss


def make_graphs(
    parallel: Parallel, model: nn.Module, config: TrainSection, device: torch.device, loss_function: LossFunction
) -> tuple[MicroBatchGraphs | None, str]:
    """Graphs if `train.cuda_graphs` is set, else None; and a sentence for the log if they are not possible."""
    if not config.cuda_graphs:
        return None, ""
    if device.type != "cuda":
        return None, f"train.cuda_graphs is for GPUs: without effect on a {device.type}"
    return MicroBatchGraphs(loss_function, model, device, config.precision, parallel), ""
