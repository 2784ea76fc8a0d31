"""The configuration of a run: one section a component, each a dataclass that checks itself.

Values come from three places, later ones winning: the defaults here, a TOML file, `--section.field value` flags.
A run saves its resolved configuration as `config.toml` in its directory; loading it gives an equal one.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from trifocal.data import DataConfig
from trifocal.fields import check_at_least, check_seconds, check_types
from trifocal.models import ModelConfig
from trifocal.paths import expand_path
from trifocal.runlog.sinks import SINKS
from trifocal.runlog.traces.tracer import TRACES

MAX_TRACED_STEPS = 100
"""Traces that keep data of every step are limited to this many steps."""
# Digits of a number that fits 64 bits.
_MAX_DIGITS = 18


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _count(text: str) -> int:
    """Parse a number of steps or layers; -1 if the text is no such number."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else -1


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Folder, device and seed of the run."""

    directory: str = "runs/unnamed"
    """Folder of everything that the run writes, `~` for the home folder; refused if it holds a run already."""
    seed: int = 1337
    """Seed of the initial weights and of every random choice of the trainer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto" takes a GPU if there is one."""
    deterministic: bool = False
    """Only operations that are deterministic on a GPU too: some are slower, and one without such a form raises. On a
    CPU, a number of threads that does not follow the load."""

    def __post_init__(self) -> None:
        check_types(self, "run")
        _require(bool(self.directory.strip()), "run.directory must name a folder, got an empty string")
        object.__setattr__(self, "directory", str(expand_path(self.directory, "run.directory")))
        _require(0 <= self.seed < 2**63, f"run.seed must lie in [0, 2^63), got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """Number of steps, batch sizes, precision, compilation."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    sequence_length: int = 128
    """Tokens in a training sequence."""
    global_batch_size: int = 8
    """Sequences in one optimizer step, over all micro-batches and processes."""
    micro_batch_size: int = 8
    """Sequences in one forward and backward pass, at most: the largest number up to it that divides the sequences of a
    process. The rest is accumulated."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the matrix products; the weights and the optimizer are fp32 either way."""
    activation_checkpointing: str = "none"
    """Layers that recompute their activations in backward: "none", "all", or a half-open range like "0:6"."""
    compile: bool = False
    """Compile the layers with torch.compile: a slower start, faster steps."""
    cuda_graphs: bool = False
    """Record a micro-batch's forward and backward once and replay them: small batches are no longer bound by the host.
    For GPUs; elsewhere it has no effect, and a note is logged. Under ddp, gradients are then exchanged after backward,
    not during it; under fsdp and hsdp, with every micro-batch."""
    gradient_clip_norm: float = 1.0
    """Largest norm of the whole gradient; longer ones are scaled down to it. 0 turns clipping off."""
    choice_loss_weight: float | Literal["auto"] = "auto"
    """Weight of the loss that teaches the choice of blocks to follow the selected branch's attention over the whole
    past; it reaches what chooses, and nothing else. 0 turns it off; "auto" is 1 where an index chooses, which learns
    from nothing else, and 0 elsewhere."""
    choice_loss_sample: float = 0.015625
    """Share of the queries that this loss looks at, new ones in each step."""
    only: Literal["all", "chooser"] = "all"
    """What is trained: "all"; or "chooser", the index that chooses blocks, with everything else frozen: for a short
    while after a conversion."""

    def __post_init__(self) -> None:
        check_types(self, "train")
        check_at_least(self, "train", steps=1, sequence_length=1, global_batch_size=1, micro_batch_size=1)
        check_at_least(self, "train", gradient_clip_norm=0)
        if self.choice_loss_weight != "auto":
            check_at_least(self, "train", choice_loss_weight=0)
        _require(
            0 < self.choice_loss_sample <= 1,
            f"train.choice_loss_sample must lie in (0, 1], got {self.choice_loss_sample}; to teach nothing, set "
            "train.choice_loss_weight to 0",
        )
        self.checkpointed_layers(0)

    def choice_weight(self, model: ModelConfig) -> float:
        """The weight of the choice's loss for a model, `choice_loss_weight` with "auto" resolved."""
        return float(model.has_index) if self.choice_loss_weight == "auto" else self.choice_loss_weight

    @property
    def choice_loss_stretch(self) -> int:
        """One query of this many is sampled."""
        return min(self.sequence_length, max(1, round(1 / self.choice_loss_sample)))

    def sequences_at_once(self, num_groups: int) -> int:
        """Sequences in one forward and backward pass of each of `num_groups`, from `ParallelSection.groups`; they
        divide the global batch.
        """
        share = self.global_batch_size // num_groups
        return next(size for size in range(min(share, self.micro_batch_size), 0, -1) if share % size == 0)

    @property
    def evaluated_at_once(self) -> int:
        """Sequences in a batch of an evaluation, at most: what one process would take of a step."""
        return min(self.micro_batch_size, self.global_batch_size)

    def checkpointed_layers(self, num_layers: int) -> tuple[int, int]:
        """The half-open range of layers that `activation_checkpointing` names; ValueError if it is none of its three
        forms.
        """
        if self.activation_checkpointing == "none":
            return 0, 0
        if self.activation_checkpointing == "all":
            return 0, num_layers
        first, last = map(_count, self.activation_checkpointing.partition(":")[::2])
        _require(
            0 <= first < last,
            'train.activation_checkpointing must be "none", "all" or a range of layers like "0:6", '
            f'got "{self.activation_checkpointing}"',
        )
        return first, last


@dataclass(frozen=True, kw_only=True)
class DistillSection:
    """A frozen model whose next-token distribution is learned, instead of or beside the text."""

    from_: Annotated[str, tyro.conf.arg(name="from")] = ""
    """The frozen model: a dense folder of Hugging Face, a folder of weights, a run or a checkpoint; of the same
    vocabulary. Each process has all of it, in the type of its files. Empty: the text is learned."""
    text_weight: float = 0.0
    """Weight of the loss on the text beside the divergence (KL) from the frozen model."""

    def __post_init__(self) -> None:
        check_types(self, "distill")
        check_at_least(self, "distill", text_weight=0)
        _require(bool(self.from_) or not self.text_weight, "distill.text_weight goes with distill.from")


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """The sharing of work between processes; all but `context` are without effect on a single process."""

    mode: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """"ddp": every process has the whole model; "fsdp": weights, gradients and optimizer are sharded over all; "hsdp":
    sharded over some and replicated over the rest; "none": one process; "auto": ddp if the model fits, else fsdp."""
    context: int = 1
    """Processes that share each sequence, for sequences that one GPU cannot train, or not fast enough; divides their
    number. Each computes two of the 2 * context equal chunks of a sequence; the keys are exchanged. In any mode."""
    shards: int = 0
    """Processes that share one copy of the model under hsdp; divides their number. 0: those of one machine."""
    reshard_after_forward: bool = True
    """Under fsdp and hsdp, give a block's weights back after its forward pass and collect them again for backward:
    less memory, more traffic."""
    static_graph: bool = False
    """DDP's option: every step uses the same parameters in the same order."""
    timeout_seconds: float = 600.0
    """A process waits for the others for this long; then the run stops."""
    silence_seconds: float = 20.0
    """A process that gives no sign of life for this long is lost, and the others stop."""

    def __post_init__(self) -> None:
        check_types(self, "parallel")
        check_at_least(self, "parallel", shards=0, context=1)
        for name in ("timeout_seconds", "silence_seconds"):
            check_seconds(f"parallel.{name}", getattr(self, name))

    def groups(self, num_processes: int) -> int:
        """Groups of processes with their own rows: the processes themselves, unless they share rows."""
        return num_processes // self.context


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW or Muon. Norms, embeddings, biases and every other vector take no weight decay."""

    kind: Literal["adamw", "muon"] = "adamw"
    """"adamw"; or "muon": the matrices of the layers are trained by Muon, everything else by AdamW."""
    learning_rate: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    beta1: float = 0.9
    """Decay of the running mean of the gradient."""
    beta2: float = 0.95
    """Decay of the running mean of its square."""
    epsilon: float = 1e-8
    """Added to the root of that square."""
    momentum: float = 0.95
    """Decay of Muon's running mean of the gradient; without Muon it has no effect."""
    weight_decay: float = 0.01
    """Decoupled weight decay, times the learning rate, on matrices only."""
    adamw_lr_factor: float = 1.0
    """Learning rate of what AdamW trains beside Muon, as a multiple of Muon's; without Muon it has no effect."""
    index_lr_factor: float = 3.0
    """Learning rate of the index heads, as a multiple of AdamW's for all else; without an index it has no effect."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        for name in ("learning_rate", "epsilon", "adamw_lr_factor", "index_lr_factor"):
            value = getattr(self, name)
            _require(value > 0, f"optimizer.{name} must be positive, got {value}")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name} must lie in [0, 1), got {value}")
        check_at_least(self, "optimizer", weight_decay=0)


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """Linear warm-up, then a decline to a floor that is reached in the last step."""

    kind: Literal["cosine", "wsd"] = "cosine"
    """"cosine": the decline begins after the warm-up; "wsd": the rate stays at the peak, and declines linearly over the
    last `decay_fraction` of the steps. A run can be prolonged from a step before; the last one's checkpoint is kept."""
    warmup_steps: int = 100
    """Steps of linear warm-up from zero; the last of them has the peak learning rate. 0 starts at the peak."""
    minimum_factor: float = 0.1
    """Floor, as a share of the peak learning rate."""
    decay_fraction: float = 0.2
    """Share of the run's steps in which "wsd" declines; under "cosine" it has no effect."""

    def __post_init__(self) -> None:
        check_types(self, "schedule")
        check_at_least(self, "schedule", warmup_steps=0)
        _require(
            0 <= self.minimum_factor <= 1, f"schedule.minimum_factor must lie in [0, 1], got {self.minimum_factor}"
        )
        _require(0 < self.decay_fraction <= 1, f"schedule.decay_fraction must lie in (0, 1], got {self.decay_fraction}")


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When checkpoints are saved, and which are kept. The last step and an interruption always save."""

    interval_steps: int = 500
    """Steps between checkpoints; 0 saves only at the end and on an interruption."""
    asynchronous: bool = False
    """Copy everything to the host's memory and write it while training continues; the last save is waited for."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_every_steps: int = 0
    """Checkpoints of steps divisible by this are kept for good; 0 keeps none beyond the newest."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        check_at_least(self, "checkpoint", interval_steps=0, keep_last=1, keep_every_steps=0)


@dataclass(frozen=True, kw_only=True)
class EvaluateSection:
    """Loss on validation documents, which training never sees."""

    interval_steps: int = 500
    """Steps between evaluations; 0 turns them off. The last step always evaluates otherwise."""
    sequences: int = 128
    """Sequences in one evaluation: always the same ones, whatever the seeds, the batch sizes and the number of
    processes."""

    def __post_init__(self) -> None:
        check_types(self, "evaluate")
        check_at_least(self, "evaluate", interval_steps=0, sequences=1)


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """Metrics, samples and other output of the run."""

    interval_steps: int = 10
    """Steps between rows of metrics.jsonl."""
    sample_interval_steps: int = 0
    """Steps between samples, written to samples/; 0 turns them off. The last step always samples otherwise."""
    sample_prompt: str = "def "
    """Text that a sample continues."""
    sample_tokens: int = 200
    """New tokens in a sample."""
    telemetry_interval_steps: int = 100
    """Steps between measurements of gates and chosen blocks, on one sequence; 0 turns them off."""
    heartbeat_seconds: float = 5.0
    """Time between rows of the heartbeat."""
    sinks: str = ""
    """Further destinations of the metrics, separated by commas: "tensorboard", "wandb"; each needs the extra of its
    name."""
    project: str = "trifocal"
    """Project under which wandb files the run."""

    def __post_init__(self) -> None:
        check_types(self, "log")
        check_at_least(
            self, "log", interval_steps=1, sample_interval_steps=0, sample_tokens=1, telemetry_interval_steps=0
        )
        _require(bool(self.sample_prompt), "log.sample_prompt must not be empty")
        for name in self.sink_names():
            _require(name in SINKS, f'log.sinks must name some of {", ".join(SINKS)}, got "{name}"')
        _require(bool(self.project.strip()), "log.project must not be empty")
        check_seconds("log.heartbeat_seconds", self.heartbeat_seconds)

    def sink_names(self) -> list[str]:
        """The parts of `sinks`, each once."""
        return _parts(self.sinks)


@dataclass(frozen=True, kw_only=True)
class TraceSection:
    """Detailed records of some steps, written to traces/ in the run's folder; off if `what` is empty."""

    what: str = ""
    """The records, separated by commas: "gradients", "modules", "exchange", "dtypes", "memory", "profiler"."""
    steps: str = "10:13"
    """Steps to trace: half-open ranges like "10:13", separated by commas; steps count from 1."""
    interval_steps: int = 0
    """Also trace each step that this number divides, in its own folder; 0 traces only those of `steps`."""

    def __post_init__(self) -> None:
        check_types(self, "trace")
        check_at_least(self, "trace", interval_steps=0)
        names = self.names()
        for name in names:
            _require(name in TRACES, f'trace.what must name some of {", ".join(TRACES)}, got "{name}"')
        for first, end in self.windows():
            _require(
                not names or end - first <= MAX_TRACED_STEPS,
                f"trace.steps: {first}:{end} are {end - first} steps; {', '.join(names)} can record "
                f"{MAX_TRACED_STEPS} at once",
            )

    def names(self) -> list[str]:
        """The parts of `what`, each once."""
        return _parts(self.what)

    def windows(self) -> list[tuple[int, int]]:
        """The ranges of `steps`: the first step, and the one after the last; none where it is empty. ValueError if they
        are not in this form, or not in order.
        """
        found: list[tuple[int, int]] = []
        if not self.steps.strip():
            return found
        for part in self.steps.split(","):
            first, _, end = part.strip().partition(":")
            bounds = _count(first), _count(end)
            _require(
                0 < bounds[0] < bounds[1] and (not found or found[-1][1] <= bounds[0]),
                'trace.steps must be ranges of steps, which count from 1, in order, like "10:13" or "10:13, 500:501", '
                f'got "{self.steps}"',
            )
            found.append(bounds)
        return found


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a training run."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainSection = field(default_factory=TrainSection)
    distill: DistillSection = field(default_factory=DistillSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    log: LogSection = field(default_factory=LogSection)
    trace: TraceSection = field(default_factory=TraceSection)
