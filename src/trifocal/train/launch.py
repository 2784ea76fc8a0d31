"""Starting a run, new or resumed, in every process of it."""

import platform
import shutil
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trifocal._version import __version__
from trifocal.data import Tokenizer
from trifocal.distributed.processes import DistributedContext, processes_started
from trifocal.errors import UserError
from trifocal.fields import dotted_fields, value_of
from trifocal.ops.validation import check_type
from trifocal.paths import shell_path, user_path
from trifocal.runlog import read_metrics
from trifocal.train.checkpoint.folders import checkpoint_path, find_checkpoint, list_checkpoints
from trifocal.train.checkpoint.manifest import MANIFEST, read_manifest
from trifocal.train.config.check import choose_device, preflight
from trifocal.train.config.sections import RunConfig
from trifocal.train.config.toml import to_literal
from trifocal.train.loop import BeforeStep, TrainResult, run_training
from trifocal.train.run_folder import RunLock, create_run_directory, load_run, open_run_directory, read_mark, run_of
from trifocal.train.setup import TrainSetup
from trifocal.train.step.schedule import change_step, last_stable_step, learning_rate


def check_same_start(processes: DistributedContext, config: RunConfig, **further: Any) -> None:
    """Refuse, in every process, a start that differs from rank 0's in configuration, versions or further values."""
    mine = {name: value_of(config, name) for name in dotted_fields(RunConfig)} | further
    mine |= {"trifocal": __version__, "torch": torch.__version__, "python": platform.python_version()}
    starts = processes.gather(mine)
    for rank, other in enumerate(starts):
        for name, value in starts[0].items():
            if other.get(name) != value:
                raise UserError(
                    f"the processes were started differently: {name} is {value!r} in rank 0 and {other.get(name)!r} in "
                    f"rank {rank}; start all of them with the same command, the same code and the same data"
                )


def make_setup(
    config: RunConfig, directory: Path, processes: DistributedContext, tokenizer: Tokenizer, *, begins: bool = True
) -> TrainSetup:
    """The parts of a run, as of `TrainSetup`; other data in another process are refused as in `check_same_start`."""
    setup = TrainSetup(config, directory, processes, tokenizer, begins=begins)
    sources = setup.loader.state_dict()["sources"]
    data = {f"{one['source']}: {name}": value for one in sources for name, value in one["settings"].items()}
    check_same_start(processes, setup.config, **data)
    return setup


def check_same_folder(processes: DistributedContext, directory: Path) -> None:
    """Refuse the folder of a run that is another one in some process, or none: a checkpoint there would have holes.

    Rank 0 has made it. UserError in every process.
    """
    mark = ""
    with suppress(OSError):
        # A network file system may remember that there was no folder; making one asks its server.
        directory.mkdir(parents=True, exist_ok=True)
        mark = read_mark(directory)
    marks = processes.gather(mark)
    for rank, other in enumerate(marks):
        if other != marks[0]:
            raise UserError(
                f"run.directory {directory} is not the same folder in rank {rank} as in rank 0, and all processes "
                "write into it; name one on a file system that their machines share"
            )


def _same_command(config: RunConfig, directory: Path) -> bool:
    """Whether the run in this folder began with this configuration, apart from the commit of its data on the hub."""
    saved = run_of(directory)
    return saved is not None and replace(saved, data=replace(saved.data, revision=config.data.revision)) == config


def resume_notes(saved: RunConfig, now: RunConfig, step: int) -> list[str]:
    """Sentences for a run that continues from a checkpoint's step: what changed, and the learning rate."""
    changed = []
    for name in dotted_fields(RunConfig):
        before, after = value_of(saved, name), value_of(now, name)
        # `--resume` names the folder, which may have been moved.
        if before != after and name != "run.directory":
            changed.append(f"{name} {to_literal(before)} -> {to_literal(after)}")
    how = ", with the saved configuration"
    if changed:
        how = f"; differs from the saved configuration: {', '.join(changed)}"
    notes = [f"continues from step {step:,} of {now.train.steps:,}{how}"]
    if step < now.train.steps:
        before, after = learning_rate(saved, step), learning_rate(now, step + 1)
        notes.append(f"learning rate: {before:.3g} in step {step:,}, {after:.3g} in step {step + 1:,}")
    return notes


def train(config: RunConfig, *, overwrite: bool = False, before_step: BeforeStep | None = None) -> TrainResult:
    """Train a new model.

    Args:
        config: The configuration.
        overwrite: Rename a run that is in `config.run.directory` to `NAME.old-1`, `NAME.old-2`, …, and begin in its
            place.
        before_step: Called by the training thread before each step. A sentence that it returns becomes an event of the
            run, `threads`: the command uses it to choose the number of CPU threads.

    Returns:
        How it ended; after SIGINT, SIGTERM or SIGHUP the current step is completed and saved, unless it is the first:
        then `StoppedBeforeFirstStep` is raised, a KeyboardInterrupt.

    Raises:
        UserError: If the run would fail, or its data are bad.
        NonFiniteError: If a loss or gradient is not finite; that update was not applied.
    """
    check_type("config", config, RunConfig)
    directory = Path(config.run.directory)
    with _processes(config) as processes, RunLock() as lock:
        check_same_start(processes, config, overwrite=overwrite)
        if processes.restarted and processes.run_on_rank0(lambda: _same_command(config, directory)):
            # torchrun repeats the command of the first start.
            if processes.run_on_rank0(lambda: bool(list_checkpoints(directory / "checkpoints"))):
                return _resume(directory, "", config, processes, lock, before_step)
            overwrite = True
        tokenizer, notes = processes.run_on_all(lambda: preflight(config, processes.device, processes.size))
        # The data are opened before a folder is made, or a run renamed.
        setup = make_setup(config, directory, processes, tokenizer)
        processes.run_on_rank0(lambda: create_run_directory(setup.config, lock, overwrite=overwrite))
        try:
            check_same_folder(processes, directory)
            return run_training(setup, notes, None, before_step)
        except (UserError, OSError, KeyboardInterrupt, torch.OutOfMemoryError):
            if setup.state.step == 0 and lock.holds(directory):
                # Nothing is learnt yet, and the same command may be repeated.
                shutil.rmtree(directory.resolve(), ignore_errors=True)
            raise


def resume(
    directory: str | Path,
    *,
    checkpoint: str = "",
    config: RunConfig | None = None,
    before_step: BeforeStep | None = None,
) -> TrainResult:
    """Continue a run from its last complete checkpoint; the steps are those of an uninterrupted run.

    Args:
        directory: The run.
        checkpoint: Name of an earlier checkpoint to continue from; later ones are deleted after the first step.
        config: Replaces the run's configuration (to train longer, for example); it must describe the same model.
        before_step: See `train`.

    Returns:
        How it ended, see `train`.

    Raises:
        UserError: If there is no such run or checkpoint, a file of it is damaged, or it belongs to another model.
        NonFiniteError: If a loss or gradient is not finite; that update was not applied.
    """
    directory = user_path(directory, "--resume")
    saved = load_run(directory)
    config = saved if config is None else config
    # The folder may have been moved.
    config = replace(config, run=replace(config.run, directory=str(directory)))
    with _processes(config) as processes, RunLock() as lock:
        check_same_start(processes, config, checkpoint=checkpoint)
        # torchrun repeats the command of the first start.
        if checkpoint and processes.restarted and processes.run_on_rank0(lambda: _went_on(directory, checkpoint)):
            checkpoint = ""
        return _resume(directory, checkpoint, config, processes, lock, before_step)


def resume_command(directory: Path) -> str:
    """The command that resumes a run."""
    return f"trifocal train --resume {shell_path(directory)}"


def prolong_command(directory: Path, steps: int) -> str:
    """The command that trains a finished run on, up to `steps`: from before its learning rate declined, under "wsd"."""
    stable = _stable_checkpoint(directory, load_run(directory))
    place = f" --checkpoint {stable.name}" if stable.is_dir() else ""
    return f"{resume_command(directory)}{place} --train.steps {steps}"


def _stable_checkpoint(directory: Path, config: RunConfig) -> Path:
    """Where a run keeps its last checkpoint before the learning rate declines; under a cosine there is none."""
    return checkpoint_path(directory / "checkpoints", last_stable_step(config))


def _went_on(directory: Path, checkpoint: str) -> bool:
    """Whether a run has taken steps since it was resumed from a checkpoint, so that its newest one comes after that."""
    manifest, metrics = directory / "checkpoints" / checkpoint / MANIFEST, directory / "metrics.jsonl"
    if not manifest.is_file():
        return True
    # A failing disk may have kept no metrics.
    rows = read_metrics(metrics) if metrics.is_file() else []
    step, later = read_manifest(manifest.parent)["step"], False
    for row in reversed(rows):
        if row.get("name") == "resumed":
            return later and bool(row["step"] == step)
        later |= row["step"] > step
    return False


def _processes(config: RunConfig) -> AbstractContextManager[DistributedContext]:
    device = choose_device(config.run.device)
    return processes_started(device, timeout_seconds=config.parallel.timeout_seconds)


def _resume(
    directory: Path,
    checkpoint: str,
    config: RunConfig,
    processes: DistributedContext,
    lock: RunLock,
    before_step: BeforeStep | None,
) -> TrainResult:
    def prepare() -> tuple[Path, int]:
        open_run_directory(directory, lock)
        path = find_checkpoint(directory / "checkpoints", checkpoint, command=resume_command(directory))
        # A copy of a checkpoint may have any name.
        return path, read_manifest(path)["step"]

    found, step = processes.run_on_rank0(prepare)
    tokenizer, notes = processes.run_on_all(lambda: preflight(config, processes.device, processes.size, begins=False))
    saved = processes.run_on_rank0(lambda: load_run(directory))
    for name in ("train.only", "optimizer.kind"):
        if value_of(config, name) != value_of(saved, name):
            raise UserError(
                f'{name} is "{value_of(saved, name)}" in {directory} and "{value_of(config, name)}" here, but a '
                "checkpoint has the state of one optimizer, for what it trains; begin a new run with its weights "
                f"(--model.from {shell_path(directory)} --run.directory NEW)"
            )
    setup = make_setup(config, directory, processes, tokenizer, begins=False)
    notes = [*resume_notes(saved, setup.config, step), *notes]
    change = change_step(config)
    if config.data.weights_after and config.data.weights != saved.data.weights and step >= change:
        notes.append(f"data.weights ended with step {change}, and data.weights_after hold: change these")
    stable = _stable_checkpoint(directory, saved)
    if step > last_stable_step(saved) and stable.is_dir() and config.train.steps > saved.train.steps:
        notes.append(f"to prolong the run from before its learning rate declined, take --checkpoint {stable.name}")
    return run_training(setup, notes, found, before_step)
