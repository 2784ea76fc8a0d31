"""Dense decoders in folders of Hugging Face, read without transformers: `config.json` and safetensors, sharded too.

| model_type | qkv_bias | o_bias | mlp_bias | qk_norm |
|---|---|---|---|---|
| llama | attention_bias | attention_bias | mlp_bias | no |
| mistral | no | no | no | no |
| qwen2 | yes | no | no | no |
| qwen3 | attention_bias | attention_bias | no | yes |
| smollm3 | attention_bias | attention_bias | mlp_bias | no |
| olmo2, olmo3 | attention_bias | attention_bias | no | over all heads |

`attention_dropout` is left out: it changes no output, and Trifocal trains without dropout. A layer with a sliding
window becomes a layer of type `"window"`; a Mistral has one in each layer, or where `layer_types` says so. OLMo's norms
stand behind attention and MLP, and the rope scaling of OLMo 3 is not for its window layers. Models, and options of
models, that a `DecoderLM` lacks are refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trifocal.errors import UserError
from trifocal.models.io import CONFIG_FILE, MODEL_TYPE, model_of_folder, read_tensors, shards_of
from trifocal.models.model_config import MAX_LAYERS, Attention, ModelConfig
from trifocal.nn import RopeScaling
from trifocal.paths import read_json

_OLMO = ("olmo2", "olmo3")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", *_OLMO)
# Defaults of transformers' configurations.
_HEAD_DIM = {"qwen3": 128}
_LONGEST = {"llama": 2048, "mistral": 131072, "olmo2": 2048, "olmo3": 2048}
_THETA = {"smollm3": 2e6, "olmo3": 5e5}
_KV_HEADS = {"smollm3": 4}
_SLIDING_WINDOW = 4096
_ORIGINAL = "original_max_position_embeddings"
_LAYER_TYPES: dict[str, Attention] = {"full_attention": "dense", "sliding_attention": "window"}
# Keys of rope parameters besides the fields of `RopeScaling`; mscale is part of yarn's attention factor.
_ROPE_KEYS = {"type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim"}
_ROPE_KEYS |= {field.name for field in fields(RopeScaling)}
# Parameters without which transformers does not load a type. It infers the others.
_ROPE_NEEDS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
_SETTINGS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
}
_NAMES_OF_NORMS_AFTER = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}


def is_hf_folder(folder: Path) -> bool:
    """Whether the folder's `config.json` has the `model_type` of a model that is not ours."""
    path = folder / CONFIG_FILE
    return path.exists() and read_json(path).get("model_type", MODEL_TYPE) != MODEL_TYPE


def read_hf_model(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration of a dense model and its tensors, in the embedding's type, under the names of `DecoderLM`."""
    config = read_hf_config(folder)
    expected = model_of_folder(config, folder).state_dict()
    head = hf_name("head.weight")
    twice = config.tie_embeddings and head in shards_of(folder)
    if twice:
        expected["head.weight"] = expected["embedding.weight"]
    # Old files hold the frequencies too.
    tensors = read_tensors(
        folder,
        expected,
        lambda name: hf_name(name, config.norm_after),
        lambda name: name.endswith("rotary_emb.inv_freq"),
    )
    # transformers does not tie them then.
    if twice and not torch.equal(tensors.pop("head.weight"), tensors["embedding.weight"]):
        raise UserError(
            f"{folder / CONFIG_FILE} has tie_word_embeddings = true, but {head} differs from the embeddings; set it to "
            "false"
        )
    return config, tensors


def read_hf_settings(folder: Path) -> dict[str, Any]:
    """The longest sequence and the special tokens, which transformers uses and a `DecoderLM` does not."""
    found = read_json(folder / CONFIG_FILE)
    return {name: found[name] for name in _SETTINGS if found.get(name) is not None}


def read_hf_config(folder: Path) -> ModelConfig:
    """Only the configuration; errors as in `read_hf_model`."""
    path = folder / CONFIG_FILE
    found = read_json(path)
    kind = found.get("model_type")
    if kind not in MODEL_TYPES:
        raise UserError(
            f"{path}: the architecture {kind!r} is not supported; it must be one of {', '.join(MODEL_TYPES)}"
        )
    if found.get("quantization_config"):
        raise UserError(f"{path}: quantised weights (quantization_config) are not supported")
    if found.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"{path}: the activation {found['hidden_act']!r} (hidden_act) is not supported; it must be 'silu'"
        )
    try:
        heads, dim = int(found["num_attention_heads"]), int(found["hidden_size"])
        head_dim = found.get("head_dim") or _HEAD_DIM.get(kind) or dim // heads
        attention_bias = bool(found.get("attention_bias", False)) and kind in ("llama", "qwen3", "smollm3", *_OLMO)
        layers, window = _layers(found, kind)
        return ModelConfig(
            vocab_size=found["vocab_size"],
            dim=dim,
            num_layers=len(layers),
            num_heads=heads,
            num_kv_heads=found.get("num_key_value_heads", _KV_HEADS.get(kind)) or heads,
            head_dim=head_dim,
            value_dim=head_dim,
            mlp_dim=found["intermediate_size"],
            attention="dense",
            layer_types=() if set(layers) == {"dense"} else layers,
            sliding_window=window,
            qk_norm=kind in ("qwen3", *_OLMO),
            qk_norm_all_heads=kind in _OLMO,
            norm_after=kind in _OLMO,
            qkv_bias=attention_bias or kind == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(found.get("mlp_bias", False)) and kind in ("llama", "smollm3"),
            norm_eps=float(found.get("rms_norm_eps", 1e-5 if kind in _OLMO else 1e-6)),
            tie_embeddings=bool(found.get("tie_word_embeddings", kind == "smollm3")),
            unrotated_layers=_unrotated(found, len(layers)) if kind == "smollm3" else (),
            unscaled_layers=tuple(i for i, layer in enumerate(layers) if layer == "window" and kind == "olmo3"),
            **_rope(found, kind),
        )
    except KeyError as error:
        raise UserError(f"{path} lacks the key {error.args[0]!r}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        # The configuration refuses a value, or a value has a wrong type.
        raise UserError(f"{path}: {error}") from error


def _layers(found: Mapping[str, Any], kind: str) -> tuple[tuple[Attention, ...], int]:
    """The attention of each layer, and the keys of a sliding window; 0 without one."""
    count = int(found["num_hidden_layers"])
    if not 1 <= count <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be from 1 to {MAX_LAYERS:,}, got {count:,}")
    window = found.get("sliding_window", None if kind == "smollm3" else _SLIDING_WINDOW)
    switched_off = kind in ("qwen2", "qwen3", "smollm3") and not found.get("use_sliding_window", False)
    if switched_off or kind in ("llama", "olmo2"):
        window = None
    named = found.get("layer_types")
    if named is None and kind == "smollm3":
        unrotated = _unrotated(found, count) if window else ()
        named = ["sliding_attention" if index in unrotated else "full_attention" for index in range(count)]
    if named is None and kind == "olmo3":
        named = ["full_attention" if index % 4 == 3 else "sliding_attention" for index in range(count)]
    if named is None or kind in ("llama", "olmo2"):
        first = (0 if kind == "mistral" else found.get("max_window_layers", 28)) if window else count
        named = ["full_attention"] * min(first, count) + ["sliding_attention"] * max(0, count - first)
    if len(named) != count:
        raise ValueError(f"layer_types names {len(named)} layers, but num_hidden_layers is {count}")
    unknown = [name for name in named if name not in _LAYER_TYPES]
    if unknown:
        raise ValueError(f"the layer type {unknown[0]!r} is not supported")
    if "sliding_attention" in named and not window:
        raise ValueError("layer_types has sliding_attention, but sliding_window is not set")
    kinds = tuple(_LAYER_TYPES[name] for name in named)
    return kinds, int(window) if window and "window" in kinds else 0


def _unrotated(found: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Layers without rotary positions: every fourth, unless the file says others."""
    rotated = found.get("no_rope_layers")
    if rotated is None:
        interval = found.get("no_rope_layer_interval", 4)
        rotated = [(index + 1) % interval for index in range(count)]
    return tuple(index for index, rotates in enumerate(rotated[:count]) if not rotates)


def _rope(found: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; values that transformers infers are written out."""
    # People add rope_scaling to a file that has rope_parameters; transformers then takes what was added.
    given = dict(found.get("rope_scaling") or found.get("rope_parameters") or {})
    if kind == "olmo3":
        given = _rope_of_full_attention(found)
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError("rope parameters that differ between layers are not supported")
    unknown = sorted(set(given) - _ROPE_KEYS)
    if unknown:
        raise ValueError(f"the rope parameter {unknown[0]!r} is not supported")
    rope_type = given.get("rope_type") or given.get("type") or "default"
    missing = [name for name in _ROPE_NEEDS.get(rope_type, ()) if given.get(name) is None]
    if missing:
        raise ValueError(f"the rope type {rope_type!r} needs the parameter {missing[0]!r}")
    theta = float(given.get("rope_theta") or found.get("rope_theta") or _THETA.get(kind, 10000.0))
    partial = given.get("partial_rotary_factor") or found.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"the partial_rotary_factor {partial} is not supported")
    if rope_type == "default":
        return {"rope_theta": theta}
    longest = found.get("max_position_embeddings") or _LONGEST.get(kind, 32768)
    original = found.get(_ORIGINAL) or given.get(_ORIGINAL) or longest
    factor = given.get("factor")
    if factor is None and rope_type == "yarn":
        factor = longest / original
    given |= {"factor": factor, "attention_factor": _attention_factor(given, rope_type, factor), _ORIGINAL: original}
    chosen = {name: given[name] for name in RopeScaling.fields_of(rope_type) if given.get(name) is not None}
    for name in chosen.keys() - {"truncate", _ORIGINAL}:
        chosen[name] = float(chosen[name])
    # The type is known: `fields_of` refuses others.
    return {"rope_theta": theta, "rope_scaling": RopeScaling(rope_type=rope_type, **chosen)}  # type: ignore[arg-type]


def _rope_of_full_attention(found: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters of OLMo 3's layers with full attention. Those of its window layers must be the same, unscaled."""
    of_types = dict(found.get("rope_parameters") or {})
    full = {**(of_types.get("full_attention") or {}), **(found.get("rope_scaling") or {})}
    full.setdefault("rope_theta", found.get("rope_theta", _THETA["olmo3"]))
    window = {"rope_type": "default", "rope_theta": _THETA["olmo3"], **(of_types.get("sliding_attention") or {})}
    if window != {"rope_type": "default", "rope_theta": full["rope_theta"]}:
        raise ValueError(f"the rope parameters {window} of sliding_attention are not supported")
    return full


def _attention_factor(given: Mapping[str, Any], rope_type: str, factor: float | None) -> float | None:
    """The factor that is given, or that of yarn's two mscales; None: by the type's formula."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    scales = given.get("mscale"), given.get("mscale_all_dim")
    if rope_type != "yarn" or not all(scales) or factor is None:
        return None
    above, below = (0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0 for scale in scales)  # type: ignore[operator]
    return above / below


def hf_name(name: str, norm_after: bool = False) -> str:
    """Name of a tensor of a dense `DecoderLM` in Hugging Face's models; `norm_after` as in its configuration."""
    names = _NAMES | _NAMES_OF_NORMS_AFTER if norm_after else _NAMES
    words = [names.get(word, word) for word in name.split(".")]
    if words[0] == "blocks":
        words[0] = "model.layers"
    return ".".join(words)
