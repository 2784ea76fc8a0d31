"""The table of pieces of the warp-specialized kernel, against the index that it is made of."""

import pytest
import torch

from trifocal.ops.layout import Documents

pytest.importorskip("triton")

BLOCK, PIECE, TOKENS, GROUPS, NUM_SELECTED = 64, 64, 300, 2, 4


@pytest.mark.parametrize("q_per_kv", [4, 16])
@pytest.mark.parametrize("lengths", [None, (100, 1, 199)])
def test_pieces_cover_every_slot_once(lengths, q_per_kv, device):
    from trifocal.ops.hopper.selected.dkdv_warp_specialized import piece_table
    from trifocal.ops.triton.selected.block_csr import build_block_csr
    from trifocal.ops.triton.selected.common import SelectedProblem

    generator = torch.Generator().manual_seed(0)
    batch, documents = 2, None
    if lengths is not None:
        batch = 1
        documents = Documents.from_cu_seqlens(torch.tensor([0, *lengths], device=device).cumsum(0), TOKENS)
    chosen = torch.randint(-1, 5, (batch, TOKENS, GROUPS, NUM_SELECTED), generator=generator, dtype=torch.int32)
    chosen = chosen.to(device)
    index = build_block_csr(chosen, BLOCK, TOKENS, documents, chunk_rows=128, piece_slots=PIECE)
    packed = documents is not None
    q, k = (torch.empty(batch, TOKENS, heads, 8, device=device) for heads in (GROUPS * q_per_kv, GROUPS))
    rows = torch.empty(q.shape[:3], device=device)
    table = piece_table(SelectedProblem(q, q, k, k, rows, rows, None, chosen, BLOCK, 1.0, documents), index)
    # What follows counts on the host.
    index = type(index)(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in index))
    table, chosen = table.cpu(), chosen.cpu()
    documents = documents if documents is None else documents.to("cpu")

    taken = torch.zeros(int((index.keys != index.unused).sum()), dtype=torch.int32)
    sorted_keys = index.keys[index.slots]
    for piece in range(int(index.first_pieces[-1])):
        begin, end, masked_end, piece_batch, group, first_token = table[piece, :6].tolist()
        assert 0 < end - begin <= PIECE
        taken[begin:end] += 1
        assert (sorted_keys[begin:end] == index.piece_keys[piece]).all()
        slots = index.slots[begin:end]
        row = slots // (GROUPS * NUM_SELECTED)
        token = row % TOKENS
        assert (row // TOKENS == piece_batch).all() and (slots // NUM_SELECTED % GROUPS == group).all()
        start = documents.cu_seqlens[documents.ids[token].long()] if packed else 0
        assert (start + chosen.flatten()[slots] * BLOCK == first_token).all()
        # A mask is needed where a query does not see the block's last key, and nowhere else.
        assert ((token < first_token + BLOCK - 1) == (torch.arange(begin, end) < masked_end)).all()
    assert (taken == 1).all()
