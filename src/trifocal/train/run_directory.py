"""The folder of a run: making it, protecting other folders, noticing when it is moved."""

import os
from pathlib import Path
from typing import Self

from trifocal.errors import UserError
from trifocal.fields import from_table
from trifocal.paths import shell_path
from trifocal.runlog.whole_files import is_partial, write_whole
from trifocal.train.lock import LOCK_FILE, RunLock
from trifocal.train.replaced_run import path_after_restore, replace_run, replaced_note, restore_replaced
from trifocal.train.run_config import RunConfig
from trifocal.train.run_files import CONFIG_FILE, RUN_FILE, flush_folder, is_run, mark_run, read_mark
from trifocal.train.toml import read_toml, to_toml

# Files of a start that was killed before it saved its configuration.
_LEFT_OVER = {LOCK_FILE, RUN_FILE}
_CONTENTS = _LEFT_OVER | {
    CONFIG_FILE,
    *("env.json", "backends.json", "metrics.jsonl", "report.html"),
    *(
        "heartbeat",
        "checkpoints",
        "weights",
        "samples",
        "attention",
        "evaluation",
        "dumps",
        "traces",
        "tensorboard",
        "wandb",
    ),
}
"""Names of everything that a run writes into its folder."""
_LISTED = 5


def create_run_directory(config: RunConfig, lock: RunLock, *, overwrite: bool) -> str:
    """Make the folder of a new run, lock it, and save the resolved configuration in it.

    Args:
        config: The configuration.
        lock: Takes the folder's lock.
        overwrite: If there is a run already, rename it until the new one's first step has ended (see `replaced_run`).

    Returns:
        The note of `RunLock.acquire`.

    Raises:
        UserError: If the folder holds a run and `overwrite` is not given, or anything else, or is in use, or cannot be
            made.
    """
    folder = Path(config.run.directory)
    # Before anything is written into a folder that may not be a run's; and again when it is locked.
    _check_contents(folder, overwrite=overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        note = lock.acquire(folder)
        restore_replaced(folder, lock)
        if _check_contents(folder, overwrite=overwrite):
            replace_run(folder, lock)
        mark_run(folder)
        save_config(config, folder)
    except OSError as error:
        message = f"cannot make run.directory {folder}: {error.strerror}"
        kept = restore_replaced(folder, lock) if lock.is_held else ""
        raise UserError("; ".join(filter(None, [message, kept]))) from error
    return note


def _is_left_over(name: str) -> bool:
    return name in _LEFT_OVER or is_partial(name, {CONFIG_FILE})


def _check_contents(folder: Path, *, overwrite: bool) -> bool:
    """Whether the folder holds a run that may be replaced; raises if it holds anything else."""
    if not folder.exists() or (folder.is_dir() and all(_is_left_over(path.name) for path in folder.iterdir())):
        return False
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder} exists and is not a run; choose another --run.directory")
    if not overwrite:
        raise UserError(
            f"{folder} holds a run already; go on with it (trifocal train --resume {shell_path(folder)}), replace it "
            "(--overwrite), or choose another --run.directory"
        )
    if not is_run(folder):
        raise UserError(
            f"{folder} is not replaced: it has no {RUN_FILE}, by which a run is known. If it is a run of an older "
            f"version, trifocal train --resume {shell_path(folder)} adds the file; if not, choose another "
            "--run.directory"
        )
    foreign = sorted(filter(None, map(_foreign, folder.iterdir())))
    if foreign:
        more = [f"and {len(foreign) - _LISTED} more"] if len(foreign) > _LISTED else []
        raise UserError(
            f"{folder} is not replaced: beside the run it holds {', '.join([*foreign[:_LISTED], *more])}; move that "
            "elsewhere, or choose another --run.directory"
        )
    return True


def _foreign(path: Path) -> str:
    """The name of a file that no run writes; empty for any other."""
    if path.is_symlink() or path.is_mount():
        return f"{path.name} ({'a link' if path.is_symlink() else 'a mount point'})"
    known = path.name in _CONTENTS or is_partial(path.name, _CONTENTS)
    return "" if known else path.name


class OpenDirectory:
    """Notices when the folder of a run that trains is moved, deleted or replaced.

    Args:
        folder: Of the run, marked as such.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._mark = folder, read_mark(folder)
        self._descriptor = os.open(folder, os.O_RDONLY)

    def is_there(self) -> bool:
        """Whether the run's folder is still at its path."""
        try:
            return read_mark(self._folder) == self._mark
        except OSError:
            # A file system that does not answer may still have the folder.
            return True

    def check(self, step: int, saved_step: int) -> None:
        """Refuse to write into a folder that is not the run's any more: half a run would result.

        Args:
            step: The last step that is done.
            saved_step: Step of the last checkpoint; 0 if there is none.

        Raises:
            UserError: If the folder is not at its path; names the new path, if it is known, and the lost steps.
        """
        if self.is_there():
            return
        moved = self._moved_to()
        if moved is None:
            raise UserError(
                f"{self._folder} was deleted or replaced while its run trained: the run stopped after step {step}, and "
                "is lost with its checkpoints, unless you have another copy"
            )
        kept = (
            f"the checkpoint of step {saved_step} is there, later steps are lost; go on with: trifocal train --resume "
            f"{shell_path(moved)}"
            if saved_step
            else "there is no checkpoint yet, the steps are lost"
        )
        raise UserError(
            f"{self._folder} was moved to {moved} while its run trained: the run stopped after step {step}; {kept}"
        )

    def _moved_to(self) -> Path | None:
        # Linux knows the current path of an open folder. A deleted one has no mark.
        try:
            path = Path(f"/proc/self/fd/{self._descriptor}").readlink()
            return path if read_mark(path) == self._mark else None
        except OSError:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def save_config(config: RunConfig, folder: Path) -> None:
    """Write `config.toml`, whole or not at all, even in a power cut: without it a run cannot be resumed."""
    write_whole(folder / CONFIG_FILE, to_toml(config), flush=True)
    flush_folder(folder)


def load_run(folder: Path) -> RunConfig:
    """Load the configuration of a run.

    Raises:
        UserError: If there is no run, or its configuration is broken.
    """
    if not folder.is_dir():
        raise UserError(f"there is no run at {folder}: no such folder")
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"there is no run at {folder}: it has no {CONFIG_FILE}{replaced_note(folder)}")
    return from_table(RunConfig, read_toml(folder / CONFIG_FILE), str(folder / CONFIG_FILE))


def load_run_to_resume(folder: Path) -> RunConfig:
    """As `load_run`; if the run is being replaced, that of the run that `restore_replaced` will put back."""
    return load_run(path_after_restore(folder))
