"""Where the blocks of packed documents lie: the kernels against PyTorch's own operations."""

import pytest
import torch

from tests.ops.cases import geometry
from trifocal.ops import Documents
from trifocal.ops.layout import compressed_layout, pad_boundaries
from trifocal.ops.triton.documents import documents_of_blocks, first_compressed_blocks, place_slots

RULES = geometry(8, 4, 16, 3, 1, 1, 11)
LENGTHS = {
    "shorter than a block, exactly one, a token more": [7, 8, 9, 1, 16, 17],
    "more documents than a program holds, padded": [1 + number * 7 % 23 for number in range(300)],
}
each_pack = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def boundaries(lengths, device):
    found = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return (pad_boundaries(found, int(found[-1])) if len(lengths) > 256 else found).to(device)


@each_pack
def test_compressed_blocks(lengths, device):
    documents = Documents.from_checked(boundaries(lengths, device), sum(lengths))
    slots = sum(lengths) // RULES.compression_stride
    layout = compressed_layout(documents, slots, RULES)
    first_blocks = first_compressed_blocks(documents, RULES)
    assert torch.equal(first_blocks, layout.first_blocks)
    begin, end = place_slots(first_blocks, documents, slots, sum(lengths), RULES)
    filled = layout.ids >= 0
    starts = documents.cu_seqlens[layout.ids.clamp(min=0)]
    last_tokens = starts + layout.starts + (RULES.compression_block_size - 1)
    assert torch.equal(begin, torch.where(filled, last_tokens, sum(lengths)).int())
    ends = documents.cu_seqlens[layout.ids.clamp(min=0) + 1]
    assert torch.equal(end, torch.where(filled, ends, sum(lengths)).int())


@each_pack
def test_compressed_blocks_are_placed_once_for_all_layers(lengths, device):
    """Documents keep the places of one geometry, and nobody takes them for those of another or of a part."""
    documents = Documents.from_checked(boundaries(lengths, device), sum(lengths))
    slots = sum(lengths) // RULES.compression_stride
    placed = documents.with_blocks(RULES)
    first_blocks = first_compressed_blocks(documents, RULES)
    ranges = place_slots(first_blocks, documents, slots, sum(lengths), RULES)
    assert torch.equal(placed.first_blocks, first_blocks) and torch.equal(placed.slots, torch.stack(ranges))
    assert first_compressed_blocks(placed, RULES) is placed.first_blocks
    kept = place_slots(placed.first_blocks, placed, slots, sum(lengths), RULES)
    assert [part.data_ptr() for part in kept] == [part.data_ptr() for part in placed.slots]
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
