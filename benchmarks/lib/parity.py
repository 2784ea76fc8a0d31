"""No speed without correctness: the attention against float64 at a small odd length, before anything is timed."""

import torch

from lib.choice_problem import check_choice_parity
from lib.recorder import Refused
from lib.shapes import AttentionShape
from trifocal.models import ModelConfig
from trifocal.ops import Geometry, compressed_attention, mean_compress, nsa_attention, select_blocks
from trifocal.ops.choice_loss import Sample, compressed_importance
from trifocal.ops.reference import chosen_mask
from trifocal.testing.inputs import Inputs, attention_inputs
from trifocal.testing.tolerances import allowed, error, errors, output_and_gradients

_MAX_GROUPS = 2


def check_parity(
    shape: AttentionShape, geometry: Geometry, device: torch.device, dtype: torch.dtype, backend: str = "auto"
) -> float:
    """Compare output, means, gradients with the float64 reference, and the choice by the importance it covers.

    Two groups stand for all, and one sequence of an odd length with more blocks than are chosen for all lengths.
    Returns the largest error as a share of the allowed one; one above 1, or another choice than the best, is refused.
    """
    groups = min(shape.groups, _MAX_GROUPS)
    tokens = (geometry.num_selected_blocks + 2) * geometry.selection_block_size + 5
    inputs = attention_inputs(
        geometry,
        tokens,
        device,
        dtype,
        num_heads=shape.heads // shape.groups * groups,
        num_kv_heads=groups,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
    )
    choice = _check_choice(inputs, geometry, backend)
    leaves, exact = inputs.leaves(), inputs.leaves(torch.float64)
    o = nsa_attention(*leaves, geometry, selected_blocks=choice, backend=backend)
    o_exact = nsa_attention(*exact, geometry, selected_blocks=choice, backend="reference")
    found = errors(output_and_gradients(o, leaves), output_and_gradients(o_exact, exact, rounded_to=dtype))
    means = (
        _mean_and_gradient(leaves.k_slc, geometry, backend),
        _mean_and_gradient(exact.k_slc, geometry, "reference"),
    )
    found |= {name: error(*pair) for name, *pair in zip(("the mean", "the gradient of the mean"), *means, strict=True)}
    worst, bound = max(found, key=lambda name: found[name]), allowed(dtype, device)
    if not found[worst] <= bound:
        raise Refused(f"{worst} is off by {found[worst]:.3g} at {tokens} tokens, allowed is {bound:.3g}")
    return found[worst] / bound


def check_model_parity(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> float:
    """Do what `check_parity` does, for the attention of a model, and for the loss of its index if it has one."""
    shape = AttentionShape("model", 1, 1, config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim)
    checks = (check_parity, check_choice_parity) if config.has_index else (check_parity,)
    return max(check(shape, config.geometry, device, dtype, config.backend) for check in checks)


def _mean_and_gradient(k: torch.Tensor, geometry: Geometry, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compressed keys, and the keys' gradient for a gradient that is the same on both sides."""
    k_cmp = mean_compress(k, geometry, backend=backend)
    upstream = torch.randn(k_cmp.shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return k_cmp, torch.autograd.grad(k_cmp, k, upstream.to(k_cmp.device, k_cmp.dtype))[0]


def _check_choice(inputs: Inputs, geometry: Geometry, backend: str) -> torch.Tensor:
    """The backend's choice, which must cover as much importance as the reference's: near ties may fall either way."""
    tokens, q, k_cmp = inputs.q.shape[1], inputs.q, inputs.k_cmp
    _, lse = compressed_attention(q, k_cmp, inputs.v_cmp, geometry, num_keys=tokens, backend="reference")
    every = torch.arange(tokens, device=q.device).expand(q.shape[0], -1)
    importance = compressed_importance(q, k_cmp, Sample(every, 0 * every, every >= 0), geometry, None, q.shape[1])
    covered = {}
    for name in ("reference", backend):
        choice = select_blocks(q, k_cmp, lse, geometry, num_keys=tokens, backend=name)
        share = (importance * chosen_mask(choice, importance.shape[-1])).sum(-1) / importance.sum(-1)
        covered[name] = share.mean().item()
    missing, bound = covered["reference"] - covered[backend], allowed(torch.float32, inputs.q.device)
    if not missing <= bound:
        raise Refused(f"the chosen blocks miss {missing:.3g} of the importance that the best ones cover")
    return choice
