"""Checks of the attention: against dense attention, against a float64 oracle, and between backends."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trifocal.checks.measurement import Measurement, Skipped
from trifocal.ops import Geometry, nsa_attention
from trifocal.testing import oracle
from trifocal.testing.inputs import Inputs, attention_inputs
from trifocal.testing.small_models import MINIMAL, SMALL
from trifocal.testing.tolerances import FULL_COVERAGE, allowed, error, errors, output_and_gradients

Attention = Callable[..., Tensor]

EVERYTHING = Geometry(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=16,
    num_selected_blocks=16,
    num_initial_blocks=1,
    num_local_blocks=2,
    window_size=256,
)
"""Selection and window that cover 256 tokens whole."""


def full_coverage_float32(device: torch.device, *, attention: Attention = nsa_attention) -> Measurement:
    """Where selection and window cover everything, the two are dense attention; compared with gradients."""
    return _full_coverage(device, torch.float32, attention)


def full_coverage_float64(device: torch.device, *, attention: Attention = nsa_attention) -> Measurement:
    """As in float32, a billion times sharper: no wrong mask hides in rounding."""
    return _full_coverage(device, torch.float64, attention)


def _full_coverage(device: torch.device, dtype: torch.dtype, attention: Attention) -> Measurement:
    length = 251
    inputs = attention_inputs(EVERYTHING, length, device, dtype, head_dim=16, value_dim=16).leaves()
    q, k, v = inputs.q, inputs.k_slc, inputs.v_slc
    heads_per_group = q.shape[2] // k.shape[2]
    k_heads, v_heads = (x.repeat_interleave(heads_per_group, dim=2).transpose(1, 2) for x in (k, v))
    dense = scaled_dot_product_attention(q.transpose(1, 2), k_heads, v_heads, is_causal=True).transpose(1, 2)
    upstream = torch.randn(dense.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected = [dense, *torch.autograd.grad(dense, (q, k, v), upstream)]
    worst, details = 0.0, []
    for branch, share in (("selected", (0.0, 1.0, 0.0)), ("window", (0.0, 0.0, 1.0)), ("both", (0.0, 0.5, 0.5))):
        gates = torch.tensor(share, device=device, dtype=dtype).expand_as(inputs.gates)
        o = attention(q, inputs.k_cmp, inputs.v_cmp, k, v, k, v, gates, EVERYTHING)
        actual = [o, *torch.autograd.grad(o, (q, k, v), upstream)]
        found = max(error(a, e) for a, e in zip(actual, expected, strict=True))
        worst = max(worst, found)
        details.append(f"{branch}: {found:.3g}")
    return Measurement(worst, FULL_COVERAGE[dtype], "error", tuple(details))


def float64_oracle(device: torch.device, *, attention: Attention = nsa_attention) -> Measurement:
    """In float64, with its own choice of blocks, the attention is the oracle's: output and every gradient."""
    return _against_oracle(device, torch.float64, attention, give_choice=False)


def float32_oracle(device: torch.device, *, attention: Attention = nsa_attention) -> Measurement:
    """In float32, with the oracle's choice given, so that a near tie that rounding swaps is no error."""
    return _against_oracle(device, torch.float32, attention, give_choice=True)


def _against_oracle(
    device: torch.device, dtype: torch.dtype, attention: Attention, *, give_choice: bool
) -> Measurement:
    worst, details = 0.0, []
    for geometry, lengths in ((SMALL, (67,)), (SMALL, (23, 1, 4, 3, 33)), (MINIMAL, (97,))):
        drawn, choice, exact = _by_oracle(geometry, lengths, dtype)
        inputs = drawn.leaves(device=device)
        borders = torch.tensor([0, *lengths], device=device).cumsum(0) if len(lengths) > 1 else None
        given = choice.to(device) if give_choice else None
        o = attention(*inputs, geometry, cu_seqlens=borders, selected_blocks=given, backend="reference")
        found = errors(output_and_gradients(o, inputs), exact)
        name = max(found, key=lambda key: found[key])
        worst = max(worst, found[name])
        kind = f"{len(lengths)} packed documents" if len(lengths) > 1 else f"{lengths[0]} tokens"
        details.append(f"{kind}: {found[name]:.3g} in {name}")
    bound = FULL_COVERAGE[dtype] if dtype == torch.float64 else allowed(dtype, device)
    return Measurement(worst, bound, "error", tuple(details))


@functools.cache
def _by_oracle(
    geometry: Geometry, lengths: tuple[int, ...], dtype: torch.dtype
) -> tuple[Inputs, Tensor, dict[str, Tensor]]:
    """Inputs, the choice of blocks that the oracle makes of them, its output and the gradients; on the CPU."""
    inputs = attention_inputs(geometry, sum(lengths), dtype=dtype, document_lengths=lengths)
    exact = inputs.leaves(torch.float64)
    _, lse = oracle.compressed_attention(exact.q, exact.k_cmp, exact.v_cmp, geometry, lengths=lengths)
    choice = oracle.select_blocks(exact.q, exact.k_cmp, lse, geometry, lengths=lengths)
    o = oracle.nsa_attention(*exact, geometry, lengths=lengths, selected_blocks=choice)
    return inputs, choice, output_and_gradients(o, exact, rounded_to=dtype)


def backend_parity(device: torch.device, *, attention: Attention = nsa_attention) -> Measurement | Skipped:
    """The Triton kernels give the reference's output and gradients, against float64, with the same choice."""
    dtype = torch.bfloat16
    worst, details = 0.0, []
    for geometry, lengths in ((MINIMAL, (301,)), (MINIMAL, (170, 1, 15, 115))):
        inputs = attention_inputs(
            geometry, sum(lengths), device, dtype, num_heads=8, head_dim=64, value_dim=64, document_lengths=lengths
        ).leaves()
        exact = inputs.leaves(torch.float64)
        borders = torch.tensor([0, *lengths], device=device).cumsum(0) if len(lengths) > 1 else None
        choice = _arbitrary_choice(geometry, lengths, inputs.k_cmp.shape[2], device)
        rules = {"cu_seqlens": borders, "selected_blocks": choice}
        try:
            o = attention(*inputs, geometry, backend="triton", **rules)
        except ValueError as reason:
            return Skipped(str(reason))
        o_exact = attention(*exact, geometry, backend="reference", **rules)
        found = errors(output_and_gradients(o, inputs), output_and_gradients(o_exact, exact, rounded_to=dtype))
        name = max(found, key=lambda key: found[key])
        worst = max(worst, found[name])
        details.append(f"{len(lengths)} documents: {found[name]:.3g} in {name}")
    return Measurement(worst, allowed(dtype, device), "error", tuple(details))


def _arbitrary_choice(geometry: Geometry, lengths: tuple[int, ...], num_groups: int, device: torch.device) -> Tensor:
    """The first block, the own one and some between: valid for every query, and different for neighbours."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    own = positions // geometry.selection_block_size
    between = (positions * 7919) % (own + 1)
    rows = torch.stack([torch.zeros_like(own), between, own], -1).sort(-1).values
    repeated = torch.zeros_like(rows, dtype=torch.bool)
    repeated[:, 1:] = rows[:, 1:] == rows[:, :-1]
    # Repetitions become pads, which stand at the end.
    rows = rows.masked_fill(repeated, torch.iinfo(torch.int32).max).sort(-1).values
    rows = rows.masked_fill(rows == torch.iinfo(torch.int32).max, -1)
    return rows[None, :, None].expand(1, -1, num_groups, -1).to(device, torch.int32).contiguous()
