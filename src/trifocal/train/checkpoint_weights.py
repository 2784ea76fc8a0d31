"""Reading the weights of a checkpoint, and the model that they are of, without PyTorch's package for checkpoints.

That package brings PyTorch's distributed tensors and a computer algebra, most of a second in front of a command that
generates. A checkpoint's `.metadata` says where each tensor lies; here it is read as plain records, so that a file of
somebody else's cannot run code. Training goes on with the package itself (`checkpoint`).
"""

import io
import json
from operator import gt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trifocal.errors import UserError
from trifocal.models import ModelConfig
from trifocal.train.checkpoint_metadata import CHECKPOINT_PACKAGE, MetadataUnpickler, read_metadata
from trifocal.train.manifest import MANIFEST

# Fields that change how the model is computed, not its weights.
_FREE_MODEL_FIELDS = frozenset({"backend"})


def load_model_weights(path: Path, *, model: nn.Module, model_config: ModelConfig) -> None:
    """Give a model the weights of a verified checkpoint, on the CPU.

    Args:
        path: Of the checkpoint.
        model: Whatever device it is on, "meta" too; its tensors are replaced.
        model_config: Its configuration.

    Raises:
        UserError: If the checkpoint holds another model, names the differences; or if it cannot be read.
    """
    check_model(path, model_config)
    folder, prefix = path / "weights", "model."
    try:
        tensors = _read_tensors(folder, {prefix + name: tensor for name, tensor in model.state_dict().items()})
    except UserError as error:
        raise UserError(f"cannot load {folder}: {error}") from error
    model.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, assign=True)


def read_model_config(path: Path) -> ModelConfig:
    """The model configuration of a verified checkpoint."""
    return ModelConfig.from_dict(dict(json.loads((path / MANIFEST).read_bytes())["content"]["model"]))


def check_model(path: Path, model_config: ModelConfig) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UserError: Names the differences.
    """
    # Read as a configuration: JSON has no tuples, and an older checkpoint lacks keys that have defaults by now.
    saved = read_model_config(path).to_dict()
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


def _read_tensors(folder: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint in the shapes of those wanted; each may lie in several pieces.

    Raises:
        UserError: If a tensor is missing, is another, or cannot be read.
    """
    found: dict[str, Tensor] = {}
    missing = {name: like.numel() for name, like in wanted.items()}
    for name, offsets, place in _pieces(folder / ".metadata"):
        if name not in wanted:
            continue
        piece, shape = _read_piece(folder, name, place), wanted[name].shape
        ends = [first + size for first, size in zip(offsets, piece.shape, strict=False)]
        fits = len(offsets) == piece.dim() == len(shape) and min(offsets, default=0) >= 0
        if not fits or any(map(gt, ends, shape)):
            raise UserError(f"{name} is of another shape than {tuple(shape)}")
        if piece.shape == shape:
            found[name] = piece
        else:
            if name not in found:
                found[name] = torch.empty(shape, dtype=piece.dtype)
            found[name][tuple(map(slice, offsets, ends))] = piece.detach()
        missing[name] -= piece.numel()
    if lacking := [name for name, left in missing.items() if left]:
        raise UserError(f"it does not hold all of {lacking[0]}")
    return found


def _pieces(path: Path) -> list[tuple[str, tuple[int, ...], Any]]:
    """Name, first element and place of each piece of a tensor; values that are no tensors have no first element."""
    metadata = read_metadata(path, _RecordUnpickler)
    try:
        return [
            (index.fqn, tuple(index.offset), place)
            for index, place in metadata.storage_data.items()
            if getattr(index, "offset", None) is not None
        ]
    except (AttributeError, TypeError) as error:
        raise UserError(f"{path} is not the metadata of a checkpoint: {error}") from error


def _read_piece(folder: Path, name: str, place: Any) -> Tensor:
    file = folder / place.relative_path
    try:
        with file.open("rb") as stream:
            stream.seek(place.offset)
            content = stream.read(place.length)
        piece = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except Exception as error:
        # A broken file can raise any exception.
        raise UserError(f"{name} in {file} is not a tensor: {error}") from error
    if not isinstance(piece, Tensor):
        raise UserError(f"{name} in {file} is not a tensor but a {type(piece).__name__}")
    return piece


class _Record:
    """Stands for any class of PyTorch's package for checkpoints: keeps what it is given."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Metadata(_Record):
    """Of the whole checkpoint."""


class _RecordUnpickler(MetadataUnpickler):
    metadata_class = _Metadata

    def find_class(self, module: str, name: str) -> Any:
        self.check_class(module, name)
        if module.startswith(CHECKPOINT_PACKAGE):
            return _Metadata if name == "Metadata" else _Record
        return super().find_class(module, name)
