"""Checkpoints that are complete or absent.

`checkpoints/step_00000500/` holds `weights/` (model and optimizer in safetensors files, written and read by
torch.distributed.checkpoint), one `rank*.json` a process (data position, random generators, counters) and
`manifest.json`: the model's configuration and the size and SHA-256 of every other file. All processes write it
together, under another name that is renamed when all is on the disk; any number of them reads it in any parallel mode.
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils._pytree import tree_map_only

from trifocal.distributed.processes import DistributedContext
from trifocal.errors import UserError
from trifocal.fields import dotted_fields, value_of
from trifocal.models import ModelConfig
from trifocal.paths import read_json
from trifocal.train.checkpoint.folders import checkpoint_path
from trifocal.train.checkpoint.manifest import FORMAT, CheckpointDamaged, describe_files, read_manifest, write_manifest
from trifocal.train.checkpoint.tensor_files import TensorFileWriter
from trifocal.train.run_folder import PARTIAL, flush, remove_folder

# Threads hash the files at the same time.
_FILE_BYTES = 2**30


def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, copy: bool = False) -> dict[str, Any]:
    """The state for a checkpoint, under `model` and `optimizer`, of a sharded model this process's shards; every
    process calls this. With `copy` it is in the host's memory, so that training may continue.
    """
    options = StateDictOptions(cpu_offload=copy)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}
    if copy and all(parameter.device.type == "cpu" for parameter in model.parameters()):
        # cpu_offload does not copy these: they are the tensors that training changes.
        return dict(tree_map_only(torch.Tensor, torch.clone, state))
    return state


def write_checkpoint(
    root: Path,
    step: int,
    *,
    state: dict[str, Any],
    model_config: ModelConfig,
    process_state: dict[str, Any],
    processes: DistributedContext,
) -> Path:
    """Write the state of `collect_state`, and this process's in JSON types, into a folder of `root` that appears only
    when all of it is on the disk. Every process calls this; an OSError, in all of them, leaves nothing.
    """
    final = checkpoint_path(root, step)
    partial = root / f"{PARTIAL}{final.name}"
    try:
        processes.run_on_rank0(lambda: _make_room(partial))
        processes.run_on_all(lambda: _save_weights(state, partial / "weights", processes))
        text = json.dumps(process_state)
        processes.run_on_all(lambda: _write(partial / f"rank{processes.rank}.json", text))
        files = describe_files(partial, processes)
        manifest = {"format": FORMAT, "step": step, "model": model_config.to_dict(), "files": files}
        processes.run_on_rank0(lambda: _complete(partial, final, manifest))
    except BaseException:
        if processes.is_rank0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _make_room(partial: Path) -> None:
    remove_folder(partial)
    # The run's folder is not made: without it there is no run.
    partial.parent.mkdir(exist_ok=True)
    partial.mkdir()
    (partial / "weights").mkdir()


def _write(path: Path, text: str) -> None:
    # Its own function, so that tests can let the disk fail here.
    path.write_text(text)


def _complete(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    write_manifest(partial, manifest)
    for folder in (partial / "weights", partial):
        flush(folder)
    # A damaged checkpoint of the same step may be there: the run continues from an earlier one.
    remove_folder(final)
    partial.rename(final)
    flush(final.parent)


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_config: ModelConfig,
    processes: DistributedContext | None = None,
) -> dict[str, Any]:
    """Load a verified checkpoint into a model and its optimizer, which keeps its hyperparameters, in every process its
    part; returns the process state that this rank saved, or another one where more processes load than saved.
    """
    _check_model(path, model_config)
    state = collect_state(model, optimizer)
    _read(_tensors(state), path / "weights")
    # The tensors have changed in place; the hyperparameters are the optimizer's own.
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return _process_state(path, 0 if processes is None else processes.rank)


def load_model_weights(path: Path, *, model: nn.Module, model_config: ModelConfig) -> None:
    """Give a model, "meta" too, the weights of a verified checkpoint, on the CPU, in place of its tensors."""
    _check_model(path, model_config)
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in model.state_dict().items()}
    _read(_tensors({"model": tensors}), path / "weights")
    model.load_state_dict(tensors, assign=True)


def read_model_config(path: Path) -> ModelConfig:
    """The model configuration of a verified checkpoint."""
    return ModelConfig.from_dict(dict(read_manifest(path)["model"]))


def model_differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """The keys in which two models differ, with both values; where weights come from, and the backend, do not count."""
    return [
        f"{name} is {value_of(there, name)} there, {value_of(here, name)} here"
        for name in dotted_fields(ModelConfig)
        if name not in ("from", "backend") and value_of(there, name) != value_of(here, name)
    ]


def _check_model(path: Path, model_config: ModelConfig) -> None:
    differences = model_differences(read_model_config(path), model_config)
    if differences:
        raise UserError(f"checkpoint {path} belongs to a different model: {'; '.join(differences)}")


def _process_state(path: Path, rank: int) -> dict[str, Any]:
    saved = sum(1 for _ in path.glob("rank*.json"))
    file = path / f"rank{rank % max(saved, 1)}.json"
    try:
        state = read_json(file)
        if not isinstance(state.get("step"), int):
            raise UserError(f"{file} cannot be read: it holds no step")
    except UserError as error:
        raise CheckpointDamaged(str(error)) from error
    return state


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of `collect_state` by their names in the files; hyperparameters are not among them."""
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for parameter, values in state.get("optimizer", {}).get("state", {}).items():
        tensors |= {f"optimizer.state.{parameter}.{name}": tensor for name, tensor in values.items()}
    return tensors


def _file_numbers(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The number of each tensor's file, from 1, so that no file is much larger than `_FILE_BYTES`."""
    numbers, total = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + total // _FILE_BYTES
        total += tensor.numel() * tensor.element_size()
    return numbers


def _save_weights(state: dict[str, Any], folder: Path, processes: DistributedContext) -> None:
    tensors = _tensors(state)
    writer = TensorFileWriter(folder, _file_numbers(tensors), processes.rank)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(tensors, storage_writer=writer, process_group=processes.group, no_dist=processes.size == 1)
    except CheckpointException as error:
        # It is a BaseException, and wraps the error of each process.
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError) or not isinstance(cause, Exception):
                raise cause from None
        why = "; ".join(str(cause) for cause in causes)
        raise OSError(f"PyTorch could not write to {folder}; its disk may be full: {why}") from error


def _read(tensors: dict[str, Tensor], folder: Path) -> None:
    """Read a checkpoint into tensors, in place; every process its part."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = dcp.HuggingFaceStorageReader(str(folder))
            dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        # All processes may have had the same error.
        causes = "; ".join(dict.fromkeys(str(cause) for cause, _ in error.failures.values()))
        raise UserError(f"cannot load {folder}: {causes}") from error
