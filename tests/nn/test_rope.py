"""Rotary positions: one pair at a time, each head by itself, scores by distance alone."""

import torch

from trifocal.nn import rotary_tables, rotate

THETA = 10000.0


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    exact = torch.promote_types(x.dtype, torch.float32)
    return rotate(x, *rotary_tables(positions, x.shape[-1], THETA, exact))


def test_pairs_turn_as_complex_numbers() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 100, 12345])
    frequencies = torch.tensor([THETA ** (-2 * pair / 8) for pair in range(4)], dtype=torch.float64)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * positions[:, None, None] * frequencies)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rotated(x, positions), expected, rtol=0, atol=1e-12)


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 1, 2, 6)
    assert torch.equal(rotated(x, torch.tensor([0])), x)


def test_each_head_is_rotated_by_itself() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 7, 4, 8)
    positions = torch.arange(7)
    alone = [rotated(x[:, :, head : head + 1], positions) for head in range(4)]
    assert torch.equal(rotated(x, positions), torch.cat(alone, dim=2))


def test_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 4, 16, dtype=torch.float64)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        return (rotated(q, torch.tensor([q_position])) * rotated(k, torch.tensor([k_position]))).sum(-1)

    for distance in (0, 1, 7, 300):
        for shift in (1, 64, 4096, 1_000_000):
            torch.testing.assert_close(score(distance + shift, shift), score(distance, 0), rtol=0, atol=1e-8)
    assert (score(7, 0) - score(8, 0)).abs().max() > 1e-2


def test_fp32_angles_do_not_drift_at_a_million_tokens() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 2, 16)
    far = torch.tensor([1_000_003])
    torch.testing.assert_close(rotated(x, far).double(), rotated(x.double(), far), rtol=0, atol=1e-6)


def test_bf16_is_rotated_in_fp32() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 9, 2, 16, dtype=torch.bfloat16)
    positions = torch.arange(9) * 37
    assert torch.equal(rotated(x, positions), rotated(x.float(), positions).bfloat16())
