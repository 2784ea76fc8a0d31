"""Every operation against the float64 oracle: values and every gradient, in every float type; see `test_random` too."""

import pytest
import torch

from tests.ops.cases import DTYPES, Case, draw, named
from trifocal import nsa_attention, ops
from trifocal.testing import oracle
from trifocal.testing.inputs import cotangent
from trifocal.testing.tolerances import assert_close, error

REFERENCE = {"backend": "reference"}
# Rows and packs, whole and their last queries, with short blocks and many heads a group.
EACH = (
    "odd length", "chunked", "no compressed block", "packed: long first", "packed: the last queries",
)  # fmt: skip
ROUNDED = [(named(why), dtype) for why in ("one head", "chunked", "packed: long first") for dtype in DTYPES[1:]]
each_case_and_dtype = pytest.mark.parametrize(
    ("case", "dtype"),
    [*((named(why), torch.float64) for why in EACH), *ROUNDED],
    ids=lambda value: value.why if isinstance(value, Case) else str(value).removeprefix("torch."),
)


def compare(dtype, leaves, actual, expected, cotangents):
    """Compare outputs and, through the cotangents, the gradients with respect to all leaves, all by name."""
    for name, output in actual.items():
        assert_close(name, output, expected[name], dtype)
    names = list(leaves)
    got, exact = (
        torch.autograd.grad(
            [outputs[name] for name in cotangents],
            [leaves[name][side] for name in names],
            [grad.to(outputs[name].dtype) for name, grad in cotangents.items()],
            allow_unused=True,
            materialize_grads=True,
        )
        for side, outputs in enumerate((actual, expected))
    )
    for name, a, e in zip(names, got, exact, strict=True):
        assert a.dtype == dtype
        assert_close(f"gradient of {name}", a, e, dtype)


def twins(inputs, *names):
    """Leaves for the package, and float64 leaves of the same values for the oracle."""
    mine = inputs.leaves()
    theirs = type(inputs)(*(tensor.double() for tensor in inputs)).leaves()
    return {name: (getattr(mine, name), getattr(theirs, name)) for name in names}


@each_case_and_dtype
def test_mean_compress(case, dtype):
    leaves = twins(draw(case, dtype), "k_slc")
    mine, theirs = leaves["k_slc"]
    actual = ops.mean_compress(mine, case.geometry, cu_seqlens=case.cu_seqlens)
    expected = oracle.mean_compress(theirs, case.geometry, case.document_lengths)
    assert actual.dtype == dtype
    assert actual.shape == (case.batch, case.num_compressed, case.groups, case.dim)
    compare(dtype, leaves, {"x": actual}, {"x": expected}, {"x": cotangent(actual)})


def compressed(package, case, leaves, chosen, **rules):
    o, lse = package.compressed_attention(*leaves, case.geometry, num_keys=case.num_keys, **rules)
    return {"o": o, "lse": lse}


def selected(package, case, leaves, chosen, **rules):
    return {"o": package.selected_attention(*leaves, chosen, case.geometry, **rules)}


def window(package, case, leaves, chosen, **rules):
    return {"o": package.window_attention(*leaves, case.geometry.window_size, **rules)}


@pytest.mark.parametrize(
    ("branch", "names"),
    [
        (compressed, ("q", "k_cmp", "v_cmp")),
        (selected, ("q", "k_slc", "v_slc")),
        (window, ("q", "k_win", "v_win")),
    ],
)
@each_case_and_dtype
def test_branches(case, dtype, branch, names):
    leaves = twins(draw(case, dtype), *names)
    mine, theirs = ([pair[side] for pair in leaves.values()] for side in (0, 1))
    chosen = random_choice(case)
    actual = branch(ops, case, mine, chosen, cu_seqlens=case.cu_seqlens, **REFERENCE)
    expected = branch(oracle, case, theirs, chosen, lengths=case.document_lengths)
    assert actual["o"].dtype == dtype
    cotangents = {"o": cotangent(actual["o"])}
    if "lse" in actual:
        assert actual["lse"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        # Zero where lse is -inf, as nothing finite can come out of such a row.
        cotangents["lse"] = cotangent(actual["lse"]).masked_fill(actual["lse"].isinf(), 0.0)
    compare(dtype, leaves, actual, expected, cotangents)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", [named("paper geometry"), named("packed: long first")], ids=lambda case: case.why)
def test_select_blocks_is_as_good_in_low_precision(case, dtype):
    """Rounding may swap near ties: so the importance of the chosen blocks has to agree."""
    inputs = draw(case, dtype)
    rules = {"num_keys": case.num_keys, "cu_seqlens": case.cu_seqlens, **REFERENCE}
    _, lse = ops.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, case.geometry, **rules)
    selected = ops.select_blocks(inputs.q, inputs.k_cmp, lse, case.geometry, **rules)
    exact_rules = {"num_keys": case.num_keys, "lengths": case.document_lengths}
    _, lse64 = oracle.compressed_attention(*inputs[:3], case.geometry, **exact_rules)
    exact = oracle.importance(*inputs[:2], lse64, case.geometry, **exact_rules)
    best = oracle.select_blocks(*inputs[:2], lse64, case.geometry, **exact_rules)
    for b, t, g in torch.cartesian_prod(*(torch.arange(n) for n in selected.shape[:3])).tolist():
        scores = exact[b][t][g]
        mine, theirs = ([j for j in row[b, t, g].tolist() if j >= 0] for row in (selected, best))
        assert len(mine) == len(theirs) == len(set(mine))
        found, wanted = (torch.tensor(sorted(scores[j] for j in row)) for row in (mine, theirs))
        assert_close(f"importance of the choice at {b, t, g}", found, wanted, dtype)


@pytest.mark.parametrize(("case", "dtype"), ROUNDED, ids=lambda value: getattr(value, "why", value))
def test_nsa_attention(case, dtype):
    inputs = draw(case, dtype)
    leaves = twins(inputs, *inputs._fields)
    mine, theirs = ([pair[side] for pair in leaves.values()] for side in (0, 1))
    selected = random_choice(case)
    actual = nsa_attention(*mine, case.geometry, cu_seqlens=case.cu_seqlens, selected_blocks=selected, **REFERENCE)
    expected = oracle.nsa_attention(*theirs, case.geometry, lengths=case.document_lengths, selected_blocks=selected)
    assert actual.dtype == dtype
    compare(dtype, leaves, {"o": actual}, {"o": expected}, {"o": cotangent(actual)})


def test_scale_reaches_every_branch():
    case = named("odd length")
    inputs = draw(case)
    actual = nsa_attention(*inputs, case.geometry, scale=1.7, **REFERENCE)
    expected = oracle.nsa_attention(*inputs, case.geometry, scale=1.7)
    assert_close("o", actual, expected, torch.float64)
    own = (ops.nsa(inputs.q, inputs.k_slc, inputs.v_slc, inputs.gates, case.geometry, scale=s) for s in (1.7, None))
    assert error(*own) > 0.01
    default = nsa_attention(*inputs, case.geometry, **REFERENCE)
    assert error(default, expected) > 0.01


def test_large_scores_do_not_overflow():
    """Scores of several thousands, far past the range of exp in any type."""
    case = named("odd length")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = draw(case, dtype)
        inputs = inputs._replace(q=inputs.q * 1000)
        actual = nsa_attention(*inputs, case.geometry, **REFERENCE)
        assert actual.isfinite().all()
        _, lse = ops.compressed_attention(*inputs[:3], case.geometry, **REFERENCE)
        _, lse64 = oracle.compressed_attention(*inputs[:3], case.geometry)
        assert_close("lse", lse, lse64, dtype)


def random_choice(case):
    """Blocks chosen at random for every query and group, ascending, -1 behind; some choose none."""
    generator = torch.Generator().manual_seed(2)
    slots = case.geometry.num_selected_blocks
    shape = (case.batch, case.queries, case.groups)
    selected = torch.full((*shape, slots), -1, dtype=torch.int32)
    for b, t, g in torch.cartesian_prod(*(torch.arange(n) for n in shape)).tolist():
        position = case.num_keys - case.queries + t
        local = position - oracle.document_at(position, case.num_keys, case.document_lengths).start
        blocks = torch.randperm(local // case.geometry.selection_block_size + 1, generator=generator)
        count = int(torch.randint(0, slots + 1, (), generator=generator))
        chosen = blocks[:count].sort().values
        selected[b, t, g, : len(chosen)] = chosen
    return selected
