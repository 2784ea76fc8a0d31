"""Weights as files that other tools read: `model.safetensors`, or shards with an index, beside `config.json`.

transformers reads the same folder: `config.json` names its classes, which are in `trifocal.hf`, and the file of
`write_modeling_file` imports them there. What transformers writes is read here too.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trifocal.errors import UserError
from trifocal.models.decoder import DecoderLM, meta_model
from trifocal.models.model_config import ModelConfig
from trifocal.paths import read_json

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
MODELING_FILE = "modeling_trifocal.py"
MODEL_TYPE = "trifocal"
AUTO_MAP = {
    auto: f"{Path(MODELING_FILE).stem}.{name}"
    for auto, name in (
        ("AutoConfig", "TrifocalConfig"),
        ("AutoModel", "TrifocalModel"),
        ("AutoModelForCausalLM", "TrifocalForCausalLM"),
        ("AutoModelForSequenceClassification", "TrifocalForSequenceClassification"),
    )
}
"""Where transformers finds the classes of a folder, by its own classes."""
SHARD_BYTES = 5 * 10**9
"""Bytes of a shard, unless one tensor is larger."""
_MODELING = '''"""The classes of this model for transformers, with trust_remote_code: pip install 'trifocal[hf]'"""

from trifocal.hf import TrifocalConfig, TrifocalForCausalLM, TrifocalForSequenceClassification, TrifocalModel

__all__ = ["TrifocalConfig", "TrifocalForCausalLM", "TrifocalForSequenceClassification", "TrifocalModel"]
'''
STANDARD_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
"""Keys of `ModelConfig` by transformers' names, which `config.json` has too: tools read them there."""


def save_weights(model: DecoderLM, folder: str | Path, *, shard_bytes: int = SHARD_BYTES, **settings: Any) -> None:
    """Write weights and configuration, for `load_weights` and for transformers; each file appears whole or not at all.

    Args:
        model: The model itself, without wrappers.
        folder: Made if it does not exist; files of the same names are replaced, and shards of an earlier model removed.
        shard_bytes: Larger weights are cut into files of at most this many bytes, unless a tensor is larger.
        settings: Further keys of `config.json`, as transformers names them.

    Raises:
        OSError: If the disk does not take them.
        UserError: If the model has other tensors than its configuration gives, as adapters and wrappers do.
    """
    folder, state, plain = Path(folder), model.state_dict(), meta_model(model.config).state_dict()
    given, expected = ({(name, getattr(x, "shape", None)) for name, x in one.items()} for one in (state, plain))
    if given != expected:
        raise UserError(
            f"the model has not the weights of its configuration: {min(name for name, _ in given ^ expected)} differs; "
            "give the model inside of wrappers, with adapters and parametrizations merged into its weights"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {exported_name(name): tensor.detach() for name, tensor in state.items()}
    content = {
        "model_type": MODEL_TYPE,
        "architectures": ["TrifocalForCausalLM"],
        "auto_map": AUTO_MAP,
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
        **settings,
        **{name: getattr(model.config, key) for name, key in STANDARD_NAMES.items()},
        "model": model.config.to_dict(),
    }
    shards = _shards(tensors, shard_bytes)
    stale = {*folder.glob("model-*-of-*.safetensors"), folder / INDEX_FILE, folder / WEIGHTS_FILE}
    partial = folder / ".weights.partial"
    # A process that was killed may have left it.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_json(partial / CONFIG_FILE, content)
        write_modeling_file(partial)
        for file, names in shards.items():
            write_tensors(partial / file, {name: tensors[name] for name in names}, {"format": "pt"})
        if len(shards) > 1:
            total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
            files = {name: file for file, names in shards.items() for name in names}
            _write_json(partial / INDEX_FILE, {"metadata": total, "weight_map": files})
        for path in partial.iterdir():
            stale.discard(path.replace(folder / path.name))
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for path in stale:
        path.unlink(missing_ok=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def exported_name(name: str) -> str:
    """Name of a parameter in files: transformers puts `model.` in front of all but the output projection."""
    return name if name.startswith("head.") else f"model.{name}"


def write_modeling_file(folder: Path) -> None:
    """Write the file by which transformers finds the classes of a folder, with `trust_remote_code`."""
    (folder / MODELING_FILE).write_text(_MODELING, encoding="utf-8")


def load_weights(folder: str | Path) -> DecoderLM:
    """Build the model of a folder that `save_weights` or `trifocal.hf` wrote, on the CPU.

    Raises:
        UserError: If a file is missing or broken, or a tensor does not fit the configuration; the message names it.
    """
    folder = Path(folder)
    config = read_config(folder)
    model = model_of_folder(config, folder)
    tensors = read_tensors(folder, model.state_dict(), exported_name)
    model.load_state_dict(tensors, assign=True)
    return model


def model_of_folder(config: ModelConfig, folder: Path) -> DecoderLM:
    """The model of a folder's files, without weights; UserError if these are fewer than its layers, maybe a million."""
    stored = len(shards_of(folder))
    if config.num_layers > stored:
        raise UserError(f"{folder}: got {stored} tensors, but {CONFIG_FILE} has {config.num_layers:,} layers")
    return meta_model(config)


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a folder's model; errors as in `load_weights`."""
    path = folder / CONFIG_FILE
    values = read_json(path)
    if values.get("model_type") != MODEL_TYPE:
        raise UserError(
            f'{path}: got the architecture "{values.get("model_type")}", expected "{MODEL_TYPE}"; '
            "trifocal convert makes a dense model sparse"
        )
    if not isinstance(values.get("model"), dict):
        raise UserError(f'{path} lacks the table "model", the sizes and choices of the model')
    config = ModelConfig.from_dict(values["model"])
    check_standard_names(values, config.to_dict())
    return config


def check_standard_names(values: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise UserError for a key under transformers' names that differs from the table of the model."""
    for name, key in STANDARD_NAMES.items():
        if name in values and key in model and values[name] != model[key]:
            raise UserError(
                f"{CONFIG_FILE}: got {name} = {values[name]!r}, but model.{key} = {model[key]!r}; give both one value"
            )


def _shards(tensors: dict[str, Tensor], shard_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors in each file, in their order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": names for number, names in enumerate(groups, start=1)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, for readers by the umask; tensors may be on any device. OSError if the disk is full."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        # The library's own error names the system's only in its text.
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    # The library makes it readable for its owner only.
    path.chmod(mode)


def read_tensors(
    folder: Path,
    expected: Mapping[str, Tensor],
    stored_name: Callable[[str], str],
    is_ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, or of its shards, with the shapes of `expected` and all in the type of
    `embedding.weight`; under `stored_name` in the files, which have no others but those that `is_ignored`.
    """
    shards = shards_of(folder)
    names = {name: stored_name(name) for name in expected}
    unknown = [name for name in shards.keys() - set(names.values()) if not is_ignored(name)]
    if unknown:
        raise UserError(f"{folder} has a tensor that {CONFIG_FILE} does not know: {min(unknown)}")
    tensors: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        opened = {path: stack.enter_context(_opened(path)) for path in dict.fromkeys(shards.values())}
        for name, parameter in expected.items():
            file_name, shape = names[name], list(parameter.shape)
            if file_name not in shards:
                raise UserError(f"{folder} lacks the tensor {file_name}")
            path = shards[file_name]
            try:
                stored = opened[path].get_slice(file_name)
                if stored.get_shape() != shape:
                    raise UserError(
                        f"{path}: the tensor {file_name} has the shape {stored.get_shape()}, but {CONFIG_FILE} makes "
                        f"it {shape}"
                    )
                tensor: Tensor = stored[:]
            except SafetensorError as error:
                raise UserError(f"{path} lacks the tensor {file_name}, or is broken: {error}") from error
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise UserError(f"{path}: the tensor {file_name} has the type {tensor.dtype}, which is not supported")
            tensors[name] = tensor
    return {name: tensor.to(tensors["embedding.weight"].dtype) for name, tensor in tensors.items()}


def shards_of(folder: Path) -> dict[str, Path]:
    """The file of each stored tensor, by its name there; UserError if a file is missing or broken."""
    index = folder / INDEX_FILE
    whole = folder / WEIGHTS_FILE
    if whole.is_file():
        with _opened(whole) as file:
            return dict.fromkeys(file.keys(), whole)
    if not index.is_file():
        raise UserError(f"{folder} has no safetensors: neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise UserError(f"{index} has no weight_map, which names the file of each tensor")
    for name in sorted(set(named.values())):
        if not re.fullmatch(r"[\w.-]+", name) or not (folder / name).is_file():
            raise UserError(f"{folder} lacks the shard {name}, which {INDEX_FILE} names")
    return {tensor: folder / name for tensor, name in named.items()}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {os.strerror(error.errno) if error.errno else error}") from error
