"""A GGUF as a folder of Hugging Face: transformers takes its weights out of their quantisation."""

import importlib.util
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trifocal.errors import UserError, one_line
from trifocal.models.hf_reader import MODEL_TYPES
from trifocal.models.io import CONFIG_FILE, WEIGHTS_FILE, write_tensors
from trifocal.nn import RopeScaling, rotary_frequencies

_ROPE_FACTORS = "rope_freqs.weight"
# Names of rope parameters in transformers; a name that is not here is refused with the configuration.
_ROPE_NAMES = {"type": "rope_type", "original_context_length": "original_max_position_embeddings"}
# All Llamas have these besides a factor; a GGUF has only what follows of them, for each pair.
_LLAMA3 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write_folder_of_gguf(file: Path, folder: Path) -> None:
    """Write `config.json`, weights in fp32 and the tokenizer into a folder that exists. UserError if a package is
    missing, tensors are missing or would be left out, or transformers cannot read the file: an architecture or
    quantisation that it does not know, for example.
    """
    # transformers reads it with both.
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{file}: a GGUF needs more packages: pip install {' '.join(missing)}")
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except Exception as error:  # Its readers raise many kinds of errors.
        raise UserError(f"{file}: transformers cannot read this GGUF: {one_line(error)}") from error
    # Its own save_pretrained refuses weights that were quantised once.
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    if config["model_type"] in MODEL_TYPES:
        from gguf import GGUFReader

        reader = GGUFReader(file)
        _check(file, reader, config, tensors)
        config["rope_parameters"] |= _rope_parameters(file, reader, config)
    write_tensors(folder / WEIGHTS_FILE, tensors, {"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")


def _check(file: Path, reader: Any, config: dict[str, Any], read: Collection[str]) -> None:
    """Refuse a file unless its tensors are those that transformers `read`, by its names for them: it draws weights for
    those that are missing, and leaves out those that it does not know.
    """
    import gguf

    kind = config["model_type"]
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    expected = {names.get_name(name, (".weight", ".bias")) or name for name in read}
    stored = {tensor.name for tensor in reader.tensors}
    if unknown := sorted(stored - expected - {_ROPE_FACTORS}):
        raise UserError(f"{file}: transformers cannot read the tensor {unknown[0]}; convert the model's safetensors")
    if absent := sorted(expected - stored):
        raise UserError(
            f"{file} lacks the tensor {absent[0]}; parts of a GGUF are joined first: llama-gguf-split --merge"
        )
    if (key := f"{kind}.attention.head_count_kv") not in reader.fields:
        # transformers leaves queries and keys in llama.cpp's order then.
        raise UserError(f"{file} lacks the key {key}; convert the model's safetensors")


def _rope_parameters(file: Path, reader: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling in a file, which transformers leaves out, under its names; empty if there is none."""
    prefix = f"{config['model_type']}.rope.scaling."
    given = {key.removeprefix(prefix): reader.fields[key].contents() for key in reader.fields if key.startswith(prefix)}
    given.pop("finetuned", None)
    if (key := f"{config['model_type']}.rope.scale_linear") in reader.fields:
        # In files from before there were other kinds.
        given.setdefault("factor", reader.fields[key].contents())
    if "factor" in given:
        given.setdefault("type", "linear")
    if given.get("type") == "none":
        given = {}
    if stored := [tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS]:
        factors = torch.from_numpy(stored[0].data.copy()).double()
        given = {"type": "llama3", "factor": round(factors.max().item(), 4), **_LLAMA3}
        sizes = 2 * len(factors), config["rope_parameters"]["rope_theta"]
        scaled = rotary_frequencies(*sizes, RopeScaling(rope_type="llama3", factor=given["factor"], **_LLAMA3))  # type: ignore[arg-type]
        if not torch.allclose(rotary_frequencies(*sizes)[0] / scaled[0], factors, rtol=1e-4):
            raise UserError(f"{file}: the rope factors of {_ROPE_FACTORS} are not those of a Llama")
    return {_ROPE_NAMES.get(name, name): value for name, value in given.items()}
