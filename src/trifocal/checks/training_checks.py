"""Checks of training: short runs of the real trainer in a temporary folder, and steps in two processes, over gloo on a
CPU, over NCCL on two GPUs."""

import contextlib
import dataclasses
import io
import json
import math
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trifocal.checks.measurement import Measurement
from trifocal.checks.process_worker import Case
from trifocal.data import Batch, DataConfig
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Geometry
from trifocal.runlog import read_metrics
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.testing.processes import run_processes
from trifocal.testing.small_models import small_config
from trifocal.train.checkpoint.folders import checkpoint_path
from trifocal.train.config.load import override
from trifocal.train.config.sections import OptimizerSection, RunConfig, TrainSection
from trifocal.train.launch import resume, train
from trifocal.train.loop import TrainResult
from trifocal.train.step.optimizer import make_optimizer
from trifocal.train.step.step import TrainStep

FLOOR_STEPS = 160
RESUME_STEPS = 6
PROCESSES = 2
_LIMIT_SECONDS = 180.0
REPORTED_LAYERS = (5, 12)
"""Depths at which distributed training was reported not to work."""
# Both sides add up the same numbers in another order, and a dozen layers pass the rounding on.
GRADIENT_BOUND = 64 * torch.finfo(torch.float32).eps

PARALLEL_CASES = (
    *(
        Case("ddp", num_layers=layers, checkpointing=recompute)
        for layers in REPORTED_LAYERS
        for recompute in (False, True)
    ),
    Case("ddp", num_layers=12, checkpointing=True, static_graph=True),
    Case("ddp", num_layers=12, checkpointing=True, find_unused=True),
    Case("ddp", checkpointing=True, accumulation=2),
    Case("ddp", accumulation=2, static_graph=True),
    Case("ddp", accumulation=2, after=True),
    *(Case("fsdp", num_layers=layers, checkpointing=True) for layers in REPORTED_LAYERS),
    Case("fsdp", accumulation=2),
    Case("fsdp", checkpointing=True, reshard=False),
    *(Case(mode, checkpointing=True, accumulation=2, index=True) for mode in ("ddp", "fsdp")),
    Case("ddp", context=2, checkpointing=True, accumulation=2),
    Case("ddp", context=2, after=True),
    Case("fsdp", context=2, checkpointing=True),
    *(Case("hsdp", shards=shards, checkpointing=True, accumulation=2) for shards in (1, 2)),
)
"""Among them the cases reported not to work: 5 and 12 layers, checkpointing, a static graph, unused parameters."""


def random_token_floor(device: torch.device) -> Measurement:
    """On fresh, uniformly random tokens no loss may fall under ln(vocab): a lower loss needs later tokens.

    The figure is how far the mean loss of the second half of a short training lies under the floor, in its standard
    errors. Bound: 4, which chance passes once in 30,000 times.
    """
    vocab_size = 8
    geometry = Geometry(
        compression_block_size=2,
        compression_stride=2,
        selection_block_size=4,
        num_selected_blocks=2,
        num_initial_blocks=0,
        num_local_blocks=1,
        window_size=2,
    )
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16}
    model = small_config(vocab_size=vocab_size, geometry=geometry, **sizes)
    with _folder() as folder:
        directory = folder / "run"
        data = DataConfig(source="synthetic", prefetch_batches=8)
        batch = TrainSection(steps=FLOOR_STEPS, sequence_length=64, global_batch_size=8, micro_batch_size=8)
        _finish(train, _config(directory, device, model, data, batch, saved_steps=0))
        losses = [row["loss"] for row in read_metrics(directory / "metrics.jsonl", "train")]
    second_half = losses[FLOOR_STEPS // 2 :]
    floor = math.log(vocab_size)
    mean = statistics.mean(second_half)
    standard_error = statistics.stdev(second_half) / len(second_half) ** 0.5
    detail = (
        f"mean loss {mean:.4f} over {len(second_half)} steps, floor {floor:.4f}, standard error {standard_error:.4f}"
    )
    return Measurement((floor - mean) / standard_error, 4, "std. errors", (detail,))


def resume_bit_for_bit(device: torch.device) -> Measurement:
    """A run that is resumed half-way ends exactly as the one that never stopped.

    Compared at the end, bit for bit: weights, optimizer, step, loss, data position and every random generator, while
    each forward pass draws from all of them, as dropout would; and the losses on the way. The figure counts the
    differences. Bound: none.
    """
    with _folder() as folder, _drawing_from_every_generator():
        _write_documents(folder / "text")
        whole, resumed = folder / "whole", folder / "resumed"
        model = small_config(vocab_size=257, value_dim=8)
        data = DataConfig(
            source=f"text:{folder / 'text'}", validation_fraction=0.0, shuffle_documents=4, shuffle_sequences=8
        )
        batch = TrainSection(steps=RESUME_STEPS, sequence_length=48, global_batch_size=4, micro_batch_size=2)
        _finish(train, _config(whole, device, model, data, batch, saved_steps=RESUME_STEPS // 2))
        shutil.copytree(whole, resumed)
        middle = checkpoint_path(Path(), RESUME_STEPS // 2).name
        _finish(resume, resumed, checkpoint=middle)
        first, second = map(_final_state, (whole, resumed))
    differing = [name for name in first if first[name] != second.get(name)]
    details = (f"{len(first)} tensors and states compared", *(f"differs: {name}" for name in differing[:4]))
    return Measurement(len(differing), 0, "states", details)


def master_weights(device: torch.device) -> Measurement:
    """Under bf16 the matrix products are bf16; weights, gradients and optimizer are fp32, and small steps count.

    The figure counts tensors of another type, and matrices of which a step of 1e-6 leaves most entries where they
    were, as bf16 weights would. Bound: none.
    """
    torch.manual_seed(0)
    config = small_config(vocab_size=257, value_dim=8)
    model = DecoderLM(config).to(device)
    optimizer = make_optimizer(model, OptimizerSection(learning_rate=1e-6, weight_decay=0.0))
    tokens = torch.randint(config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, tokens.roll(-1, 1), None, (), 0, (0,), tokens.numel())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    products: list[torch.dtype] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: products.append(output.dtype))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "gate" not in name
    ]
    with _folder() as folder:
        TrainStep(model, optimizer, device, TrainSection(precision="bf16")).run(1, [batch], phases=Heartbeat(folder))
    for hook in hooks:
        hook.remove()
    wrong = [f"product in {dtype}" for dtype in products if dtype != torch.bfloat16]
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors = {"weight": parameter, "gradient": parameter.grad, **state}
        wrong += [f"{kind} of {name}" for kind, x in tensors.items() if x is None or x.dtype != torch.float32]
        used = parameter.grad is not None and (parameter.grad != 0)
        if parameter.ndim > 1 and isinstance(used, Tensor):
            moved = (parameter != before[name])[used]
            if moved.float().mean() < 0.5:
                wrong.append(f"a step of 1e-6 does not move {name}")
    details = (f"{len(before)} parameters, {len(products)} products", *wrong[:4])
    return Measurement(len(wrong), 0, "tensors", details)


def parallel_gradients(device: torch.device) -> Measurement:
    """Two processes under DDP, FSDP2 and hybrid sharding compute the gradient of one, for every parameter; with rows of
    their own, and where they share each row.

    The figure is the worst difference, relative to the largest entry of its gradient; infinite where a gradient differs
    by a bit between the processes. Bound: 64 roundings of fp32. The reported cases stand below by name.
    """
    found = compare_processes(PARALLEL_CASES, device)
    # The largest comes first, and a NaN before any number.
    ranked = sorted(zip(found, PARALLEL_CASES, strict=True), key=lambda row: (row[0][0] == row[0][0], -row[0][0]))
    (figure, name), case = ranked[0]
    place = f"{PROCESSES} GPUs over NCCL" if _over_nccl(device) else f"{PROCESSES} processes on the CPU over gloo"
    reported = [
        f"{case.name}: {difference:.2g}"
        for (difference, _), case in zip(found, PARALLEL_CASES, strict=True)
        if case.num_layers in REPORTED_LAYERS
    ]
    detail = f"{len(PARALLEL_CASES)} cases, {place}; worst: {name} ({case.name})"
    return Measurement(figure, GRADIENT_BOUND, "difference", (detail, *reported))


def compare_processes(cases: Sequence[Case], device: torch.device) -> list[tuple[float, str]]:
    """Start the processes, on GPUs where there are enough: a figure and a parameter's name for each case."""
    kind = "cuda" if _over_nccl(device) else "cpu"
    with tempfile.TemporaryDirectory(prefix="trifocal-check-") as folder:
        path = Path(folder) / "found.json"
        fields = [dataclasses.asdict(case) for case in cases]
        code = f"from trifocal.checks.process_worker import main; main({kind!r}, {fields!r}, {str(path)!r})"
        run_processes(["-c", code], PROCESSES, Path(folder), limit_seconds=_LIMIT_SECONDS)
        return [(float(figure), name) for figure, name in json.loads(path.read_text(encoding="utf-8"))]


def _over_nccl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.device_count() >= PROCESSES


def _finish(start: Callable[..., TrainResult], *arguments: Any, **options: Any) -> None:
    """Train to the end; the trainer answers a signal by stopping after its step, and then the check ends too."""
    if start(*arguments, **options).stop_requested:
        raise KeyboardInterrupt


def _config(
    directory: Path, device: torch.device, model: ModelConfig, data: DataConfig, train: TrainSection, saved_steps: int
) -> RunConfig:
    """A run of a small model, without evaluations; each step has a row in the metrics."""
    settings = {
        "run.directory": str(directory),
        "run.device": device.type,
        "optimizer.learning_rate": 1e-2,
        "optimizer.weight_decay": 0.0,
        "schedule.warmup_steps": 2,
        "schedule.minimum_factor": 1.0,
        "checkpoint.interval_steps": saved_steps,
        "evaluate.interval_steps": 0,
        "log.interval_steps": 1,
    }
    return override(RunConfig(model=model, data=data, train=train), settings)


def _write_documents(folder: Path) -> None:
    """Twelve short texts of different lengths, some shorter than a row, some longer."""
    folder.mkdir()
    words = random.Random(0)
    for number in range(12):
        text = " ".join(str(words.randrange(10000)) for _ in range(5 + 7 * number))
        (folder / f"{number:02}.txt").write_text(text + "\n", encoding="utf-8")


def _final_state(directory: Path) -> dict[str, Any]:
    """Everything that the last checkpoint holds, by name, and the losses."""
    path = checkpoint_path(directory / "checkpoints", RESUME_STEPS)
    states: dict[str, Any] = json.loads((path / "rank0.json").read_text(encoding="utf-8"))
    for file in (path / "weights").glob("*.safetensors"):
        states |= {name: (tensor.dtype, tensor.tolist()) for name, tensor in load_file(file).items()}
    return {**states, "losses": [row["loss"] for row in read_metrics(directory / "metrics.jsonl", "train")]}


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder; meanwhile standard output is not shown."""
    with tempfile.TemporaryDirectory(prefix="trifocal-check-") as name, contextlib.redirect_stdout(io.StringIO()):
        yield Path(name)


@contextlib.contextmanager
def _drawing_from_every_generator() -> Iterator[None]:
    """Let every forward pass of a model draw from Python's, NumPy's and PyTorch's generators."""

    def draw(module: nn.Module, _inputs: object) -> None:
        if isinstance(module, DecoderLM):
            random.random()
            np.random.random()
            torch.rand(())
            if torch.cuda.is_available():
                torch.rand((), device="cuda")

    hook = nn.modules.module.register_module_forward_pre_hook(draw)
    try:
        yield
    finally:
        hook.remove()
