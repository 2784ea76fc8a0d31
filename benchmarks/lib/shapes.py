"""Shapes of one attention call, by name or free, and random inputs of a shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trifocal.errors import UserError, unknown
from trifocal.ops import Geometry
from trifocal.testing.inputs import Inputs, attention_inputs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class AttentionShape:
    """Batch, queries (as many as keys), query heads, groups, and the dims of queries and keys (D) and values (V)."""

    name: str
    batch: int
    tokens: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "heads", "groups", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} of a shape must be at least 1, got {getattr(self, name)}")
        if self.heads % self.groups:
            raise UserError(f"heads must be a multiple of groups, got {self.heads}/{self.groups}")

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """The sizes that kernels are compiled for: all but batch and tokens."""
        return self.heads, self.groups, self.head_dim, self.value_dim


NAMED = {
    shape.name: shape
    for shape in (
        # Long, at the paper's group of 16 heads; the same short; small groups; small models' batches; an odd length;
        # the heads of presets with windows.
        AttentionShape("A", 1, 65536, 64, 4, 128, 128),
        AttentionShape("B", 1, 8192, 64, 4, 128, 128),
        AttentionShape("C", 1, 32768, 32, 8, 128, 128),
        AttentionShape("D", 16, 2048, 12, 2, 64, 64),
        AttentionShape("E", 4, 4096, 32, 2, 64, 64),
        AttentionShape("F", 2, 12000, 48, 3, 128, 128),
        AttentionShape("G", 4, 8192, 12, 1, 64, 64),
        # The paper's own heads at its four lengths.
        *(AttentionShape(f"P{length // 1024}k", 1, length, 64, 4, 192, 128) for length in (8192, 16384, 32768, 65536)),
    )
}


def named_shapes(names: Sequence[str]) -> list[AttentionShape]:
    """Shapes by name; "P" is all four lengths of the paper's."""
    shapes = []
    for name in names:
        if name == "P":
            shapes += [shape for key, shape in NAMED.items() if key.startswith("P")]
        elif name in NAMED:
            shapes.append(NAMED[name])
        else:
            raise unknown("shape", name, [*NAMED, "P"])
    return shapes


def free_shapes(
    lengths: Sequence[int], heads: Sequence[str], *, batch: int, head_dim: int, value_dim: int
) -> list[AttentionShape]:
    """Every pair of heads ("64/4": query heads, groups) at every length."""
    shapes = []
    for pair in heads:
        query_heads, slash, groups = pair.partition("/")
        if not (slash and query_heads.isdecimal() and groups.isdecimal()):
            raise UserError(f'heads are written as query heads/groups, like 64/4, got "{pair}"')
        for length in lengths:
            name = f"{pair} {head_dim}" + (f"/{value_dim}" if value_dim != head_dim else "")
            shapes.append(AttentionShape(name, batch, length, int(query_heads), int(groups), head_dim, value_dim))
    return shapes


def make_inputs(shape: AttentionShape, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Random inputs of a shape, drawn on the device: they may be many gigabytes."""
    return attention_inputs(
        geometry,
        shape.tokens,
        device,
        dtype,
        batch=shape.batch,
        num_heads=shape.heads,
        num_kv_heads=shape.groups,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        on_device=True,
    )
