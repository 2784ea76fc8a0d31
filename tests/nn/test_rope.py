"""Rotary positions: one pair at a time, each head by itself, scores by distance alone."""

import math

import pytest
import torch

from trifocal.nn import RopeScaling, rotary_frequencies, rotary_tables, rotate

THETA = 10000.0


def rotated(x, positions):
    exact = torch.promote_types(x.dtype, torch.float32)
    return rotate(x, *rotary_tables(positions, x.shape[-1], THETA, exact))


def test_pairs_turn_as_complex_numbers():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 100, 12345])
    frequencies = torch.tensor([THETA ** (-2 * pair / 8) for pair in range(4)], dtype=torch.float64)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * positions[:, None, None] * frequencies)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rotated(x, positions), expected, rtol=0, atol=1e-12)


def test_fp32_angles_do_not_drift_at_a_million_tokens():
    torch.manual_seed(0)
    x = torch.randn(1, 1, 2, 16)
    far = torch.tensor([1_000_003])
    torch.testing.assert_close(rotated(x, far).double(), rotated(x.double(), far), rtol=0, atol=1e-6)


def test_bf16_is_rotated_in_fp32():
    torch.manual_seed(0)
    x = torch.randn(1, 9, 2, 16, dtype=torch.bfloat16)
    positions = torch.arange(9) * 37
    assert torch.equal(rotated(x, positions), rotated(x.float(), positions).bfloat16())


D, ORIGINAL, LONGEST = 16, 64, 256
SCALED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 20.0, "beta_slow": 0.5},
    "yarn, not rounded": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "attention_factor": 1.3},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("name", SCALED)
def test_frequencies_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"rope_type": name, **SCALED[name]}
    kind = given["rope_type"]
    if kind not in ROPE_INIT_FUNCTIONS:
        pytest.skip(f"this transformers has no {kind}")
    theirs = {**given, "rope_theta": THETA}
    if kind in ("yarn", "llama3"):
        theirs["original_max_position_embeddings"] = given["original_max_position_embeddings"] = ORIGINAL
    config = transformers.LlamaConfig(
        hidden_size=2 * D, num_attention_heads=2, rope_parameters=theirs, max_position_embeddings=LONGEST
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config)
    found, found_factor = rotary_frequencies(D, THETA, RopeScaling(**given))
    torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0)
    assert found_factor == pytest.approx(factor, rel=1e-12)


def test_the_attention_factor_multiplies_cosines_and_sines():
    scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    cos, sin = rotary_tables(torch.arange(5), 8, THETA, torch.float64, scaling)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, (0.1 * math.log(4) + 1) ** 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "dynamic"}, "rope_type must be one of default, linear, yarn, llama3, got 'dynamic'"),
        ({"factor": 2.0}, 'rope_scaling.factor has no effect with the rope_type "default"'),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings must be at least 2 for yarn, got 0"),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 4.0},
            "low_freq_factor must be below high_freq_factor, got 4.0 and 4.0",
        ),
    ],
)
def test_scalings_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
        ({"head_dim": 2.5}, "head_dim must be an integer, got 2.5"),
        ({"theta": 0}, "theta must be above 0, got 0"),
        ({"theta": math.nan}, "theta must be above 0, got nan"),
        ({"positions": [0, 1]}, r"positions must be a tensor \[T\], got list"),
        ({"positions": torch.arange(4)[None]}, r"positions must have the shape \[T\], got \[1, 4\]"),
    ],
)
def test_tables_of_nothing_are_refused(change, message):
    """An odd width gave tables of another, and a base of 0 gave NaN, both in silence."""
    with pytest.raises(ValueError, match=message):
        rotary_tables(**{"positions": torch.arange(4), "head_dim": 8, "theta": 1e4, "dtype": torch.float32, **change})
