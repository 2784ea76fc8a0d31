"""Baselines compute plain attention where they are dense, and the right mask where they are not."""

import importlib

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lib import baselines
from lib.baselines import dense_attention
from lib.shapes import AttentionShape, make_inputs
from trifocal.ops import Geometry

GEOMETRY = Geometry(8, 4, 16, 4, 1, 1, 16)


def test_dense_attention_is_causal_attention():
    shape = AttentionShape("", 2, 150, 4, 2, 16, 8)
    inputs = make_inputs(shape, GEOMETRY, torch.device("cpu"), torch.float32)
    candidate = dense_attention("flash", inputs, shape)
    o = candidate.attend(*candidate.leaves)
    q, k, v = (x.transpose(1, 2) for x in candidate.leaves)
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(o, expected)
    assert "keys" in candidate.note


@pytest.mark.parametrize("tokens, reach", [(512, 512), (512, 200), (700, 300)])
def test_flex_mask_marks_the_blocks_that_pytorch_marks(tokens, reach):
    flex = importlib.import_module("torch.nn.attention.flex_attention")

    def visible(b, h, query, key):
        return (query >= key) & (query - key < reach)

    ours = baselines._block_mask(flex, tokens, reach, visible, torch.device("cpu"))
    theirs = flex.create_block_mask(visible, None, None, tokens, tokens, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    # Our full blocks must be full there; theirs may find more full ones at the end of the sequence.
    full = [mask.full_kv_num_blocks.sum().item() for mask in (ours, theirs)]
    assert full[0] <= full[1] and (tokens % 128 or full[0] == full[1])
