"""The cost of a step: operations that do not depend on length, and storage that grows no faster than length."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.ops import cases
from tests.ops.cases import Case, draw, geometry
from trifocal import nsa_attention, ops
from trifocal.checks.cost_checks import count_operations, stored_bytes

GEOMETRY = geometry(8, 4, 16, 4, 1, 2, 24)


def training_step(length, *, documents=None, batch=1, heads=4, rules=GEOMETRY):
    lengths = (length // documents,) * documents if isinstance(documents, int) else documents
    case = Case("", rules, length, batch=batch, heads=heads, groups=2, lengths=lengths)
    inputs = draw(case, torch.float32).leaves()

    def step():
        compressed = [ops.mean_compress(x, rules, cu_seqlens=case.cu_seqlens) for x in (inputs.k_slc, inputs.v_slc)]
        x = inputs._replace(k_cmp=compressed[0], v_cmp=compressed[1])
        nsa_attention(*x, rules, cu_seqlens=case.cu_seqlens).sum().backward()

    return step


def test_operations_depend_on_no_size():
    """Nor does anything loop over the taps of the stencil, the selected slots or the tokens of a block."""
    expected = count_operations(training_step(128))
    assert 20 < expected.total() < 1000
    # As many blocks are chosen of the paper's as there are here.
    paper = replace(cases.PAPER, num_selected_blocks=3)
    for sizes in ({"length": 1023}, {"length": 128, "heads": 16}, {"length": 256, "rules": paper}):
        assert count_operations(training_step(**sizes)) == expected, sizes
    # One row is laid out as none is; from two on nothing changes. Nor from two documents on.
    assert count_operations(training_step(128, batch=5)) == count_operations(training_step(128, batch=2))
    packed = count_operations(training_step(512, documents=2))
    assert count_operations(training_step(512, documents=16)) == packed


def test_a_pack_costs_what_a_batch_costs():
    """As many products as rows of the documents' length; up to twice as many where documents cross such rows."""

    def products(step):
        with FlopCounterMode(display=False) as counter:
            step()
        return counter.get_total_flops()

    rows = products(training_step(32, batch=16))
    assert 0 < products(training_step(512, documents=16)) <= 1.2 * rows
    assert products(training_step(512, documents=(20, 32, 12, 30, 2, 32) * 4)) <= 2.4 * rows


def stored(length, *, documents=None, dtype=torch.float32):
    """Bytes that backward keeps, inputs among them."""
    lengths = None if documents is None else (length // documents,) * documents
    case = Case("", GEOMETRY, length, heads=4, groups=2, dim=16, value_dim=16, lengths=lengths)
    inputs = draw(case, dtype).leaves()
    return stored_bytes(lambda: nsa_attention(*inputs, GEOMETRY, cu_seqlens=case.cu_seqlens))


@pytest.mark.parametrize("documents", [None, 2])
def test_storage_for_backward_is_linear_in_length(documents):
    """Exactly affine at lengths that the blocks divide: equal steps in length cost equal bytes."""
    sizes = [stored(length, documents=documents) for length in (256, 512, 1024)]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


def test_storage_in_bf16_is_half_of_fp32_save_for_the_small():
    """q, k, v and o are kept in the type they came in: an fp32 copy would show."""
    assert stored(1024, dtype=torch.bfloat16) < 0.75 * stored(1024)
