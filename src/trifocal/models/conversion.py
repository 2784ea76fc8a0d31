"""Models from dense ones: the same weights, with another attention, new gates and a new index where asked for."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from trifocal.errors import UserError
from trifocal.models.decoder import meta_model
from trifocal.models.layers import draw_weights
from trifocal.models.model_config import Attention, Chooser, ModelConfig
from trifocal.nn.chooser import first_index
from trifocal.nn.gate import NUM_BRANCHES
from trifocal.ops import Geometry

Target = Literal["mix", "selected", "nsa", "dense"]
MIX: tuple[Attention, ...] = ("window", "window", "window", "selected")
"""The attention of layers in the mix; it repeats."""
FIRST_GATE = 1 / NUM_BRANCHES
"""Each gate of a converted layer begins here: no gate is closed, and together they weigh as much as dense attention."""


def converted_config(
    config: ModelConfig,
    to: Target,
    geometry: Geometry,
    *,
    dense_layers: Collection[int] = (),
    shared_kv: bool = False,
    chooser: Chooser = "compressed",
) -> ModelConfig:
    """The configuration of a converted model. In `"mix"` three layers of four get the geometry's window, and the fourth
    selects blocks; window layers and `dense_layers` stay; with `shared_kv` the branches of `"nsa"` share one
    projection.
    """
    kinds = config.attention_of_layers
    sparse = [index for index, kind in enumerate(kinds) if kind in ("nsa", "selected")]
    if sparse:
        raise UserError(f"layer {sparse[0]} has the type {kinds[sparse[0]]!r} already; only dense models are converted")
    unknown = sorted(index for index in dense_layers if not 0 <= index < len(kinds))
    if unknown:
        raise UserError(f"--dense-layers names layer {unknown[0]}, but the model has layers 0 to {len(kinds) - 1}")
    if to == "dense":
        if dense_layers:
            raise UserError("--dense-layers goes with another --to: with dense all layers stay as they are")
        return config
    if to == "mix" and "window" in kinds:
        raise UserError("the model has layers with a sliding window already: --to selected makes the others sparse")
    pattern = MIX if to == "mix" else (to,)
    layers = tuple(
        pattern[i % len(pattern)] if kind == "dense" and i not in dense_layers else kind for i, kind in enumerate(kinds)
    )
    # Not the window of the new geometry.
    window = config.window_of_layers
    if set(kinds) == {"window"}:
        # Sparse as they are.
        return replace(config, attention="window", layer_types=(), sliding_window=window)
    if pattern[-1] not in layers:
        raise UserError("no layer is left to select blocks: all of them stay dense or have a sliding window")
    if to == "mix":
        window = geometry.window_size
    if shared_kv and to != "nsa":
        raise UserError("--shared-kv goes with --to nsa; selected layers have one projection of keys and values anyway")
    alike = set(layers) == {to}
    return replace(
        config,
        attention=pattern[-1],
        layer_types=() if alike else layers,
        sliding_window=window if "window" in layers else config.sliding_window,
        geometry=geometry,
        compressor="mean",
        chooser=chooser,
        shared_kv=shared_kv,
    )


def convert_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a converted model, from those of the dense one by name and the configuration of
    `converted_config`.

    Queries, outputs, norms, MLPs and embeddings stay. Each branch of an NSA layer gets the dense keys and values, or
    all share them; its gates begin at FIRST_GATE for every input. An index begins as the layer's own queries and keys
    (`trifocal.nn.chooser.first_index`); where these are normed, which an index is not, it is drawn, the same for every
    call.
    """
    converted = dict(tensors)
    expected = meta_model(config).state_dict()
    # The model's other weights give the type.
    like, generator = tensors["embedding.weight"], torch.Generator().manual_seed(0)
    for name, parameter in expected.items():
        if ".attention.index." in name:
            converted[name] = _first_index(tensors, name, parameter.shape, config, generator).to(like.dtype)
        elif ".attention.gate." in name:
            value = torch.logit(torch.tensor(FIRST_GATE)).item() if name.endswith(".bias") else 0.0
            converted[name] = torch.full(parameter.shape, value, dtype=like.dtype)
        elif converted[name].shape != parameter.shape:
            # Keys or values, side by side for the branches.
            copies = parameter.shape[0] // converted[name].shape[0]
            converted[name] = converted[name].repeat(copies, *[1] * (parameter.ndim - 1))
    return converted


def _first_index(
    tensors: Mapping[str, Tensor], name: str, shape: torch.Size, config: ModelConfig, generator: torch.Generator
) -> Tensor:
    """The first weights of one map of an index, fp32."""
    if config.qk_norm:
        drawn = torch.empty(shape)
        draw_weights(drawn, name, config, generator)
        return drawn
    layer, part = name.split("index.")
    q, k = (tensors[f"{layer}{projection}.weight"].float() for projection in ("q_proj", "k_proj"))
    queries, key = first_index(q, k, config.num_kv_heads, config.head_dim)
    return queries if part == "query_proj.weight" else key
