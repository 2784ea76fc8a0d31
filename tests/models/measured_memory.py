"""Memory that a training step really takes: by PyTorch's record of allocations; by shapes alone for the kernels."""

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from trifocal.models import DecoderLM
from trifocal.models.kernel_memory import LiveBytes, kernel_memory
from trifocal.ops import Documents, Geometry
from trifocal.train.optimizer import gradient_norm, guarded_step, make_optimizer
from trifocal.train.run_config import OptimizerSection

_PROFILED_STEPS = 4


class Trained:
    """A model whose steps are those of the trainer: accumulation, clipping, fused AdamW."""

    def __init__(self, config, setup):
        self.setup = setup
        self.vocab_size = config.vocab_size
        with torch.device(setup.device):
            self.model = DecoderLM(config)
        self.model.set_activation_checkpointing(*setup.checkpointed_layers)
        if setup.compiled:
            self.model.compile_training()
        self.optimizer = make_optimizer(self.model, OptimizerSection())
        self.parameters = list(self.model.parameters())

    def step(self):
        setup = self.setup
        shape = (setup.micro_batch_size, setup.sequence_length)
        for index in range(setup.micro_batches):
            tokens = torch.zeros(shape, dtype=torch.int64, device=setup.device)
            documents = None
            if setup.packed:
                tokens = tokens.view(1, -1)
                length = setup.sequence_length
                borders = torch.tensor([0, length // 3, *range(length, tokens.numel() + 1, length)])
                documents = Documents.from_checked(borders, tokens.numel(), row_length=length).to(setup.device)
            with torch.autocast(setup.device, torch.bfloat16, enabled=setup.precision == "bf16"):
                loss = self.model(tokens, tokens, cu_seqlens=documents)
            if index == 0:
                self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        guarded_step(self.optimizer, self.parameters, gradient_norm(self.parameters), loss, 1.0)


def allocated_peak(config, setup):
    """Bytes at the fullest moment of some steps after the first, by the profiler.

    A thread that frees a tensor late or early makes one step's peak smaller than it is, by up to half a megabyte, and
    none larger: the largest of several steps is right.
    """
    trained = Trained(config, setup)
    trained.step()
    held = sum(parameter.nbytes + parameter.grad.nbytes for parameter in trained.parameters)
    # Tensors of earlier tests may not be freed meanwhile.
    gc.collect()
    held += sum(value.nbytes for state in trained.optimizer.state.values() for value in state.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # The profiler does not see that tensors made before it are freed: the first step's gradients.
        stale = sum(parameter.nbytes for parameter in trained.parameters)
        for _ in range(_PROFILED_STEPS):
            trained.step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now, peak = held - stale, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def allocated_peak_on_gpu(config, setup):
    """Bytes at the fullest moment of the second and third step, by CUDA's caching allocator."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trained = Trained(config, setup)
    trained.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    trained.step()
    trained.step()
    return torch.cuda.max_memory_allocated() - before


class _Step(LiveBytes):
    """Counts a step whose operators give shapes alone, with the launchers' buffers inside of them."""

    def inside(self, func, args, made):
        name, backward, _ = func.name().removeprefix("trifocal::").partition("_backward")
        backward = bool(backward)
        kind = {"combine_branches": "nsa", "selected_attention": "selected", "window_attention": "window"}.get(name)
        if kind is None:
            return super().inside(func, args, made)
        q, k, v = args[backward : backward + 3]
        if kind == "nsa":
            k, v = args[backward + 3 : backward + 5]
        sizes = next((x for x in args if isinstance(x, list)), None)
        geometry = Geometry(*sizes) if sizes else Geometry()
        window = next((x for x in args if isinstance(x, int)), 0)
        heads = (*q.shape[:3], k.shape[2], q.shape[3], v.shape[3])
        needs = kernel_memory(geometry, *heads, q.dtype, attention=kind, window_size=window)
        return needs.backward - made if backward else needs.forward


def shaped_peak(config, setup):
    """The same without numbers: operators give shapes alone, so the kernels' take part without a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Step() as step:
        trained = Trained(config, setup)
        for parameter in trained.parameters:
            step.add(parameter)
        trained.step()
        trained.step()
    return step.peak
