"""Starting a run, new or resumed, in every process of it."""

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
from trifocal.train.result import TrainResult
from trifocal.train.resuming import resume_notes
from trifocal.train.run_config import RunConfig
from trifocal.train.run_directory import create_run_directory, load_run, open_run_directory
from trifocal.train.run_files import delete_contents
from trifocal.train.start import check_same_start, restarted_run
from trifocal.train.train_setup import TrainSetup
from trifocal.train.validation_loss import check_validation_text


def train(config: RunConfig, *, overwrite: bool = False) -> TrainResult:
    """Train a new model.

    Args:
        config: The configuration.
        overwrite: Rename a run that is in `config.run.directory` to `NAME.old-1`, `NAME.old-2`, …, and begin in its
            place.

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
        found = processes.run_on_rank0(lambda: restarted_run(processes, directory))
        if found == "resume":
            # torchrun repeats the command of the first start.
            return _resume(directory, "", config, processes, lock)
        tokenizer, notes = processes.run_on_all(lambda: preflight(config, processes.device, processes.size))
        # The data are opened before a folder is made, or a run renamed.
        setup = TrainSetup(config, directory, processes, tokenizer)
        processes.run_on_rank0(lambda: check_validation_text(config, tokenizer))
        overwrite = overwrite or found == "overwrite"

        def create() -> str:
            note = create_run_directory(setup.config, lock, overwrite=overwrite)
            processes.mark_run_created()
            return note

        note = processes.run_on_rank0(create)
        try:
            return run_training(setup, [*notes, *filter(None, [note])], None)
        except (UserError, KeyboardInterrupt):
            if setup.state.step == 0 and lock.holds(directory):
                # Nothing is learnt yet, and the same command may be repeated.
                processes.unmark_run_created()
                delete_contents(directory)
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
    saved = load_run(directory)
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


def _resume(directory: Path, checkpoint: str, config: RunConfig, processes: Processes, lock: RunLock) -> TrainResult:
    def prepare() -> tuple[str, Path]:
        note = open_run_directory(directory, lock)
        return note, find_checkpoint(directory, checkpoint, command=resume_command(directory))

    note, found = processes.run_on_rank0(prepare)
    tokenizer, notes = processes.run_on_all(lambda: preflight(config, processes.device, processes.size))
    processes.run_on_rank0(lambda: check_validation_text(config, tokenizer))
    saved = processes.run_on_rank0(lambda: load_run(directory))
    setup = TrainSetup(config, directory, processes, tokenizer, begins=False)
    notes = [*resume_notes(saved, setup.config, checkpoint_step(found)), *notes, *filter(None, [note])]
    return run_training(setup, notes, found)
