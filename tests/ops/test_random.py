"""The cases, and shapes and geometries that nobody thought of, against the oracle in float64: the choice exactly."""

import dataclasses
import random

import pytest
import torch

from tests.ops.cases import CASES, Case, draw, geometry
from trifocal import nsa_attention, ops
from trifocal.testing import oracle
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import assert_close


def any_case(seed):
    """A valid geometry and shapes that fit it, small enough for the oracle."""
    rng = random.Random(seed)
    stride = rng.choice([1, 2, 3, 4, 5])
    overlap = rng.randint(1, 4)
    selection = stride * rng.randint(overlap, overlap + 3)
    n_init, n_local = rng.choice([(0, 1), (1, 0), (1, 1), (1, 2), (2, 2), (0, 3), (3, 0)])
    sizes = geometry(
        stride * overlap,
        stride,
        selection,
        n_init + n_local + rng.randint(0, 3),
        n_init,
        n_local,
        rng.choice([1, 2, 7, selection, 40, 1000]),
    )
    groups = rng.choice([1, 2, 3])
    case = Case(
        f"seed {seed}",
        sizes,
        rng.randint(1, 40),
        heads=groups * rng.choice([1, 2, 3, 8 if groups == 1 else 2]),
        groups=groups,
        dim=rng.choice([1, 2, 5, 8]),
        value_dim=rng.choice([1, 3, 8]),
    )
    kind = rng.choice(["packed", "batch", "fewer queries"])
    if kind == "packed":
        borders = sorted(rng.sample(range(1, case.queries), min(rng.randint(0, 5), case.queries - 1)))
        lengths = tuple(end - start for start, end in zip([0, *borders], [*borders, case.queries], strict=True))
        return dataclasses.replace(case, lengths=lengths)
    if kind == "batch":
        return dataclasses.replace(case, batch=rng.randint(1, 3))
    return dataclasses.replace(case, keys=case.queries + rng.randint(1, 30))


@pytest.mark.parametrize("case", [*CASES, *map(any_case, range(10))], ids=lambda case: case.why)
def test_the_whole_attention_and_its_choice(case):
    inputs = draw(case, seed=1).leaves()
    exact = type(inputs)(*inputs).leaves()
    rules = {"lengths": case.document_lengths}
    o_cmp, lse = ops.compressed_attention(
        *inputs[:3], case.geometry, num_keys=case.num_keys, cu_seqlens=case.cu_seqlens, backend="reference"
    )
    o_cmp_exact, lse_exact = oracle.compressed_attention(*exact[:3], case.geometry, num_keys=case.num_keys, **rules)
    assert_close("o_cmp", o_cmp, o_cmp_exact, torch.float64)
    assert_close("lse", lse, lse_exact, torch.float64)
    chosen = ops.select_blocks(
        *inputs[:2], lse, case.geometry, num_keys=case.num_keys, cu_seqlens=case.cu_seqlens, backend="reference"
    )
    expected = oracle.select_blocks(*exact[:2], lse_exact, case.geometry, num_keys=case.num_keys, **rules)
    assert chosen.dtype == torch.int32 and not chosen.requires_grad
    assert torch.equal(chosen, expected)
    o = nsa_attention(*inputs, case.geometry, cu_seqlens=case.cu_seqlens, backend="reference")
    o_exact = oracle.nsa_attention(*exact, case.geometry, **rules)
    assert_close("o", o, o_exact, torch.float64)
    upstream = cotangent(o)
    for name, a, e in zip(
        inputs._fields,
        torch.autograd.grad(o, inputs, upstream, materialize_grads=True, allow_unused=True),
        torch.autograd.grad(o_exact, exact, upstream, materialize_grads=True, allow_unused=True),
        strict=True,
    ):
        assert_close(f"gradient of {name}", a, e, torch.float64)
    # The same keys in all branches, compressed by their mean.
    k, v = exact.k_slc, exact.v_slc
    means = (oracle.mean_compress(x, case.geometry, case.document_lengths) for x in (k, v))
    o = ops.nsa(inputs.q, inputs.k_slc, inputs.v_slc, inputs.gates, case.geometry, cu_seqlens=case.cu_seqlens)
    o_exact = oracle.nsa_attention(exact.q, *means, k, v, k, v, exact.gates, case.geometry, **rules)
    assert_close("o of nsa", o, o_exact, torch.float64)
