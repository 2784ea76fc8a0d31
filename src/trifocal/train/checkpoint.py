"""Checkpoints that are complete or absent.

`checkpoints/step_00000500/` holds `weights/` (model and optimizer, torch.distributed.checkpoint), one
`rank*.json` a process (data position, random generators, counters) and `manifest.json`: the model's configuration
and the size and SHA-256 of every other file. All processes write it together, in a folder that all of them see, and
it is read by any number of them, however the model is spread. It is written under another name, flushed to the disk
and then renamed, so a crash at any moment leaves either the whole checkpoint or none. Every file is verified before
anything is loaded.
"""

import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.utils._pytree import tree_map_only

from trifocal.distributed import Processes
from trifocal.errors import UserError
from trifocal.models import ModelConfig

FORMAT = 1
MANIFEST = "manifest.json"
_PREFIX = "step_"
_PARTIAL = "partial_"
# Fields of the model that change how it is computed, not what it is.
_FREE_MODEL_FIELDS = frozenset({"backend"})


class CheckpointDamaged(UserError):
    """A file of a checkpoint is missing or differs from the manifest."""


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"{_PREFIX}{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first; unfinished ones are not among them."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _step_of(path) is not None)


def save_checkpoint(
    root: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_config: ModelConfig,
    process_state: dict[str, Any],
    processes: Processes | None = None,
) -> Path:
    """Write the checkpoint of a step; it appears under its name only when all of it is on the disk.

    Every process calls this, and it succeeds or fails in all of them.

    Args:
        root: The run's `checkpoints` folder.
        step: Optimizer steps done.
        model: The model.
        optimizer: Its optimizer.
        model_config: What the model is; a checkpoint of another one is refused when loading.
        process_state: What this process must remember besides, in JSON types.
        processes: This process among those of the run.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: If it cannot be written; nothing of it is left, and earlier checkpoints are untouched.
    """
    return write_checkpoint(
        root,
        step,
        state=collect_state(model, optimizer),
        model_config=model_config,
        process_state=process_state,
        processes=processes or Processes(),
    )


def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, copy: bool = False) -> dict[str, Any]:
    """What a checkpoint holds of a model and its optimizer; every process calls this.

    Args:
        model: The model.
        optimizer: Its optimizer.
        copy: Copy all of it into the host's memory, so that training may go on.

    Returns:
        The tensors under `model` and `optimizer`; of a sharded model this process's shards.
    """
    options = StateDictOptions(cpu_offload=copy)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}
    if copy and all(parameter.device.type == "cpu" for parameter in model.parameters()):
        # They were there already, and are training's own.
        return dict(tree_map_only(torch.Tensor, torch.clone, state))
    return state


def write_checkpoint(
    root: Path,
    step: int,
    *,
    state: dict[str, Any],
    model_config: ModelConfig,
    process_state: dict[str, Any],
    processes: Processes,
) -> Path:
    """The part of `save_checkpoint` that takes its time: writing what `collect_state` gave."""
    final = checkpoint_path(root, step)
    partial = root / f"{_PARTIAL}{final.name}"
    try:
        processes.on_first(lambda: _make_room(partial))
        processes.together(lambda: _save_weights(state, partial / "weights", processes))
        text = json.dumps(process_state)
        processes.together(lambda: _write(partial / f"rank{processes.rank}.json", text))
        files = _describe_files(partial, processes)
        manifest = {"format": FORMAT, "step": step, "model": model_config.to_dict(), "files": files}
        processes.on_first(lambda: _complete(partial, final, manifest))
    except BaseException:
        if processes.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _make_room(partial: Path) -> None:
    _remove(partial)
    (partial / "weights").mkdir(parents=True)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _describe_files(partial: Path, processes: Processes) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file, each on the disk for good; the processes share the reading."""
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    mine = paths[processes.rank :: processes.size]

    def describe() -> dict[str, dict[str, Any]]:
        return {
            path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": _flushed_hash(path)}
            for path in mine
        }

    found = {name: entry for part in processes.gather(processes.together(describe)) for name, entry in part.items()}
    return dict(sorted(found.items()))


def _complete(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    (partial / MANIFEST).write_text(json.dumps({"content": manifest, "sha256": _hash_json(manifest)}, indent=1))
    _flushed_hash(partial / MANIFEST)
    for folder in (partial / "weights", partial):
        _flush_folder(folder)
    # A damaged checkpoint of the same step, left by the run that this one replaces, makes room.
    _remove(final)
    partial.rename(final)
    _flush_folder(final.parent)


def prune_checkpoints(root: Path, *, keep_last: int, keep_every_steps: int) -> None:
    """Delete all checkpoints but the newest ones and those of steps divisible by `keep_every_steps` (0: none)."""
    for path in list_checkpoints(root)[:-keep_last]:
        step = _step_of(path)
        if step is not None and not (keep_every_steps and step % keep_every_steps == 0):
            _remove(path)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Read the manifest and compare every file with it.

    Returns:
        The manifest: `format`, `step`, `model`, `files`.

    Raises:
        CheckpointDamaged: If a file is missing, cut or changed; names the file.
        UserError: If the checkpoint was written by another version of the format.
    """
    try:
        wrapped = json.loads((path / MANIFEST).read_bytes())
        manifest = wrapped["content"]
        intact = wrapped["sha256"] == _hash_json(manifest)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path / MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointDamaged(f"{path / MANIFEST} is damaged") from None
    if not intact:
        raise CheckpointDamaged(f"{path / MANIFEST} is damaged")
    if manifest["format"] != FORMAT:
        raise UserError(f"{path} has checkpoint format {manifest['format']}, this version reads {FORMAT}")
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointDamaged(f"{file} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointDamaged(f"{file} has {file.stat().st_size} bytes instead of {expected['bytes']}")
        if _hash(file) != expected["sha256"]:
            raise CheckpointDamaged(f"{file} has changed since it was written (SHA-256 differs)")
    return dict(manifest)


def set_aside_later(path: Path) -> None:
    """Make it the newest: rename later ones to `superseded_*`, delete what a killed process left unfinished."""
    for unfinished in path.parent.glob(f"{_PARTIAL}*"):
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
        command: What the person typed, for the advice to type it with another checkpoint.

    Raises:
        UserError: If there is none, or it is damaged; names the damaged file, and the command that takes the newest
            intact one before it. Another one is never taken silently.
    """
    root = run_directory / "checkpoints"
    found = list_checkpoints(root)
    if not found:
        begin = f"trifocal train {run_directory / 'config.toml'} --overwrite"
        raise UserError(f"{run_directory} has no checkpoint yet; wait for its first one, or begin again with: {begin}")
    path = found[-1]
    if name:
        path = root / name
        if path not in found:
            raise UserError(f"{run_directory} has no checkpoint {name!r}; it has {', '.join(p.name for p in found)}")
    try:
        verify_checkpoint(path)
    except CheckpointDamaged as error:
        for earlier in reversed(found[: found.index(path)]):
            if _is_intact(earlier):
                advice = f"go on from the one before with: {command} --checkpoint {earlier.name}"
                break
        else:
            advice = "no intact checkpoint lies before it"
        raise CheckpointDamaged(f"checkpoint {path.name} is damaged: {error}; {advice}") from None
    return path


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_config: ModelConfig,
    processes: Processes | None = None,
) -> dict[str, Any]:
    """Load a verified checkpoint into a model and its optimizer, in every process its part.

    Args:
        path: What `find_checkpoint` returned.
        model: Takes the weights.
        optimizer: Takes its state.
        model_config: What the model is.
        processes: This process among those of the run.

    Returns:
        The process state that was saved with it: that of this rank, or of another one where more processes load than
        saved.

    Raises:
        UserError: If the checkpoint holds another model; names what differs.
    """
    _check_model(path, model_config)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    _load_weights(state, path / "weights")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    rank = 0 if processes is None else processes.rank
    saved = sum(1 for _ in path.glob("rank*.json"))
    return dict(json.loads((path / f"rank{rank % saved}.json").read_text()))


def load_model_weights(path: Path, *, model: nn.Module, model_config: ModelConfig) -> None:
    """Load the weights alone from a verified checkpoint.

    Raises:
        UserError: If the checkpoint holds another model; names what differs.
    """
    _check_model(path, model_config)
    state = {"model": get_model_state_dict(model)}
    _load_weights(state, path / "weights")
    model.load_state_dict(state["model"])


def _check_model(path: Path, model_config: ModelConfig) -> None:
    saved = json.loads((path / MANIFEST).read_bytes())["content"]["model"]
    wanted = model_config.to_dict()
    differences = [
        f"{name} is {_shown(saved.get(name))} there, {_shown(wanted.get(name))} here"
        for name in sorted(saved.keys() | wanted.keys())
        if name not in _FREE_MODEL_FIELDS and saved.get(name) != wanted.get(name)
    ]
    if differences:
        raise UserError(f"checkpoint {path} is of another model: {'; '.join(differences)}")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "/".join(str(part) for part in value.values())
    return "absent" if value is None else str(value)


def _save_weights(state: dict[str, Any], folder: Path, processes: Processes) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            writer, alone = dcp.FileSystemWriter(folder), processes.size == 1
            dcp.save(state, storage_writer=writer, process_group=processes.group, no_dist=alone)
    except CheckpointException as error:
        # Not an Exception, and it wraps what went wrong in each process.
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError) or not isinstance(cause, Exception):
                raise cause from None
        raise OSError("; ".join(str(cause) for cause in causes)) from error


def _load_weights(state: dict[str, Any], folder: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        causes = "; ".join(str(cause) for cause, _ in error.failures.values())
        raise UserError(f"cannot load {folder}: {causes}") from error


def _step_of(path: Path) -> int | None:
    digits = path.name.removeprefix(_PREFIX)
    return int(digits) if path.name.startswith(_PREFIX) and digits.isdecimal() and path.is_dir() else None


def _is_intact(path: Path) -> bool:
    try:
        verify_checkpoint(path)
    except UserError:
        return False
    return True


def _remove(folder: Path) -> None:
    if not folder.exists():
        return
    # Renamed first: a crash in the middle of deleting must not leave half a checkpoint under its name.
    doomed = folder.with_name(f"{_PARTIAL}removing_{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flushed_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_json(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
