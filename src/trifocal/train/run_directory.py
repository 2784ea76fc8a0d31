"""The folder of a run: made for a new one, never taken from another."""

import shutil
from pathlib import Path

from trifocal.errors import UserError
from trifocal.train.config import RunConfig
from trifocal.train.lock import LOCK_FILE, RunLock
from trifocal.train.toml import from_table, read_toml, to_toml

CONFIG_FILE = "config.toml"
_PARTIAL_CONFIG = f".{CONFIG_FILE}.partial"
# What a start leaves that was killed before the run was there.
_LEFT_OVER = {LOCK_FILE, _PARTIAL_CONFIG}


def create_run_directory(config: RunConfig, lock: RunLock, *, overwrite: bool) -> str:
    """Make the folder of a new run, lock it, and save the resolved configuration in it.

    Args:
        config: The configuration.
        lock: Takes the folder's lock.
        overwrite: Delete the run that is there already.

    Returns:
        What the lock has to say.

    Raises:
        UserError: If the folder holds a run and `overwrite` is not given, or anything else, or is in use, or cannot be
            made.
    """
    folder = Path(config.run.directory)
    if folder.exists() and (not folder.is_dir() or any(path.name not in _LEFT_OVER for path in folder.iterdir())):
        is_run = (folder / CONFIG_FILE).is_file()
        if not is_run:
            raise UserError(f"{folder} exists and is not a run; choose another --run.directory")
        if not overwrite:
            raise UserError(
                f"{folder} holds a run already; go on with it (trifocal train --resume {folder}), replace it "
                "(--overwrite), or choose another --run.directory"
            )
        lock.take(folder)
        _clear(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        note = lock.take(folder)
        save_config(config, folder)
    except OSError as error:
        raise UserError(f"cannot make run.directory {folder}: {error.strerror}") from error
    return note


def _clear(folder: Path) -> None:
    """Delete all but the lock. What makes it a run goes last: after a crash on the way, the rest can go as well."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == CONFIG_FILE):
        if path.name == LOCK_FILE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def save_config(config: RunConfig, folder: Path) -> None:
    """Write `config.toml`; it appears whole or not at all."""
    partial = folder / _PARTIAL_CONFIG
    partial.write_text(to_toml(config), encoding="utf-8")
    partial.replace(folder / CONFIG_FILE)


def load_run(folder: Path) -> RunConfig:
    """The configuration of an existing run.

    Raises:
        UserError: If there is no run, or its configuration is broken.
    """
    if not folder.is_dir():
        raise UserError(f"there is no run at {folder}: no such folder")
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"there is no run at {folder}: it has no {CONFIG_FILE}")
    return from_table(RunConfig, read_toml(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
