"""The checkpoints of a run on the disk: listing, finding and pruning."""

import shutil
from pathlib import Path

from trifocal.errors import UserError
from trifocal.paths import shell_path
from trifocal.train.checkpoint.manifest import MANIFEST, CheckpointDamaged, is_intact, verify_checkpoint
from trifocal.train.run_folder import PARTIAL, remove_folder

_PREFIX = "step_"
# Folders of a run with a file for each step that was looked at, named as checkpoints are.
_OF_STEPS = ("samples", "attention", "evaluation")


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"{_PREFIX}{step:08d}"


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint that `list_checkpoints` gave."""
    return int(path.name.removeprefix(_PREFIX))


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first; unfinished ones are not among them."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _step_of(path) is not None)


def prune_checkpoints(root: Path, *, keep_last: int, keep_every_steps: int, keep_step: int = 0) -> None:
    """Delete all checkpoints but the newest, those of steps divisible by `keep_every_steps` (0: none), and one more."""
    for path in list_checkpoints(root)[:-keep_last]:
        step = checkpoint_step(path)
        if step != keep_step and not (keep_every_steps and step % keep_every_steps == 0):
            remove_folder(path)


def delete_later(run: Path, step: int) -> None:
    """Delete a run's checkpoints of later steps, unfinished ones, and what was seen of the model in later steps."""
    root = run / "checkpoints"
    for unfinished in root.glob(f"{PARTIAL}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for path in list_checkpoints(root):
        if checkpoint_step(path) > step:
            remove_folder(path)
    for file in (file for name in _OF_STEPS for file in (run / name).glob(f"{_PREFIX}*")):
        if file.stem > checkpoint_path(root, step).name:
            file.unlink()


def find_checkpoint(root: Path, name: str = "", *, command: str = "", optimizer: bool = True) -> Path:
    """The verified checkpoint of this name, like `step_00000500`, or the newest. If it is damaged, the error names the
    newest intact one before it, with the `command` that resumes; no other one is taken silently.
    """
    path = _choose_checkpoint(root, name)
    try:
        verify_checkpoint(path, optimizer=optimizer)
    except CheckpointDamaged as error:
        if not path.exists():
            raise UserError(f"{path} was removed while it was read, maybe by its run; run the command again") from None
        earlier = next((one for one in reversed(list_checkpoints(root)) if one < path and is_intact(one)), None)
        advice = f"the newest intact one before it is {earlier}" if earlier else "no intact checkpoint lies before it"
        if earlier and command:
            advice = f"continue from the one before with: {command} --checkpoint {earlier.name}"
        raise CheckpointDamaged(f"checkpoint {path.name} is damaged: {error}; {advice}") from None
    return path


def _choose_checkpoint(root: Path, name: str) -> Path:
    run_directory = root.parent
    found = list_checkpoints(root)
    if name and Path(name).name == name and (root / name / MANIFEST).exists():
        return root / name
    if not found:
        begin = f"trifocal train {shell_path(run_directory / 'config.toml')} --overwrite"
        raise UserError(f"{run_directory} has no checkpoint yet; wait for its first one, or begin again with: {begin}")
    if name and root / name not in found:
        raise UserError(f"{run_directory} has no checkpoint {name!r}; it has {', '.join(p.name for p in found)}")
    return root / name if name else found[-1]


def _step_of(path: Path) -> int | None:
    digits = path.name.removeprefix(_PREFIX)
    # The name of somebody's copy may be like these.
    is_step = digits.isdecimal() and path == checkpoint_path(path.parent, int(digits)) and path.is_dir()
    return int(digits) if is_step else None
