"""Where the blocks of packed documents lie."""

import pytest
import torch

from tests.ops.cases import geometry
from trifocal.ops import Documents
from trifocal.ops.layout import pad_boundaries, place_compressed_blocks
from trifocal.ops.triton.documents import documents_of_blocks, first_compressed_blocks

RULES = geometry(8, 4, 16, 3, 1, 1, 11)
LENGTHS = {
    "shorter than a block, exactly one, a token more": [7, 8, 9, 1, 16, 17],
    "hundreds of documents, padded": [1 + number * 7 % 23 for number in range(300)],
}
each_pack = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def boundaries(lengths, device):
    found = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return (pad_boundaries(found, int(found[-1])) if len(lengths) > 256 else found).to(device)


@each_pack
def test_compressed_blocks(lengths, device):
    """Each document has its own; slots that are left over are seen by nobody."""
    documents, total = Documents.from_checked(boundaries(lengths, device), sum(lengths)), sum(lengths)
    first_blocks, ranges = place_compressed_blocks(documents, total // RULES.compression_stride, RULES)
    expected, starts, token = [], [], 0
    for length in lengths:
        starts.append(len(expected))
        for first in range(0, length - RULES.compression_block_size + 1, RULES.compression_stride):
            expected.append([token + first + RULES.compression_block_size - 1, token + length])
        token += length
    assert first_blocks[: len(lengths)].tolist() == starts
    assert ranges.T.tolist() == expected + [[total, total]] * (ranges.shape[1] - len(expected))


@each_pack
def test_compressed_blocks_are_placed_once_for_all_layers(lengths, device):
    """Documents keep the places of one geometry, and nobody takes them for those of another or of a part."""
    documents = Documents.from_checked(boundaries(lengths, device), sum(lengths))
    slots = sum(lengths) // RULES.compression_stride
    placed = documents.with_blocks(RULES)
    first_blocks, ranges = place_compressed_blocks(documents, slots, RULES)
    assert torch.equal(placed.first_blocks, first_blocks) and torch.equal(placed.slots, ranges)
    assert first_compressed_blocks(placed, RULES) is placed.first_blocks
    assert place_compressed_blocks(placed, slots, RULES)[1].data_ptr() == placed.slots.data_ptr()
    finer = geometry(4, 4, 16, 3, 1, 1, 11)
    assert torch.equal(first_compressed_blocks(placed, finer), first_compressed_blocks(documents, finer))
    assert placed.part(0, 1).placed_blocks(RULES) is None


@each_pack
def test_selection_blocks(lengths, device):
    """Every token's block names its document."""
    cu_seqlens = boundaries(lengths, device)
    documents, size = Documents.from_checked(cu_seqlens, sum(lengths)), RULES.selection_block_size
    found = documents_of_blocks(cu_seqlens, sum(lengths) // size + len(cu_seqlens) - 1, size)
    ids = documents.ids.long()
    blocks = cu_seqlens[ids] // size + ids + documents.positions // size
    assert torch.equal(found[blocks], documents.ids)
    assert (found.diff() >= 0).all()
