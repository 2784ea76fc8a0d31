"""The checkpoints of a run on the disk: listing, finding, pruning, and locking one while it is read."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from trifocal.errors import UserError
from trifocal.paths import shell_path
from trifocal.train.manifest import MANIFEST, CheckpointDamaged, is_intact, verify_checkpoint
from trifocal.train.run_files import PARTIAL, rename_to_remove

_PREFIX = "step_"
_LISTINGS = 5


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"{_PREFIX}{step:08d}"


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint that `list_checkpoints` or `find_checkpoint` gave."""
    return int(path.name.removeprefix(_PREFIX))


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first; unfinished ones are not among them."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _step_of(path) is not None)


def prune_checkpoints(root: Path, *, keep_last: int, keep_every_steps: int) -> None:
    """Delete all checkpoints but the newest ones and those of steps divisible by `keep_every_steps` (0: none).

    A checkpoint that is being read (`open_checkpoint`) stays until the next call.
    """
    for path in list_checkpoints(root)[:-keep_last]:
        step = _step_of(path)
        if step is not None and not (keep_every_steps and step % keep_every_steps == 0):
            with _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
                doomed = rename_to_remove(path) if free else None
            if doomed is not None:
                shutil.rmtree(doomed)


def set_aside_later_checkpoints(path: Path) -> None:
    """Make this checkpoint the newest: rename later ones to `superseded_*`, and delete unfinished ones."""
    for unfinished in path.parent.glob(f"{PARTIAL}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    found = list_checkpoints(path.parent)
    for later in found[found.index(path) + 1 :]:
        target = later.with_name(f"superseded_{later.name}")
        shutil.rmtree(target, ignore_errors=True)
        later.rename(target)


def find_checkpoint(run_directory: Path, name: str = "", *, command: str) -> Path:
    """The verified checkpoint to go on from.

    Args:
        run_directory: The run.
        name: Name of one of its checkpoints, like `step_00000500`; empty takes the newest.
        command: The user's command; the advice adds `--checkpoint` to it.

    Raises:
        UserError: If there is none, or it is damaged; names the damaged file, and the command that takes the newest
            intact one before it. No other one is taken silently.
    """
    path = _choose_checkpoint(run_directory / "checkpoints", name)
    _verify(path, command)
    return path


def _verify(path: Path, command: str) -> None:
    try:
        verify_checkpoint(path)
    except CheckpointDamaged as error:
        for earlier in reversed([found for found in list_checkpoints(path.parent) if found < path]):
            if is_intact(earlier):
                advice = f"go on from the one before with: {command} --checkpoint {earlier.name}"
                break
        else:
            advice = "no intact checkpoint lies before it"
        raise CheckpointDamaged(f"checkpoint {path.name} is damaged: {error}; {advice}") from None


class OpenCheckpoint(NamedTuple):
    """A checkpoint that is being read.

    Attributes:
        path: Its folder.
        wait_verified: Returns once every file is verified; raises UserError if one is damaged, as `find_checkpoint`.
    """

    path: Path
    wait_verified: Callable[[], None]


@contextlib.contextmanager
def open_checkpoint(root: Path, name: str = "", *, command: str) -> Iterator[OpenCheckpoint]:
    """As `find_checkpoint`, for a run that may still train: while the context lasts, the checkpoint is not pruned.

    A thread verifies it, as reading it takes as long. Damage is raised by `wait_verified` and by the end of the
    context, there also in the place of an error that came of it.

    Args:
        root: The run's `checkpoints`, or another folder that has them.
        name: Of a checkpoint in it; empty takes the newest.
        command: As in `find_checkpoint`.

    Raises:
        UserError: As `find_checkpoint`; or if the checkpoint was deleted by hand, by a new run, or on a file system
            without locks.
    """
    while True:
        path = _choose_checkpoint(root, name)
        with _lock(path, fcntl.LOCK_SH):
            # It may have been pruned before it was locked; newer ones exist then.
            if not path.is_dir():
                continue
            try:
                with _verification(path, command) as wait_verified:
                    yield OpenCheckpoint(path, wait_verified)
            except (UserError, OSError) as error:
                if path.is_dir():
                    raise
                raise UserError(f"checkpoint {path.name} was deleted while it was read; try again") from error
            return


@contextlib.contextmanager
def _verification(path: Path, command: str) -> Iterator[Callable[[], None]]:
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(_verify, path, command)
        try:
            yield verified.result
        except Exception:
            verified.result()
            raise
        verified.result()


def _choose_checkpoint(root: Path, name: str) -> Path:
    run_directory = root.parent
    for _ in range(_LISTINGS):
        # While a folder is listed, its one checkpoint may be pruned, and a newer one come too late for the list.
        if found := list_checkpoints(root):
            break
    if name and Path(name).name == name and (root / name / MANIFEST).exists():
        return root / name
    if not found:
        begin = f"trifocal train {shell_path(run_directory / 'config.toml')} --overwrite"
        raise UserError(f"{run_directory} has no checkpoint yet; wait for its first one, or begin again with: {begin}")
    if name and root / name not in found:
        raise UserError(f"{run_directory} has no checkpoint {name!r}; it has {', '.join(p.name for p in found)}")
    return root / name if name else found[-1]


@contextlib.contextmanager
def _lock(path: Path, kind: int) -> Iterator[bool]:
    """Lock a checkpoint, by its manifest: shared to read it, exclusive to delete it.

    Yields:
        False if another process has the lock. Without locks in the file system, or without a manifest, True.
    """
    try:
        # A network file system gives an exclusive lock only on a file that is open for writing.
        file = os.open(path / MANIFEST, os.O_RDONLY if kind == fcntl.LOCK_SH else os.O_RDWR)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(file, kind)
        except BlockingIOError:
            yield False
        except OSError:
            yield True
        else:
            yield True
    finally:
        os.close(file)


def _step_of(path: Path) -> int | None:
    digits = path.name.removeprefix(_PREFIX)
    return int(digits) if path.name.startswith(_PREFIX) and digits.isdecimal() and path.is_dir() else None
