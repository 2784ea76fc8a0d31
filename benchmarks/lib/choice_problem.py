"""A random index and the loss that teaches it, in an attention's shape; whether the kernels are right."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lib.recorder import Refused
from lib.shapes import AttentionShape
from trifocal.nn.attention_base import INDEX_DIM
from trifocal.ops import Geometry, select_blocks_by_index
from trifocal.ops.choice_loss import Sample, choice_loss, sample_queries
from trifocal.testing.tolerances import allowed, error


def random_index(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Index queries [B, T, G, Di] and keys [B, T, Di], whose products are exact in any order of the sums."""
    generator = torch.Generator(device).manual_seed(1)
    sizes = (shape.groups, INDEX_DIM), (INDEX_DIM,)
    drawn = (torch.randn(shape.batch, shape.tokens, *size, generator=generator, device=device) for size in sizes)
    q_idx, k_idx = (x.mul(16).round().div(16).to(dtype) for x in drawn)
    return q_idx, k_idx


def check_index(shape: AttentionShape, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse an index that does not choose what the reference does, at an odd length."""
    tokens = (geometry.num_selected_blocks + 20) * geometry.selection_block_size + 5
    index = random_index(replace(shape, batch=1, tokens=tokens), device, dtype)
    chosen, expected = (select_blocks_by_index(*index, geometry, backend=name) for name in ("auto", "reference"))
    if not torch.equal(chosen, expected):
        raise Refused(f"an index chooses other blocks than the reference at {tokens} tokens")


class ChoiceProblem(NamedTuple):
    """Rotated queries and keys of the selected branch, an index, and the sampled queries."""

    q: Tensor
    k: Tensor
    index: tuple[Tensor, Tensor]
    sample: Sample
    geometry: Geometry

    @classmethod
    def draw(
        cls, shape: AttentionShape, geometry: Geometry, device: torch.device, dtype: torch.dtype, stretch: int
    ) -> ChoiceProblem:
        """Draw one, with one query of each `stretch` tokens."""
        generator = torch.Generator(device).manual_seed(0)
        rows = (shape.batch, shape.tokens)
        q, k = (
            torch.randn(*rows, heads, shape.head_dim, generator=generator, device=device).to(dtype)
            for heads in (shape.heads, shape.groups)
        )
        q_idx, k_idx = random_index(shape, device, dtype)
        tokens = torch.randint(256, rows, generator=generator, device=device)
        positions = torch.arange(shape.tokens, device=device)
        samples = sample_queries(tokens, positions, 0, 1, geometry, shape.tokens, stretch)
        sample = Sample(*(field[0] for field in samples))
        return cls(q, k, (q_idx.requires_grad_(), k_idx.requires_grad_()), sample, geometry)

    def loss(self, backend: str = "auto") -> tuple[Tensor, Tensor]:
        """The mean loss and recall of an eligible query and group."""
        q_idx, k_idx = self.index
        figures = choice_loss(
            self.q, self.k, self.sample, self.geometry, q_idx=q_idx, k_idx=k_idx, backend=backend
        )  # fmt: skip
        count = self.sample.eligible.sum() * self.k.shape[2]
        loss, recall = figures / count
        return loss, recall


def check_choice_parity(
    shape: AttentionShape, geometry: Geometry, device: torch.device, dtype: torch.dtype, backend: str = "auto"
) -> float:
    """Compare loss, recall and gradients with the float64 reference at an odd length, as `check_parity`.

    Returns the largest error as a share of the allowed one (of a gradient's largest number); one above 1 is refused.
    """
    tokens = (geometry.num_selected_blocks + 20) * geometry.selection_block_size + 5
    sizes = (2 * shape.heads // shape.groups, 2, shape.head_dim, shape.value_dim)
    problem = ChoiceProblem.draw(AttentionShape("", 1, tokens, *sizes), geometry, device, dtype, 7)
    index = problem.index[0].detach().double().requires_grad_(), problem.index[1].detach().double().requires_grad_()
    exact = problem._replace(q=problem.q.double(), k=problem.k.double(), index=index)
    bound = allowed(dtype, device)
    results = []
    for one, name in ((problem, backend), (exact, "reference")):
        loss, recall = one.loss(name)
        results.append((loss, recall, *torch.autograd.grad(loss, one.index)))
    names = ("the loss", "the recall", "the gradient of q_idx", "the gradient of k_idx")
    errors = {}
    for name, got, expected in zip(names, *results, strict=True):
        largest = expected.detach().abs().max()
        errors[name] = error(got.double() / largest, expected / largest)
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= bound:
        raise Refused(f"{worst} is off by {errors[worst]:.3g} at {tokens} tokens, allowed is {bound:.3g}")
    return errors[worst] / bound
