"""A decoding layer's attention, timed on a CPU."""

import pytest
import torch

from lib.decode_layer import LayerShape, bench_layers
from lib.recorder import Recorder
from tests.ops.cases import USUAL

SHAPE = LayerShape(2, 300, 4, 2, 8, 6)


def rows():
    recorder = Recorder(60, lambda text: None, lambda: None)
    bench_layers(recorder, torch.device("cpu"), torch.float32, shapes=[SHAPE], geometry=USUAL, seconds=0.01)
    return recorder.rows


def test_both_attentions_are_rows():
    nsa, dense = rows()
    for row in (nsa, dense):
        assert row["status"] == "ok" and row["layer_ms"] > 0 and row["sequences"] == 2 and row["tokens"] == 300
        assert row["floor_ms"] * row["copy_tb_s"] * 1e9 == pytest.approx(row["gib"] * 2**30)
    # Sequences, groups, keys, D + V, bytes: all tokens, or compressed, chosen and window ones.
    assert dense["gib"] * 2**30 == 2 * 2 * 300 * 14 * 4
    assert nsa["gib"] * 2**30 == 2 * 2 * (74 + (3 * 16 - 4) + 11) * 14 * 4
