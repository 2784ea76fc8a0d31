"""Weights as files that other tools read: `model.safetensors` beside `config.json`."""

import errno
import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trifocal.errors import UserError
from trifocal.models.decoder import DecoderLM
from trifocal.models.model_config import ModelConfig
from trifocal.paths import user_path

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
# A run has the first of these, a checkpoint the second.
_TRAINERS_FILES = ("config.toml", "manifest.json")


def save_weights(model: DecoderLM, folder: str | Path) -> None:
    """Write weights and configuration; each file appears whole or not at all.

    Args:
        model: The model itself, without wrappers.
        folder: Made if it does not exist; files of the same names are replaced.

    Raises:
        OSError: If the disk does not take them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config_text = json.dumps(model.config.to_dict(), indent=2) + "\n"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    partial_config, partial_weights = folder / f".{CONFIG_FILE}.partial", folder / f".{WEIGHTS_FILE}.partial"
    partial_config.write_text(config_text, encoding="utf-8")
    try:
        save_file(tensors, partial_weights, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library's own error names the system's only in its text.
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(partial_weights)) from error
    # The library makes the file readable for its owner alone, whatever the umask.
    partial_weights.chmod(partial_config.stat().st_mode)
    partial_config.replace(folder / CONFIG_FILE)
    partial_weights.replace(folder / WEIGHTS_FILE)


def load_model(folder: str | Path) -> DecoderLM:
    """Build a trained model, on the CPU.

    Args:
        folder: A folder that `save_weights` wrote, such as `weights` of a run; or a run (its newest checkpoint); or one
            of its checkpoints.

    Raises:
        UserError: If a file is missing or broken, or a tensor does not fit the configuration; the message names it.
    """
    folder = user_path(folder, "the folder of the model")
    if not _is_there(folder / CONFIG_FILE) and any(_is_there(folder / name) for name in _TRAINERS_FILES):
        from trifocal.train.pretrained import open_pretrained

        with open_pretrained(folder) as found:
            return found.model()
    return load_weights(folder)


def _is_there(path: Path) -> bool:
    """Whether there is such a file, as far as this user may know; if not, reading it gives the reason."""
    try:
        return path.exists()
    except OSError:
        return True


def load_weights(folder: Path) -> DecoderLM:
    """Build the model that `save_weights` wrote; errors as in `load_model`."""
    config = read_config(folder)
    with torch.device("meta"):
        model = DecoderLM(config)
    model.load_state_dict(_read_tensors(model, folder / WEIGHTS_FILE), assign=True)
    return model


def read_config(folder: Path) -> ModelConfig:
    """The configuration that `save_weights` wrote; errors as in `load_model`."""
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the model's configuration {path}: {os.strerror(error.errno or 0)}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold one JSON object, got {type(values).__name__}")
    return ModelConfig.from_dict(values)


def _read_tensors(model: DecoderLM, path: Path) -> dict[str, Tensor]:
    """The tensors of a file that has exactly those of the model, in its shapes."""
    tensors = {}
    try:
        if not path.is_file():
            raise UserError(f"the model's weights {path} do not exist")
        with safe_open(path, framework="pt") as file:
            unknown = set(file.keys())
            for name, parameter in model.state_dict().items():
                if name not in unknown:
                    raise UserError(f"{path} lacks the tensor {name}; the weights are of another model")
                shape = file.get_slice(name).get_shape()
                if shape != list(parameter.shape):
                    raise UserError(
                        f"{path}: tensor {name} has the shape {shape}, but the configuration makes it "
                        f"{list(parameter.shape)}"
                    )
                unknown.discard(name)
                tensors[name] = file.get_tensor(name)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"cannot read the model's weights {path}: {why}") from error
    except SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error
    if unknown:
        raise UserError(f"{path} has a tensor that the configuration does not know: {min(unknown)}")
    return tensors
