"""Queries whose selected branch is dropped in training: drawn evenly, the same in every call."""

import torch

from trifocal.nn.selected_dropout import drop_selected

TOKENS = torch.randint(64, (8, 2000), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(2000)


def test_the_share_is_shut_at_all_tokens_and_positions() -> None:
    assert not drop_selected(TOKENS, POSITIONS, 0.0, 0).any() and drop_selected(TOKENS, POSITIONS, 1.0, 0).all()
    dropped = drop_selected(TOKENS, POSITIONS, 0.25, 0)
    assert dropped.dtype == torch.bool and dropped.shape == TOKENS.shape
    # 16,000 draws have a standard deviation of 0.0034, the 250 or so of a token one of 0.028.
    assert abs(dropped.double().mean() - 0.25) < 5 * 0.0034
    for token in range(64):
        assert abs(dropped[token == TOKENS].double().mean() - 0.25) < 5 * 0.028
    assert (dropped.double().mean(0).unflatten(0, (20, 100)).mean(1) - 0.25).abs().max() < 5 * 0.0153


def test_a_draw_depends_on_token_position_and_layer_alone() -> None:
    dropped = drop_selected(TOKENS, POSITIONS, 0.5, 0)
    assert torch.equal(drop_selected(TOKENS[3:5, 700:].int(), POSITIONS[700:].int(), 0.5, 0), dropped[3:5, 700:])
    for other in (
        drop_selected(TOKENS, POSITIONS, 0.5, 1),
        drop_selected(TOKENS + 1, POSITIONS, 0.5, 0),
        dropped.roll(1, 1),
    ):
        assert 0.45 < (other == dropped).double().mean() < 0.55
