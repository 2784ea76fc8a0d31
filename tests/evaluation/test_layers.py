"""Which layers need all of the past: by what a conversion changes, not by how numbers are rounded."""

import random

import pytest
import torch

from tests.devices import DEVICES, WIDE
from trifocal.data import make_tokenizer
from trifocal.evaluation.layers import layers_by_harm
from trifocal.models import save_weights
from trifocal.ops import Geometry
from trifocal.testing.small_models import make_model, small_config


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_whose_blocks_cover_the_row_does_no_harm(device, tmp_path):
    # Layers with a window stay what they are.
    config = small_config(layer_types=("dense", "window", "dense"), num_layers=3, vocab_size=257, **WIDE)
    model = make_model(config, torch.device("cpu")).bfloat16()
    save_weights(model, tmp_path / "dense", max_position_embeddings=512)
    make_tokenizer("bytes").save(tmp_path / "dense")
    (tmp_path / "text").mkdir()
    for name in "abcd":
        text = "".join(random.Random(name).choices("word \n", k=2000))
        (tmp_path / "text" / f"{name}.txt").write_text(text)
    data = {"source": f"text:{tmp_path / 'text'}", "validation_fraction": 0.5}

    def harm(blocks, **sizes):
        geometry = Geometry(num_selected_blocks=blocks, **sizes)
        found = layers_by_harm(tmp_path / "dense", "selected", geometry, data, 512, torch.device(device), print)
        assert [*found] == [0, 2]
        return found.values()

    # Two roundings to bf16 are 1e-5 and more apart.
    assert max(harm(8)) < 1e-7
    assert min(harm(3)) > 1e-4
    first, last = harm(4)
    assert min(first, last) > 1e-4 and first != last, "one layer at a time"
    assert [*harm(4, compression_block_size=64)] == [first, last], "no compressed key chooses"
