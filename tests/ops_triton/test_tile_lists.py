"""The lists of blocks that neighbouring queries chose, against lists made in plain Python."""

import pytest
import torch

from trifocal.ops import Documents, dispatch

pytest.importorskip("triton")

BLOCK = 16


def expected_lists(chosen, num_keys, lengths, queries):
    """By batch entry, group and tile: who chose each block, by its first token; how many blocks are seen in part."""
    batch, num_queries, groups, _ = chosen.shape
    starts = [0]
    for length in lengths or ():
        starts.append(starts[-1] + length)
    found = {}
    for entry in range(batch):
        for group in range(groups):
            for first in range(0, num_queries, queries):
                members = {}
                for query in range(first, min(first + queries, num_queries)):
                    token = query + num_keys - num_queries
                    start = max(start for start in starts if start <= token)
                    for block in chosen[entry, query, group].tolist():
                        if 0 <= block <= (token - start) // BLOCK:
                            place = start + block * BLOCK
                            members[place] = members.get(place, 0) | 1 << query - first
                masked = sum(place + BLOCK - 1 > first + num_keys - num_queries for place in members)
                found[entry, group, first // queries] = members, masked
    return found


@pytest.mark.parametrize(
    ("batch", "num_queries", "num_keys", "num_selected", "queries", "lengths"),
    [
        pytest.param(2, 75, 75, 3, 8, None, id="the last tile is not full"),
        pytest.param(1, 41, 230, 5, 32, None, id="fewer queries than keys, every bit of a word"),
        pytest.param(1, 40, 40, 7, 4, None, id="more may be chosen than there are blocks"),
        pytest.param(1, 9, 50, 3, 1, None, id="tiles of one query"),
        pytest.param(1, 90, 90, 3, 21, (16, 1, 17, 2, 54), id="documents, a tile across several"),
        pytest.param(1, 60, 90, 4, 16, (16, 1, 17, 2, 54), id="the last queries of documents"),
        pytest.param(1, 70, 70, 1, 10, (70, 0), id="one choice a query, a document without tokens"),
    ],
)
def test_lists_have_every_block_that_a_tile_chose_once(
    batch, num_queries, num_keys, num_selected, queries, lengths, device
):
    """Latest first, with the bits of who chose it; pads, repetitions and blocks ahead are nobody's."""
    from trifocal.ops.triton.selected.tile_lists import build_tile_lists

    generator = torch.Generator().manual_seed(num_keys)
    shape = (batch, num_queries, 2, num_selected)
    chosen = torch.randint(-1, num_keys // BLOCK + 2, shape, generator=generator, dtype=torch.int32)
    # A tile without any choice.
    chosen[0, :queries] = -1
    documents = None
    if lengths is not None:
        borders = torch.tensor([0, *lengths], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        documents = Documents.from_checked(borders, num_keys)
    lists = build_tile_lists(chosen.to(device), BLOCK, num_keys, documents, queries)
    assert lists.queries == queries
    expected = expected_lists(chosen, num_keys, lengths, queries)
    assert list(lists.counts.shape) == [batch, 2, -(-num_queries // queries), 2]
    for place, (members, masked) in expected.items():
        # A list without any block has one entry, of nobody.
        masked, members = (masked, members) if members else (1, {0: 0})
        tokens = sorted(members, reverse=True)
        assert lists.counts[place].tolist() == [masked, len(tokens)]
        assert lists.tokens[place][: len(tokens)].tolist() == tokens
        words = [word & 0xFFFFFFFF for word in lists.members[place][: len(tokens)].tolist()]
        assert words == [members[token] for token in tokens]


@pytest.mark.parametrize(("q_per_kv", "queries"), [(1, 32), (3, 32), (5, 25), (64, 2)])
def test_a_tile_has_a_bit_of_a_word_for_every_query(q_per_kv, queries):
    q = torch.empty(1, 4096, 2 * q_per_kv, 64, device="meta")
    assert dispatch.queries_of_tile(q, q_per_kv, rows=128, groups=2) == queries
