"""Starting a run, new or resumed, in every process of it."""

import contextlib
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from trifocal.distributed import Processes, processes_started
from trifocal.errors import UserError
from trifocal.paths import shell_path, user_path
from trifocal.train.checkpoint_folders import checkpoint_step, find_checkpoint
from trifocal.train.lock import RunLock
from trifocal.train.loop import run_training
from trifocal.train.preflight import choose_device, preflight
from trifocal.train.replaced_run import has_replaced, restore_replaced
from trifocal.train.result import TrainResult
from trifocal.train.resuming import resume_notes
from trifocal.train.run_config import RunConfig
from trifocal.train.run_directory import create_run_directory, load_run, load_run_to_resume
from trifocal.train.run_files import delete, mark_run
from trifocal.train.start import check_same_start, restarted_run
from trifocal.train.train_setup import TrainSetup
from trifocal.train.validation_loss import check_validation_text


def train(config: RunConfig, *, overwrite: bool = False) -> TrainResult:
    """Train a new model.

    Args:
        config: The configuration.
        overwrite: Replace the run in `config.run.directory`; it is deleted when the first step of the new one has
            ended, and stays if that step fails.

    Returns:
        How it ended; after SIGINT, SIGTERM or SIGHUP the current step is completed and saved, unless it is the first:
        then `StoppedBeforeFirstStep` is raised, a KeyboardInterrupt.

    Raises:
        UserError: If the run would fail, or its data are bad.
        NonFiniteError: If a loss or gradient is not finite; that update was not applied.
    """
    directory = Path(config.run.directory)
    with _processes(config) as processes, RunLock() as lock:
        check_same_start(processes, config, overwrite=overwrite)
        processes.run_on_rank0(lambda: _print_notice(restore_replaced(directory, lock)))
        found = processes.run_on_rank0(lambda: restarted_run(processes, directory))
        if found == "resume":
            # torchrun repeats the command of the first start.
            return _resume(directory, "", config, processes, lock)
        tokenizer, notes = processes.run_on_all(lambda: preflight(config, processes.device, processes.size))
        # The data are opened before a folder is made, or a run renamed aside.
        setup = TrainSetup(config, directory, processes, tokenizer)
        processes.run_on_rank0(lambda: check_validation_text(config, tokenizer))
        overwrite = overwrite or found == "overwrite"

        def create() -> str:
            note = create_run_directory(config, lock, overwrite=overwrite)
            if not has_replaced(directory):
                # Otherwise after the first step: until then another run may be put back.
                processes.mark_run_created()
            return note

        created = False
        try:
            note = processes.run_on_rank0(create)
            created = True
            return run_training(setup, [*notes, *filter(None, [note])], None, lock)
        except BaseException as error:
            nothing_learnt = created and setup.state.step == 0 and isinstance(error, UserError | KeyboardInterrupt)
            if nothing_learnt:
                processes.unmark_run_created()
            _tidy_after_failure(directory, lock, delete_start=nothing_learnt)
            raise


def resume(directory: str | Path, *, checkpoint: str = "", config: RunConfig | None = None) -> TrainResult:
    """Go on with a run from its last complete checkpoint; the steps are those of an uninterrupted run.

    Args:
        directory: The run.
        checkpoint: Name of an earlier checkpoint to go on from; later ones are set aside.
        config: Replaces the run's configuration (to train longer, for example); it must describe the same model.

    Returns:
        As `train`.

    Raises:
        UserError: If there is no such run or checkpoint, a file of it is damaged, or it is of another model.
        NonFiniteError: As `train`.
    """
    directory = user_path(directory, "--resume")
    saved = load_run_to_resume(directory)
    config = saved if config is None else config
    # The folder may have been moved.
    config = replace(config, run=replace(config.run, directory=str(directory)))
    with _processes(config) as processes, RunLock() as lock:
        check_same_start(processes, config, checkpoint=checkpoint)
        # After a restart by torchrun the newest checkpoint counts, not the one that the first start asked for.
        return _resume(directory, "" if processes.restarted else checkpoint, config, processes, lock)


def resume_command(directory: Path) -> str:
    """The command that resumes a run."""
    return f"trifocal train --resume {shell_path(directory)}"


def _processes(config: RunConfig) -> AbstractContextManager[Processes]:
    device = choose_device(config.run.device)
    return processes_started(device, timeout_seconds=config.parallel.timeout_seconds)


def _print_notice(sentence: str) -> None:
    if sentence:
        print(f"trifocal: {sentence}", file=sys.stderr, flush=True)


def _tidy_after_failure(directory: Path, lock: RunLock, *, delete_start: bool) -> None:
    """After a failed start, delete its folder and put the replaced run back.

    Errors here are printed and not raised: the caller raises that of the start.
    """
    with contextlib.suppress(OSError):
        # Where the lock is not held, another process may be at work in the folder.
        if delete_start and lock.holds(directory):
            for path in directory.iterdir():
                delete(path)
            # Unless it is a link or a volume.
            directory.rmdir()
    try:
        if lock.is_held:
            _print_notice(restore_replaced(directory, lock))
    except (UserError, OSError) as failed:
        _print_notice(str(failed))


def _resume(directory: Path, checkpoint: str, config: RunConfig, processes: Processes, lock: RunLock) -> TrainResult:
    def prepare() -> tuple[str, Path]:
        note = lock.acquire(directory)
        _print_notice(restore_replaced(directory, lock))
        found = find_checkpoint(directory, checkpoint, command=resume_command(directory))
        # A run of an older version has no mark.
        mark_run(directory)
        return note, found

    note, found = processes.run_on_rank0(prepare)
    tokenizer, notes = processes.run_on_all(lambda: preflight(config, processes.device, processes.size))
    processes.run_on_rank0(lambda: check_validation_text(config, tokenizer))
    saved = processes.run_on_rank0(lambda: load_run(directory))
    setup = TrainSetup(config, directory, processes, tokenizer, begins=False)
    notes = [*resume_notes(saved, setup.config, checkpoint_step(found)), *notes, *filter(None, [note])]
    return run_training(setup, notes, found, lock)
