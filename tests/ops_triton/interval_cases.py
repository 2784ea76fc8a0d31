"""Shapes for the interval kernels, with why each is there, and the comparison that window and compressed share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.ops.cases import USUAL, Case
from trifocal.ops.layout import Documents
from trifocal.testing.tolerances import assert_close

CASES = (
    Case("several tiles, 3 heads a group, odd dims", USUAL, 37, batch=2, heads=6, groups=2, dim=8, value_dim=5),
    Case("4 heads a group, two parts of D and one of V", USUAL, 45, heads=8, groups=2, dim=24, value_dim=48),
    Case("one head a group, two parts of V", USUAL, 50, heads=2, groups=2, dim=16, value_dim=40),
    Case("16 heads a group, fewer queries than keys", USUAL, 9, keys=52, batch=2, heads=16, dim=16, value_dim=16),
    Case("decoding", USUAL, 1, keys=47, batch=2, heads=8),
    Case("packed: 1 token, under l, exactly l, l + 1, long", USUAL, 71, lengths=(1, 5, 8, 9, 16, 1, 31), heads=4),
    Case("packed: long first, 1-token last", USUAL, 42, lengths=(40, 1, 1), heads=6, groups=2, value_dim=5),
    Case("nothing to compress", USUAL, 7, heads=2),
)


def suits_copy_engine(case: Case) -> bool:
    """Whether rows of 4-byte floats lie at multiples of 16 bytes, and heads divide a tile."""
    heads = case.heads // case.groups
    return case.dim % 4 == 0 and case.value_dim % 4 == 0 and heads & (heads - 1) == 0


def documents_of(case: Case) -> Documents | None:
    return None if case.cu_seqlens is None else Documents.from_cu_seqlens(case.cu_seqlens, case.num_keys)


def compare(names: str, actual: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Compare tensors, named in one string, with exact ones at float32's tolerance."""
    for name, a, e in zip(names.split(), actual, exact, strict=True):
        assert_close(name, a, e, torch.float32)
