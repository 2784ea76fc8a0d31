"""Shapes and geometries that the tests of the operations share, each with the reason why it is there."""

from dataclasses import dataclass

import torch

from trifocal import Geometry
from trifocal.testing import oracle
from trifocal.testing.inputs import attention_inputs

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def geometry(l, d, selection, n, n_init, n_local, w):  # noqa: E741
    """A geometry from the paper's letters, in the paper's order."""
    return Geometry(l, d, selection, n, n_init, n_local, w)


USUAL = geometry(8, 4, 16, 3, 1, 1, 11)  # the paper's proportions, small
PAPER = Geometry()
ODD = geometry(6, 3, 9, 2, 0, 1, 7)  # no power of two anywhere, no initial block
ONE_SIZE = geometry(4, 4, 4, 4, 1, 2, 1)  # l = d = l', a window of one key
NO_LOCAL = geometry(8, 2, 8, 2, 1, 0, 5)  # l = l', overlap of four; the query's own block is not forced
ALL_FORCED = geometry(4, 2, 8, 3, 1, 2, 6)  # n_init + n_local = n: nothing is left to choose
NO_OVERLAP = geometry(4, 4, 12, 2, 1, 1, 9)  # d = l
STRIDE_ONE = geometry(3, 1, 5, 3, 1, 1, 4)  # a compressed block starts at every token
ONE_TOKEN_BLOCKS = geometry(1, 1, 1, 5, 1, 2, 2)  # everything is a block of its own


@dataclass(frozen=True)
class Case:
    """One set of shapes. `lengths`: of packed documents, None for one document a row. S = T unless given."""

    why: str
    geometry: Geometry
    queries: int
    keys: int = 0
    batch: int = 1
    heads: int = 2
    groups: int = 1
    dim: int = 8
    value_dim: int = 8
    lengths: tuple[int, ...] | None = None

    @property
    def num_keys(self):
        return self.keys or self.queries

    @property
    def document_lengths(self):
        return None if self.lengths is None else list(self.lengths)

    @property
    def cu_seqlens(self):
        if self.lengths is None:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)

    @property
    def num_compressed(self):
        return len(oracle.compression_spans(self.geometry, self.num_keys, self.document_lengths))


CASES = (
    Case("odd length, 3 heads a group, D != V", USUAL, 37, batch=2, heads=6, groups=2, dim=8, value_dim=5),
    Case("paper geometry past its first blocks", PAPER, 149, heads=2, dim=4, value_dim=4),
    Case("one head a group, V > D", ODD, 31, batch=2, heads=3, groups=3, dim=5, value_dim=9),
    Case("8 heads a group", ONE_SIZE, 23, heads=8),
    Case("own block not forced", NO_LOCAL, 35, heads=4, groups=2),
    Case("nothing left to choose", ALL_FORCED, 41),
    Case("blocks without overlap", NO_OVERLAP, 50, batch=3),
    Case("stride of one", STRIDE_ONE, 29, heads=3),
    Case("blocks of one token", ONE_TOKEN_BLOCKS, 17),
    Case("chunked prefill", USUAL, 9, keys=52, batch=2, heads=4, groups=2, value_dim=3),
    Case("decoding", USUAL, 1, keys=47, batch=2, heads=8),
    Case("decoding at a block's first token", USUAL, 1, keys=33),
    Case("decoding at a block's last token", USUAL, 1, keys=32),
    Case("one token", USUAL, 1, batch=2),
    Case("no compressed block", USUAL, 7),
    Case("exactly one compressed block", USUAL, 8),
    Case("exactly one selection block", USUAL, 16),
    Case("packed: 1 token, under l, exactly l, l + 1, exactly l'", USUAL, 56, lengths=(1, 5, 8, 9, 16, 1, 16), heads=4),
    Case("packed: long first, 1-token last", USUAL, 42, lengths=(40, 1, 1), heads=6, groups=2, value_dim=5),
    Case("packed: in rows of 16, the last one short", USUAL, 61, lengths=(16, 4, 12, 9, 7, 13), heads=4, groups=2),
    Case("packed: across rows of 8", ODD, 45, lengths=(5, 8, 3, 7, 6, 1, 8, 7), heads=3),
    Case("packed: odd sizes", ODD, 40, lengths=(17, 2, 21), heads=3),
    Case("packed: only documents under l", USUAL, 14, lengths=(7, 1, 6)),
    Case("packed: the last queries of a pack", ODD, 19, keys=58, lengths=(9, 33, 2, 14), heads=4, groups=2),
    Case("packed: the last query of one document", USUAL, 1, keys=40, lengths=(3, 37)),
    Case("packed: one document", USUAL, 30, lengths=(30,)),
)


def named(start):
    """The one case whose reason starts with these words."""
    (case,) = (case for case in CASES if case.why.startswith(start))
    return case


def each_case(test):
    """Run a test for every case; its id says why the case is there."""
    import pytest

    return pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])(test)


def draw(case, dtype=torch.float64, seed=0, device="cpu", **rest):
    """Inputs for a case, rounded to `dtype`."""
    return attention_inputs(
        case.geometry,
        case.queries,
        device,
        dtype,
        batch=case.batch,
        num_heads=case.heads,
        num_kv_heads=case.groups,
        head_dim=case.dim,
        value_dim=case.value_dim,
        num_keys=case.num_keys,
        document_lengths=case.lengths,
        seed=seed,
        **rest,
    )
