"""The folder of a run: made for a new one, never taken from another."""

from pathlib import Path

from trifocal.diagnostics.files import partial_name, write_whole
from trifocal.errors import UserError
from trifocal.fields import from_table
from trifocal.train.config import RunConfig
from trifocal.train.earlier_run import put_back, set_aside, where_set_aside, whole_run
from trifocal.train.files import CONFIG_FILE, flush_folder
from trifocal.train.lock import LOCK_FILE, RunLock
from trifocal.train.toml import read_toml, to_toml

# What a start leaves that was killed before the run was there.
_LEFT_OVER = {LOCK_FILE, partial_name(CONFIG_FILE)}


def create_run_directory(config: RunConfig, lock: RunLock, *, overwrite: bool) -> str:
    """Make the folder of a new run, lock it, and save the resolved configuration in it.

    Args:
        config: The configuration.
        lock: Takes the folder's lock.
        overwrite: Set the run aside that is there already, until the new one's first step has ended
            (see `earlier_run`).

    Returns:
        What the lock has to say.

    Raises:
        UserError: If the folder holds a run and `overwrite` is not given, or anything else, or is in use, or cannot be
            made.
    """
    folder = Path(config.run.directory)
    # Before anything is written into a folder that may be somebody else's; and again when nobody else can change it.
    _check_contents(folder, overwrite=overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        note = lock.take(folder)
        put_back(folder, lock)
        if _check_contents(folder, overwrite=overwrite):
            set_aside(folder, lock)
        save_config(config, folder)
    except OSError as error:
        kept = put_back(folder, lock, own=True) if lock.held else ""
        raise UserError(
            "; ".join([f"cannot make run.directory {folder}: {error.strerror}", *filter(None, [kept])])
        ) from error
    return note


def _check_contents(folder: Path, *, overwrite: bool) -> bool:
    """Whether the folder holds a run, which may be replaced."""
    if not folder.exists() or (folder.is_dir() and all(path.name in _LEFT_OVER for path in folder.iterdir())):
        return False
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder} exists and is not a run; choose another --run.directory")
    if not overwrite:
        raise UserError(
            f"{folder} holds a run already; go on with it (trifocal train --resume {folder}), replace it "
            "(--overwrite), or choose another --run.directory"
        )
    return True


def save_config(config: RunConfig, folder: Path) -> None:
    """Write `config.toml`; it appears whole or not at all, also after a power cut: without it nothing goes on."""
    write_whole(folder / CONFIG_FILE, to_toml(config), flush=True)
    flush_folder(folder)


def load_run(folder: Path) -> RunConfig:
    """The configuration of an existing run.

    Raises:
        UserError: If there is no run, or its configuration is broken.
    """
    if not folder.is_dir():
        raise UserError(f"there is no run at {folder}: no such folder")
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"there is no run at {folder}: it has no {CONFIG_FILE}{where_set_aside(folder)}")
    return from_table(RunConfig, read_toml(folder / CONFIG_FILE), str(folder / CONFIG_FILE))


def load_run_to_resume(folder: Path) -> RunConfig:
    """As `load_run`; where a start that was to replace the run was killed, of the run that will be put back."""
    return load_run(whole_run(folder))
