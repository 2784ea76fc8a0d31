"""Which layers of a dense model need all of the past: how far the model moves where one of them becomes sparse."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trifocal.data import DataConfig
from trifocal.data.loader import read_validation
from trifocal.evaluation.position_loss import PositionLosses
from trifocal.models.conversion import Target, convert_tensors, converted_config
from trifocal.models.decoder import meta_model
from trifocal.ops import Geometry
from trifocal.train.checkpoint.pretrained import open_pretrained
from trifocal.train.step.step import batch_loss

_ROWS = 2


@torch.no_grad()
def layers_by_harm(
    folder: Path,
    to: Target,
    geometry: Geometry,
    data: dict[str, Any],
    sequence_length: int,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[int, float]:
    """The divergence (KL) of a dense model from itself with one layer converted, by layer, in nats a token. The layer
    chooses its blocks by its own attention, the best choice there is. In fp32: a hundred times as much as most layers'
    1e-5 is what two roundings to bf16 are apart.
    """
    found = open_pretrained(folder)
    dense, tokenizer = found.model().float().to(device).eval(), found.tokenizer()
    batches = read_validation(
        DataConfig(**data),
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        sequences=_ROWS,
        at_once=1,
        vocab_size=dense.config.vocab_size,
    )
    kinds_before = dense.config.attention_of_layers
    whole = converted_config(dense.config, to, geometry)
    harm: dict[int, float] = {}
    for layer, kind in enumerate(whole.attention_of_layers):
        if kinds_before[layer] != "dense":
            continue
        kinds = (*kinds_before[:layer], kind, *kinds_before[layer + 1 :])
        config = replace(whole, layer_types=kinds, selection="exact")
        model = meta_model(config)
        # It shares the weights of the other layers.
        model.load_state_dict(convert_tensors(dense.state_dict(), config), assign=True)
        losses = PositionLosses(model.eval(), [0, sequence_length], device, beside=dense)
        for batch in batches:
            batch_loss(losses, batch, device)
        harm[layer] = float(losses.compared[0, 1] / losses.counts[0])
        say(f"layer {layer} as {kind}: {harm[layer]:.5f} nats a token from the dense model")
    return harm
