"""The folder of a run: made for a new one, never taken from another."""

import shutil
from pathlib import Path

from trifocal.errors import UserError
from trifocal.train.config import RunConfig
from trifocal.train.toml import from_table, read_toml, to_toml

CONFIG_FILE = "config.toml"


def create_run_directory(config: RunConfig, *, overwrite: bool) -> Path:
    """Make the folder of a new run and save the resolved configuration in it.

    Args:
        config: The configuration.
        overwrite: Delete the run that is there already.

    Raises:
        UserError: If the folder holds a run and `overwrite` is not given, or anything else, or cannot be made.
    """
    folder = Path(config.run.directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        is_run = (folder / CONFIG_FILE).is_file()
        if not is_run:
            raise UserError(f"{folder} exists and is not a run; choose another --run.directory")
        if not overwrite:
            raise UserError(
                f"{folder} holds a run already; go on with it (trifocal train --resume {folder}), replace it "
                "(--overwrite), or choose another --run.directory"
            )
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder)
    except OSError as error:
        raise UserError(f"cannot make run.directory {folder}: {error.strerror}") from error
    return folder


def save_config(config: RunConfig, folder: Path) -> None:
    """Write `config.toml`; it appears whole or not at all."""
    partial = folder / f".{CONFIG_FILE}.partial"
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
