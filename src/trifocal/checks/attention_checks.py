"""Checks of the attention: against dense attention, a float64 oracle and other backends, and of its positions."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trifocal.checks.measurement import Measurement, Skipped, largest
from trifocal.nn import MLPCompressor, rotary_tables, rotate
from trifocal.ops import Documents, compressed_attention, nsa_attention, select_blocks
from trifocal.ops.choice_loss import Sample, choice_loss, sample_queries
from trifocal.testing import oracle
from trifocal.testing.inputs import attention_inputs
from trifocal.testing.small_models import MINIMAL, SMALL, small_config
from trifocal.testing.tolerances import FULL_COVERAGE, allowed, error, errors, output_and_gradients

SHIFTS = (1, 17, 1000, 65536)

EVERYTHING = replace(MINIMAL, window_size=256)
"""Selection and window that cover 256 tokens whole; a GPU has the kernels for these blocks from other checks."""


def full_coverage(device: torch.device) -> Measurement:
    """Where selection and window cover everything, the two are dense attention; compared with gradients, in float32."""
    dtype = torch.float32
    length = 251
    inputs = attention_inputs(EVERYTHING, length, device, dtype, num_heads=8, value_dim=16).leaves()
    q, k, v = inputs.q, inputs.k_slc, inputs.v_slc
    heads_per_group = q.shape[2] // k.shape[2]
    k_heads, v_heads = (x.repeat_interleave(heads_per_group, dim=2).transpose(1, 2) for x in (k, v))
    dense = scaled_dot_product_attention(q.transpose(1, 2), k_heads, v_heads, is_causal=True).transpose(1, 2)
    upstream = torch.randn(dense.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected = [dense, *torch.autograd.grad(dense, (q, k, v), upstream)]
    found = {}
    for branch, share in (("selected", (0.0, 1.0, 0.0)), ("window", (0.0, 0.0, 1.0)), ("both", (0.0, 0.5, 0.5))):
        gates = torch.tensor(share, device=device, dtype=dtype).expand_as(inputs.gates)
        o = nsa_attention(q, inputs.k_cmp, inputs.v_cmp, k, v, k, v, gates, EVERYTHING)
        actual = [o, *torch.autograd.grad(o, (q, k, v), upstream)]
        found[branch] = max(error(a, e) for a, e in zip(actual, expected, strict=True))
    return largest(found, FULL_COVERAGE[dtype], "error")


def float64_oracle(device: torch.device) -> Measurement:
    """In float64, with its own choice of blocks, the attention is the oracle's: output and every gradient."""
    found: dict[str, float] = {}
    for geometry, lengths in ((SMALL, (67,)), (SMALL, (23, 1, 4, 3, 33)), (MINIMAL, (97,))):
        drawn = attention_inputs(geometry, sum(lengths), document_lengths=lengths)
        inputs, exact = drawn.leaves(device=device), drawn.leaves()
        boundaries = torch.tensor([0, *lengths], device=device).cumsum(0) if len(lengths) > 1 else None
        o = nsa_attention(*inputs, geometry, cu_seqlens=boundaries, backend="reference")
        o_exact = oracle.nsa_attention(*exact, geometry, lengths=lengths)
        figures = errors(output_and_gradients(o, inputs), output_and_gradients(o_exact, exact))
        found |= {f"{name}, {sum(lengths)} tokens": figure for name, figure in figures.items()}
    return largest(found, FULL_COVERAGE[torch.float64], "error")


def backend_parity(device: torch.device) -> Measurement | Skipped:
    """The Triton kernels give the reference's output and gradients, against float64, with the same choice."""
    dtype = torch.bfloat16
    found: dict[str, float] = {}
    for geometry, lengths in ((MINIMAL, (301,)), (MINIMAL, (170, 1, 15, 115))):
        inputs = attention_inputs(
            geometry, sum(lengths), device, dtype, num_heads=8, head_dim=64, value_dim=64, document_lengths=lengths
        ).leaves()
        exact = inputs.leaves(torch.float64)
        boundaries = torch.tensor([0, *lengths], device=device).cumsum(0) if len(lengths) > 1 else None
        place: dict[str, Any] = {"cu_seqlens": boundaries, "backend": "reference"}
        _, lse = compressed_attention(exact.q, exact.k_cmp, exact.v_cmp, geometry, **place)
        choice = select_blocks(exact.q, exact.k_cmp, lse, geometry, **place)
        rules: dict[str, Any] = {"cu_seqlens": boundaries, "selected_blocks": choice}
        try:
            o = nsa_attention(*inputs, geometry, backend="triton", **rules)
        except ValueError as reason:
            return Skipped(str(reason))
        o_exact = nsa_attention(*exact, geometry, backend="reference", **rules)
        figures = errors(output_and_gradients(o, inputs), output_and_gradients(o_exact, exact, rounded_to=dtype))
        found |= {f"{name}, {len(lengths)} documents": figure for name, figure in figures.items()}
    return largest(found, allowed(dtype, device), "error")


def taught_choice(device: torch.device) -> Measurement:
    """The loss of the choice and its gradient are the oracle's, in float64, and reach the index only."""
    found = {}
    for lengths in ((97,), (3, 50, 3, 41)):
        length, heads, groups, dim = sum(lengths), 4, 2, 16
        documents = None
        if len(lengths) > 1:
            boundaries = torch.tensor([0, *lengths]).cumsum(0)
            documents = Documents.from_cu_seqlens(boundaries, length).to(device)
        positions = torch.arange(length, device=device) if documents is None else documents.positions
        tokens = torch.arange(length, device=device)[None]
        sample = Sample(*(field[0] for field in sample_queries(tokens, positions, 1, 1, SMALL, length, 4)))
        generator = torch.Generator().manual_seed(0)
        q, k, q_idx, k_idx = (
            torch.randn(1, length, *shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()
            for shape in ((heads, dim), (groups, dim), (groups, dim), (dim,))
        )
        index: dict[str, Any] = {"q_idx": q_idx, "k_idx": k_idx}
        loss, _ = choice_loss(q, k, sample, SMALL, documents, **index)
        exact = oracle.choice_loss(q, k, [sample.tokens[sample.eligible].tolist()], SMALL, lengths=lengths, **index)
        gradients = torch.autograd.grad(loss, [*index.values(), q, k], allow_unused=True)
        expected = torch.autograd.grad(exact, list(index.values()))
        figures = [error(loss, exact), *map(error, gradients[:2], expected)]
        if any(gradient is not None and gradient.any() for gradient in gradients[2:]):
            figures.append(float("inf"))
        found[f"{len(lengths)} documents"] = max(figures)
    return largest(found, FULL_COVERAGE[torch.float64], "error")


def rope_distance(device: torch.device) -> Measurement:
    """Moving a query and its keys, raw or compressed, along the sequence leaves their scores as they are.

    Bound: the angle of the farthest position carries a rounding error of one part in 2^53; a score is a sum of D
    products, each turned by two such angles.
    """
    config = small_config()
    groups, dim, geometry = config.num_kv_heads, config.head_dim, config.geometry
    length = 3 * geometry.compression_block_size
    inputs = attention_inputs(geometry, length, device, num_heads=config.num_heads, head_dim=dim)
    phi = MLPCompressor(geometry, dim).to(device, torch.float64)

    def scores(first: int) -> Tensor:
        def rotated(x: Tensor, positions: Tensor) -> Tensor:
            return rotate(x, *rotary_tables(first + positions, dim, config.rope_theta, torch.float64))

        tokens = torch.arange(length, device=device)
        k_cmp = phi(inputs.k_slc)
        starts = torch.arange(k_cmp.shape[1], device=device) * geometry.compression_stride
        keys = torch.cat((rotated(inputs.k_slc, tokens), rotated(k_cmp, starts)), 1)
        return torch.einsum("btgrd,bsgd->bgrts", rotated(inputs.q, tokens).unflatten(2, (groups, -1)), keys)

    with torch.no_grad():
        at_zero = scores(0)
        moved = {f"moved by {shift}": (scores(shift) - at_zero).abs().max().item() for shift in SHIFTS}
    size = (inputs.q.norm(dim=-1).max() * inputs.k_slc.norm(dim=-1).max()).item()
    bound = 2 * dim * max(SHIFTS) * torch.finfo(torch.float64).eps * size
    return largest(moved, bound, "change")
