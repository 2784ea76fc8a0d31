"""The cost of a step: operations that do not depend on length, and storage that grows no faster than length."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops import cases
from tests.ops.cases import Case, draw, geometry
from trifocal import nsa_attention, ops
from trifocal.ops import reference

GEOMETRY = geometry(8, 4, 16, 4, 1, 2, 24)


class CountOperations(TorchDispatchMode):
    """Count the operators that the dispatcher sees, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count(step):
    with CountOperations() as counter:
        step()
    return counter.counts


def training_step(length, *, documents=None, batch=1, heads=4):
    lengths = None if documents is None else (length // documents,) * documents
    case = Case("", GEOMETRY, length, batch=batch, heads=heads, groups=2, lengths=lengths)
    inputs = draw(case, torch.float32).leaves()

    def step():
        compressed = [ops.mean_compress(x, GEOMETRY, cu_seqlens=case.cu_seqlens) for x in (inputs.k_slc, inputs.v_slc)]
        x = inputs._replace(k_cmp=compressed[0], v_cmp=compressed[1])
        nsa_attention(*x, GEOMETRY, cu_seqlens=case.cu_seqlens).sum().backward()

    return step


def test_operations_do_not_depend_on_length_batch_or_heads():
    expected = count(training_step(64))
    assert 20 < expected.total() < 1000
    for length in (65, 96, 256, 1023):
        assert count(training_step(length)) == expected
    # One row is laid out as none is; from two on nothing changes.
    assert count(training_step(64, batch=5)) == count(training_step(64, batch=2))
    assert count(training_step(64, heads=16)) == expected


def test_operations_do_not_depend_on_the_number_of_documents():
    expected = count(training_step(256, documents=2))
    for documents in (4, 16, 32):
        assert count(training_step(256, documents=documents)) == expected


def test_choosing_does_not_loop_inside_its_operator():
    """`select_blocks` is one operator to the dispatcher: count the operators inside."""

    def choose(length, lengths=None):
        case = Case("", GEOMETRY, length, heads=4, groups=2, lengths=lengths)
        inputs, lse = draw(case, torch.float32), torch.zeros(1, length, 4)
        borders = case.cu_seqlens
        documents = None if borders is None else ops.Documents.from_cu_seqlens(borders, length)
        return lambda: reference.select_blocks(inputs.q, inputs.k_cmp, lse, GEOMETRY, length, 0.3, documents)

    expected = count(choose(128))
    assert 10 < expected.total() < 200
    assert count(choose(257)) == expected
    assert count(choose(1024)) == expected
    packed = count(choose(128, (64, 64)))
    assert count(choose(256, (8,) * 32)) == packed


def stored_bytes(length, *, heads=4, documents=None, dtype=torch.float32):
    """Bytes that backward keeps, each storage counted once, and those of the inputs among them."""
    lengths = None if documents is None else (length // documents,) * documents
    case = Case("", GEOMETRY, length, heads=heads, groups=2, dim=16, value_dim=16, lengths=lengths)
    inputs = draw(case, dtype).leaves()
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = nsa_attention(*inputs, GEOMETRY, cu_seqlens=case.cu_seqlens)
    assert output.requires_grad
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("documents", [None, 2])
def test_storage_for_backward_is_linear_in_length(documents):
    """Exactly affine at lengths that the blocks divide: equal steps in length cost equal bytes."""
    lengths = (256, 512, 768, 2048)
    sizes = [stored_bytes(length, documents=documents) for length in lengths]
    per_token = (sizes[1] - sizes[0]) / 256
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]
    assert sizes[3] - sizes[2] == per_token * (2048 - 768)


def test_storage_holds_no_copy_of_keys_per_query():
    """Below what ten sets of the inputs would take; one copy of a query's selected keys and values is 64 tokens."""
    length, item = 1024, 4
    inputs = (4 * 16 + 5 * 2 * 32 + 4 * 3) * length * item
    assert stored_bytes(length) < 3 * inputs


def test_storage_in_bf16_is_half_of_fp32_save_for_the_small():
    """q, k, v and o are kept in the type they came in: an fp32 copy would show."""
    assert stored_bytes(1024, dtype=torch.bfloat16) < 0.75 * stored_bytes(1024)


def test_a_loop_over_tokens_would_be_seen():
    """The counter is alive: a loop over queries shows in it."""

    def looped(length):
        inputs = draw(Case("", GEOMETRY, length), torch.float32)
        return lambda: [
            ops.window_attention(inputs.q[:, t : t + 1], inputs.k_win[:, : t + 1], inputs.v_win[:, : t + 1], 8)
            for t in range(length)
        ]

    assert count(looped(32)).total() > 1.9 * count(looped(16)).total()


def test_paper_geometry_takes_the_same_operations():
    """Nothing loops over the taps of the stencil, the selected slots or the tokens of a block."""
    small = Case("", GEOMETRY, 256, heads=4, groups=2)
    paper = Case("", cases.PAPER, 256, heads=4, groups=2)
    counts = []
    for case in (small, paper):
        inputs = draw(case, torch.float32).leaves()
        counts.append(count(lambda inputs=inputs, case=case: nsa_attention(*inputs, case.geometry).sum().backward()))
    assert counts[0] == counts[1]
