"""The needs of a configuration on this machine: memory by formula, time by estimate, and the changes that help."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from trifocal.distributed import Processes, choose_mode
from trifocal.doctor.machine import available_memory, installed
from trifocal.errors import UserError, one_line
from trifocal.generate.paged_cache import cache_bytes, memory_for_caches, sequences_that_fit
from trifocal.models import Memory, TrainingSetup, computed_flops_per_token, parameter_count, training_memory
from trifocal.runlog.hardware import matmul_rate
from trifocal.runlog.memory_statistics import resident_bytes
from trifocal.train.preflight import attention_backend, choose_device, disk_bytes, preflight
from trifocal.train.run_config import RunConfig

# Of the free memory. The formula leaves out the rest: the driver and fragmentation above all.
USABLE_SHARE = 0.92
# Share of the speed of large products at which a step computes: 0.13 on an H200 (8 sequences of the production model
# in 133 ms), 0.2 to 0.6 on one core of a CPU (presets of one to five layers). Small products, norms, masks and the
# optimizer take the rest. Of use to one digit.
EFFICIENCY = {"cuda": 0.13, "cpu": 0.3}
# cuBLAS keeps a buffer for each thread that multiplies, forward and backward: larger from Hopper on.
_CUBLAS_BYTES = {True: 2 * 32 * 2**20, False: 2 * 8 * 2**20}
_MOST_PROCESSES = 1024
_SHORTEST_ADVISED = 128
DECODED_LENGTHS = (8192, 65536)
"""Lengths of the sequences whose caches are counted."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that needs are compared with.

    Attributes:
        device: Where training would run.
        processes: Devices of that kind.
        available_bytes: Free memory of the fullest of them; None if unknown.
        rates: Speed of large products by precision, FLOP/s, measured here.
        workspace_bytes: Memory of libraries, or on a CPU of the process itself.
    """

    device: torch.device
    processes: int
    available_bytes: int | None
    rates: dict[str, float]
    workspace_bytes: int

    @classmethod
    def here(cls, rates: dict[str, float]) -> "Machine":
        """This machine."""
        if not torch.cuda.is_available():
            return cls.cpu(rates)
        count = torch.cuda.device_count()
        # Memory that earlier probes have left.
        torch.cuda.empty_cache()
        free = min(torch.cuda.mem_get_info(index)[0] for index in range(count))
        hopper = torch.cuda.get_device_capability() >= (9, 0)
        return cls(
            device=torch.device("cuda"),
            processes=count,
            available_bytes=free,
            rates=rates,
            workspace_bytes=_CUBLAS_BYTES[hopper],
        )

    @classmethod
    def cpu(cls, rates: dict[str, float]) -> "Machine":
        """The CPU of this machine, with or without GPUs."""
        own, available = resident_bytes(), available_memory()
        return cls(
            device=torch.device("cpu"),
            processes=1,
            available_bytes=None if available is None else available + own,
            rates=rates,
            workspace_bytes=own,
        )


@dataclass(frozen=True, kw_only=True)
class Need:
    """The needs of one configuration here.

    Attributes:
        name: Of the file.
        parameters: Of the model.
        processes: That would train together.
        mode: Their parallel mode.
        backend: The backend of the attention; "dense" for a dense model.
        memory: Of the fullest device, by formula.
        available_bytes: Free memory of that device.
        fits: Whether the memory fits; None if the free memory is unknown.
        step_seconds: An estimate from computed FLOPs; None where the speed of products is unknown.
        tokens_per_step: Of all processes together.
        run_seconds: The estimate for all steps.
        disk_bytes: Of checkpoints, at most at a time.
        cache_token_bytes: Of the caches in `trifocal generate`, for a token of a sequence, all layers together.
        cached_sequences: Number of sequences of each of `DECODED_LENGTHS` that fit on one device beside the model; None
            if its memory is unknown.
        problem: The reason why the run would be refused; empty if it would not.
        remedy: The command or the flags that mend that.
        advice: The flags that make it fit; empty if it does.
    """

    name: str
    parameters: int
    processes: int
    mode: str
    backend: str
    memory: Memory
    available_bytes: int | None
    fits: bool | None
    step_seconds: float | None
    tokens_per_step: int
    run_seconds: float | None
    disk_bytes: int
    cache_token_bytes: int
    cached_sequences: tuple[int, ...] | None
    problem: str = ""
    remedy: str = ""
    advice: str = ""


def need_of(name: str, config: RunConfig, machine: Machine) -> Need:
    """Work out one configuration.

    Args:
        name: Its name.
        config: The configuration.
        machine: This machine.
    """
    device = machine.device if config.run.device == "auto" else torch.device(config.run.device)
    if device.type != machine.device.type:
        machine = Machine.cpu({kind: matmul_rate(torch.device("cpu"), kind, 0.1) for kind in machine.rates})
    processes = _processes(config, machine)
    setup = setup_of(config, machine, processes)
    memory = training_memory(config.model, setup)
    usable = None if machine.available_bytes is None else int(machine.available_bytes * USABLE_SHARE)
    fits = None if usable is None else memory.total <= usable
    seconds = _step_seconds(config, setup, machine)
    problem, remedy = _refusal(config, machine, processes)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    caches = cache_bytes(config.model, dtype, max(DECODED_LENGTHS))
    return Need(
        name=name,
        parameters=parameter_count(config.model),
        processes=processes,
        mode=setup.mode,
        backend="dense" if config.model.all_dense else setup.backend,
        memory=memory,
        available_bytes=machine.available_bytes,
        fits=fits,
        step_seconds=seconds,
        tokens_per_step=config.train.global_batch_size * config.train.sequence_length,
        run_seconds=None if seconds is None else seconds * config.train.steps,
        disk_bytes=disk_bytes(config),
        cache_token_bytes=caches.page // caches.page_size,
        cached_sequences=_cached_sequences(config, dtype, machine),
        problem=problem,
        remedy=remedy,
        advice=advice(config, machine, usable) if usable is not None and not fits else "",
    )


def _cached_sequences(config: RunConfig, dtype: torch.dtype, machine: Machine) -> tuple[int, ...] | None:
    """As `trifocal generate` works it out, which runs on one device."""
    if machine.available_bytes is None:
        return None
    free = memory_for_caches(config.model, dtype, machine.device, machine.available_bytes)
    return tuple(sequences_that_fit(config.model, dtype, length, free) for length in DECODED_LENGTHS)


def setup_of(config: RunConfig, machine: Machine, processes: int, mode: str = "") -> TrainingSetup:
    """The training of a configuration, as the memory formula takes it.

    Args:
        config: The configuration.
        machine: This machine.
        processes: That train together.
        mode: Parallel mode, in place of the configuration's.
    """
    train, parallel = config.train, config.parallel
    group = Processes(size=processes, local_size=processes, device=machine.device)
    if not mode:
        mode = choose_mode(parallel.mode, group, config.model)[0] if processes > 1 else "none"
    shards = {"fsdp": processes, "hsdp": parallel.shards or processes}.get(mode, 1)
    return TrainingSetup(
        sequence_length=train.sequence_length,
        micro_batch_size=train.micro_batch_size,
        micro_batches=max(1, train.global_batch_size // (train.micro_batch_size * processes)),
        precision=train.precision,
        checkpointed_layers=train.checkpointed_layers(config.model.num_layers),
        compiled=train.compile,
        device=machine.device.type,  # type: ignore[arg-type]
        backend=_backend(config, machine.device),  # type: ignore[arg-type]
        # Rows of random tokens and of recall are whole; others are packed where a border falls into one.
        packed=config.data.source.partition(":")[0] not in ("synthetic", "recall") and train.micro_batch_size > 1,
        mode=mode,  # type: ignore[arg-type]
        shards=shards,
        reshard_after_forward=parallel.reshard_after_forward,
        cuda_graphs=train.cuda_graphs and machine.device.type == "cuda",
        workspace_bytes=machine.workspace_bytes,
    )


def advice(config: RunConfig, machine: Machine, usable: int) -> str:
    """The smallest change that makes a configuration fit, as flags for `trifocal train`.

    First changes that leave the result as it is: smaller micro-batches, recomputed activations, sharding over this
    machine's GPUs, or over as many as it takes. Then shorter sequences.

    Args:
        config: A configuration that does not fit.
        machine: This machine.
        usable: Bytes that a device may take.
    """

    def fits(candidate: RunConfig, processes: int, mode: str = "") -> bool:
        return training_memory(candidate.model, setup_of(candidate, machine, processes, mode)).total <= usable

    smaller = list(_smaller(config))
    for changed, flags in smaller:
        processes = _processes(changed, machine)
        if fits(changed, processes):
            return flags
        if processes > 1 and fits(changed, processes, "fsdp"):
            return f"{flags} --parallel.mode fsdp".strip()
    smallest, flags = smaller[-1]
    if machine.device.type == "cuda":
        processes = 2 * machine.processes
        while processes <= _MOST_PROCESSES:
            if fits(smallest, processes, "fsdp"):
                batch = math.lcm(smallest.train.global_batch_size, processes * smallest.train.micro_batch_size)
                if batch != smallest.train.global_batch_size:
                    flags += f" --train.global_batch_size {batch}"
                return f"{flags} --parallel.mode fsdp on {processes} such GPUs".strip()
            processes *= 2
    length = smallest.train.sequence_length
    while length > _SHORTEST_ADVISED:
        length //= 2
        shorter = replace(smallest, train=replace(smallest.train, sequence_length=length))
        if fits(shorter, _processes(shorter, machine)):
            return f"{flags} --train.sequence_length {length}".strip()
    return "a smaller model, or more memory"


def _smaller(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """The configuration in less memory, at a growing cost of time, and the flags of each step.

    Smaller micro-batches, then recomputed activations as well, from the largest micro-batch on.
    """
    train = config.train
    sizes = [size for size in range(train.micro_batch_size, 0, -1) if train.global_batch_size % size == 0]
    kept = train.activation_checkpointing
    for checkpointing in dict.fromkeys((kept, "all")):
        for size in sizes:
            changed = replace(train, activation_checkpointing=checkpointing, micro_batch_size=size)
            flags = [
                *([f"--train.activation_checkpointing {checkpointing}"] if checkpointing != kept else []),
                *([f"--train.micro_batch_size {size}"] if size != train.micro_batch_size else []),
            ]
            yield replace(config, train=changed), " ".join(flags)


def _processes(config: RunConfig, machine: Machine) -> int:
    """Processes that would share the work here: one a GPU, if the batch can be shared out."""
    whole = config.train.global_batch_size % (config.train.micro_batch_size * machine.processes) == 0
    return machine.processes if config.parallel.mode != "none" and whole else 1


def _backend(config: RunConfig, device: torch.device) -> str:
    if config.model.all_dense:
        return "reference"
    try:
        return attention_backend(config, device)
    except ValueError:
        # Preflight gives the reason; the reference needs no less.
        return "reference"


def _step_seconds(config: RunConfig, setup: TrainingSetup, machine: Machine) -> float | None:
    on_gpu = machine.device.type == "cuda"
    exact = setup.backend == "reference" and not config.model.all_dense
    rate, attention_rate = (machine.rates.get(kind) for kind in (setup.precision, "fp32" if exact else setup.precision))
    if not rate or not attention_rate:
        return None
    # Plain code on a CPU packs only the rows that have a border inside, which are few.
    packed = setup.packed and (on_gpu or config.train.compile)
    length = setup.sequence_length * (setup.micro_batch_size if packed else 1)
    flops = computed_flops_per_token(
        config.model, length, backend=setup.backend, checkpointed_layers=setup.checkpointed_layers
    )
    tokens = setup.micro_batches * setup.micro_batch_size * setup.sequence_length
    return tokens * (flops.matrices / rate + flops.attention / attention_rate) / EFFICIENCY[machine.device.type]


def _refusal(config: RunConfig, machine: Machine, processes: int) -> tuple[str, str]:
    """The reason why the run would not start, and the remedy."""
    kind = config.data.source.partition(":")[0]
    if kind in ("hf", "fineweb-edu", "parquet") and not installed("pyarrow"):
        return f"data.source {kind} needs packages that are not installed", "pip install 'trifocal[data]'"
    try:
        choose_device(config.run.device)
        preflight(config, machine.device, processes)
    except UserError as error:
        text = one_line(error)
        command = re.search(r"pip install '[^']+'|--[a-z_]+\.[a-z_]+ \S+", text)
        return text, command.group() if command else ""
    return "", ""
