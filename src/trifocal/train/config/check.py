"""Checks before a run: configurations that must fail are refused before any work; doubtful ones get a note."""

import os
import platform
import shutil
from pathlib import Path

import torch

from trifocal.data import Tokenizer, make_tokenizer
from trifocal.errors import UserError
from trifocal.fields import dotted_fields, value_of
from trifocal.models.decoder import meta_model
from trifocal.ops.devices import computes_bf16
from trifocal.paths import MAX_TOML_BYTES
from trifocal.runlog.sinks import check_sinks
from trifocal.runlog.traces.tracer import HOOKED, INSIDE_LAYERS
from trifocal.train.checkpoint.folders import list_checkpoints
from trifocal.train.config.sections import RunConfig
from trifocal.train.config.toml import to_literal, to_toml
from trifocal.train.step.optimizer import freeze, make_optimizer
from trifocal.train.step.schedule import change_step

LONG_RUN_STEPS = 1000
"""A run of more steps than this must save checkpoints on the way."""


def choose_device(wanted: str | torch.device) -> torch.device:
    """The device that `run.device` or `--device` names: "auto", "cpu" or "cuda"; UserError if there is none of it."""
    wanted = str(wanted)
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f'the device must be "auto", "cpu" or "cuda", got {wanted!r}')
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError('the device is to be "cuda", but PyTorch sees no GPU here; use "cpu" or "auto"')
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def preflight(
    config: RunConfig, device: torch.device, num_processes: int = 1, *, begins: bool = True
) -> tuple[Tokenizer, list[str]]:
    """Check that the parts of a configuration fit one another and this machine; UserError, with the fields to change,
    if the run, which `begins` or continues, would fail. Returns the tokenizer, and notes on settings that are valid but
    doubtful.
    """
    tokenizer = make_tokenizer(config.data.tokenizer, separator=config.data.separator)
    _check_context(config, num_processes)
    _check_batches(config, config.parallel.groups(num_processes))
    _check_saving(config)
    _check_size(config)
    _check_text(config, tokenizer)
    _check_change(config)
    _check_precision(config, device)
    _check_layers(config)
    _check_choice_loss(config)
    _check_backend(config, device)
    _check_compiler(config)
    _check_disk(config, begins=begins)
    check_sinks(config.log.sink_names())
    _check_traces(config)
    return tokenizer, _notes(config)


def _check_context(config: RunConfig, num_processes: int) -> None:
    context, length = config.parallel.context, config.train.sequence_length
    if num_processes % context:
        started = "1 process was" if num_processes == 1 else f"{num_processes} processes were"
        raise UserError(
            f"parallel.context is {context}, and {started} started; start a multiple of {context} "
            f"(torchrun --nproc-per-node={context}), or set --parallel.context 1"
        )
    chunks = 2 * context
    if context > 1 and length % chunks:
        raise UserError(
            f"train.sequence_length {length} does not cut into the {chunks} equal chunks of parallel.context "
            f"{context}; the next length that does is --train.sequence_length {-(-length // chunks) * chunks}"
        )


def _check_batches(config: RunConfig, num_groups: int) -> None:
    """Check that the batch can be shared out among groups of processes, each with its own rows."""
    whole, context = config.train.global_batch_size, config.parallel.context
    if whole % num_groups:
        groups = "processes" if context == 1 else f"groups of {context} processes"
        raise UserError(
            f"train.global_batch_size {whole} is not a multiple of {num_groups} {groups}; the next one "
            f"is --train.global_batch_size {-(-whole // num_groups) * num_groups}"
        )


def _check_saving(config: RunConfig) -> None:
    steps, interval = config.train.steps, config.checkpoint.interval_steps
    if steps > LONG_RUN_STEPS and (interval == 0 or interval >= steps):
        raise UserError(
            f"checkpoint.interval_steps is {interval}: a run of {steps} steps would lose everything in a crash; "
            f"save at least once on the way (runs of up to {LONG_RUN_STEPS} steps need not)"
        )


def _check_size(config: RunConfig) -> None:
    """Check that the run's `config.toml` can be read again: flags may be longer than a file."""
    size = len(to_toml(config).encode())
    if size > MAX_TOML_BYTES:
        longest = max(dotted_fields(RunConfig), key=lambda name: len(to_literal(value_of(config, name))))
        raise UserError(
            f"the configuration takes {size:,} bytes, and a run reads its config.toml up to {MAX_TOML_BYTES:,}; "
            f"shorten {longest}" + (", by a folder or a glob in place of many files" if "source" in longest else "")
        )


def _check_text(config: RunConfig, tokenizer: Tokenizer) -> None:
    if not config.data.has_text:
        if config.log.sample_interval_steps:
            raise UserError(
                f'data.source is "{config.data.name}": there is no text to sample; set log.sample_interval_steps to 0'
            )
        return
    if config.model.vocab_size < tokenizer.vocab_size:
        advice = f"set it to at least {tokenizer.vocab_size}"
        if config.model.from_:
            advice = f"name the tokenizer of {config.model.from_} with --data.tokenizer"
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the {tokenizer.vocab_size} tokens of "
            f'data.tokenizer "{config.data.tokenizer}"; {advice}'
        )
    # A data set may have a split for it.
    has_splits = all(part.parsed.kind == "hf" for part in config.data.parts)
    if config.evaluate.interval_steps and config.data.validation_fraction == 0 and not has_splits:
        raise UserError(
            "data.validation_fraction is 0, so there is nothing to evaluate on; raise it, or set "
            "evaluate.interval_steps to 0"
        )
    if config.log.sample_interval_steps and config.model.undecodable:
        raise UserError(f"{config.model.undecodable}: there is nothing to sample; set log.sample_interval_steps to 0")


def _check_change(config: RunConfig) -> None:
    step, last = change_step(config), config.train.steps
    if config.data.weights_after and not 0 < step < last:
        declines = config.schedule.kind == "wsd"
        raise UserError(
            f"data.weights_after needs a change within the run of {last} steps: set data.change_step above 0 and below "
            f"{last}, now {config.data.change_step}, or "
            + ("lower schedule.decay_fraction" if declines else 'schedule.kind to "wsd"')
        )


def _check_choice_loss(config: RunConfig) -> None:
    model = config.model
    weight = config.train.choice_weight(model)
    if weight and model.untaught_choice:
        raise UserError(f"train.choice_loss_weight is {weight:g}, but {model.untaught_choice}; set it to 0")
    if model.has_index and not weight:
        raise UserError(
            'model.chooser "index" learns only from the loss of the choice; set train.choice_loss_weight above 0, '
            'or model.chooser to "compressed"'
        )
    if config.train.only != "chooser":
        return
    if not model.has_index:
        why = 'the model has none; set model.chooser to "index"' if model.chooses_blocks else "no layer chooses blocks"
        raise UserError(f'train.only "chooser" trains only the index, and {why}')
    length, covered = config.train.sequence_length, model.geometry.selected_tokens
    if length <= covered:
        raise UserError(
            f'train.only "chooser" has nothing to learn: the blocks cover all {length} tokens of '
            f"train.sequence_length; it needs several times {covered}, such as --train.sequence_length {4 * covered}"
        )
    if config.distill.from_:
        raise UserError(
            'train.only is "chooser": only its loss teaches the index, and nothing else learns; leave distill.from out'
        )


def _check_precision(config: RunConfig, device: torch.device) -> None:
    if config.train.precision != "bf16":
        return
    if device.type == "cuda":
        name, supported = torch.cuda.get_device_name(device), torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        name, supported = f"this CPU ({platform.machine()})", computes_bf16(device)
    if not supported:
        raise UserError(f'train.precision is "bf16", but {name} has no bf16 arithmetic; use --train.precision fp32')


def _check_layers(config: RunConfig) -> None:
    layers = config.model.num_layers
    _, last = config.train.checkpointed_layers(layers)
    if last > layers:
        raise UserError(
            f'train.activation_checkpointing is "{config.train.activation_checkpointing}", but the model has '
            f"{layers} layers"
        )


def _check_backend(config: RunConfig, device: torch.device) -> None:
    model = config.model
    if set(model.attention_of_layers) == {"dense"} or model.backend == "auto":
        return
    try:
        model.resolved_backend("preflight", config.train.precision, device)
    except ValueError as error:
        raise UserError(f'model.backend is "{model.backend}": {error}; use "auto" or "reference"') from error


def compilers() -> list[str]:
    """C and C++ compilers that PyTorch's compiler and Triton would find."""
    wanted = [os.environ.get("CXX", ""), os.environ.get("CC", ""), "g++", "gcc", "clang++", "clang"]
    return [found for name in wanted if name and (found := shutil.which(name))]


def _check_compiler(config: RunConfig) -> None:
    if config.train.compile and not compilers():
        raise UserError("train.compile needs a C++ compiler, and this machine has none; use --train.compile false")


def _check_traces(config: RunConfig) -> None:
    names = config.trace.names()
    for setting, hidden in (("compile", INSIDE_LAYERS), ("cuda_graphs", HOOKED)):
        lost = [name for name in names if name in hidden]
        if lost and getattr(config.train, setting):
            raise UserError(
                f"trace.what: {', '.join(lost)} would see nothing with train.{setting}; trace with "
                f"--train.{setting} false"
            )


def existing_folder(folder: Path) -> Path:
    """The folder itself, or the nearest parent that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _check_disk(config: RunConfig, *, begins: bool) -> None:
    folder = Path(config.run.directory)
    existing = existing_folder(folder)
    # A resumed run writes into the second.
    for place in (existing, folder / "checkpoints"):
        if place.exists() and not os.access(place, os.W_OK):
            raise UserError(f"run.directory {folder}: no permission to write in {place}")
    # A new run leaves those of an earlier one where they are, and the first of any run comes beside what is there.
    found = [] if begins else list_checkpoints(folder / "checkpoints")
    there = sum(file.stat().st_size for path in found for file in path.rglob("*") if file.is_file())
    one = state_bytes(config)[0]
    needed = max(_checkpoints_at_once(config) * one - there, one)
    free = shutil.disk_usage(existing).free
    if needed > free:
        saving = config.checkpoint
        fewer = ", or keep fewer (checkpoint.keep_last, checkpoint.keep_every_steps)"
        raise UserError(
            f"the checkpoints need {needed / 1e9:.3g} GB, and {existing} has {free / 1e9:.3g} GB free; make room there"
            + (fewer if needed > one and (saving.keep_last > 1 or saving.keep_every_steps) else "")
        )


def disk_bytes(config: RunConfig) -> int:
    """The most disk space that checkpoints of a run take at once, including one that is being written."""
    return _checkpoints_at_once(config) * state_bytes(config)[0]


def _checkpoints_at_once(config: RunConfig) -> int:
    steps, saving = config.train.steps, config.checkpoint
    saves = steps // saving.interval_steps + 1 if saving.interval_steps else 1
    kept = min(saving.keep_last, saves) + 1
    if config.schedule.kind == "wsd":
        kept += 1
    if saving.keep_every_steps:
        kept += steps // saving.keep_every_steps
    return kept


def state_bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes of what a checkpoint has, weights and the optimizer's moments, and of the gradients beside; all fp32."""
    model = meta_model(config.model)
    freeze(model, config.train.only)
    numbers = trained = 0
    for group in make_optimizer(model, config.optimizer).param_groups:
        size = sum(parameter.numel() for parameter in group["params"])
        # Muon has one moment, AdamW two.
        numbers += size * (1 if "momentum" in group else 2)
        trained += size
    return 4 * (numbers + sum(parameter.numel() for parameter in model.parameters())), 4 * trained


def _notes(config: RunConfig) -> list[str]:
    length, geometry = config.train.sequence_length, config.model.geometry
    if not config.model.chooses_blocks or length > geometry.selected_tokens:
        return []
    return [
        f"{geometry.num_selected_blocks} selected blocks of {geometry.selection_block_size} tokens cover the whole "
        f"sequence of {length}: every block is selected"
    ]
