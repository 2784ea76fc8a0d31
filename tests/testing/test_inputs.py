"""Random inputs: the same numbers in every precision, and leaves that keep their strides."""

import torch

from tests.ops.cases import USUAL
from trifocal.testing.inputs import Inputs, attention_inputs, cotangent


def test_inputs_of_another_dtype_are_the_same_numbers_rounded():
    exact = attention_inputs(USUAL, 9)
    for name, a, b in zip(Inputs._fields, exact, attention_inputs(USUAL, 9, dtype=torch.float16), strict=True):
        assert b.dtype == torch.float16
        # Sigmoid is computed in the inputs' own precision.
        assert torch.allclose(a.half(), b, rtol=0, atol=1e-3 if name == "gates" else 0), name
    assert torch.equal(cotangent(exact.q).half(), cotangent(exact.q.half()))
    assert not torch.equal(exact.q, attention_inputs(USUAL, 9, seed=1).q)


def test_shapes():
    sizes = {"batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "value_dim": 5}
    shapes = [list(x.shape) for x in attention_inputs(USUAL, 2, **sizes, num_keys=20, num_window_keys=12)]
    # l = 8, d = 4: 20 keys hold blocks at 0, 4, 8 and 12.
    keys = [[2, count, 3, dim] for count in (4, 20, 12) for dim in (4, 5)]
    assert shapes == [[2, 2, 6, 4], *keys, [2, 2, 6, 3]]
    # Documents of 7, 8 and 13 tokens hold none, one and two.
    assert attention_inputs(USUAL, 28, document_lengths=(7, 8, 13)).k_cmp.shape[1] == 3
    assert attention_inputs(USUAL, 28, on_device=True).k_cmp.shape[1] == USUAL.num_compressed_blocks(28)


def test_leaves_keep_strides_and_collect_gradients_of_their_own():
    inputs = attention_inputs(USUAL, 5)
    strided = inputs._replace(q=torch.zeros(1, 5, 4, 32, dtype=torch.float64)[..., :16])
    leaves = strided.leaves()
    assert leaves.q.stride() == strided.q.stride() and leaves.q.is_leaf
    assert all(x.requires_grad for x in leaves) and not any(x.requires_grad for x in strided)
    assert strided.leaves(torch.float32).q.dtype == torch.float32
