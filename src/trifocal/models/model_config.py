"""The configuration of a decoder: everything that its weights depend on."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from trifocal.errors import UserError
from trifocal.fields import from_table
from trifocal.ops import Geometry

Attention = Literal["nsa", "dense"]
Compressor = Literal["mean", "mlp"]
Gate = Literal["sigmoid", "softmax"]
Backend = Literal["auto", "reference", "triton"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of a `DecoderLM`. The defaults are those of the production preset, m7c, on bytes.

    Args:
        vocab_size: Tokens of the vocabulary.
        dim: E, width of the residual stream.
        num_layers: Decoder blocks.
        num_heads: H, query heads.
        num_kv_heads: G, KV heads; H/G query heads share one, and its chosen blocks. Divides `num_heads`.
        head_dim: D of queries and keys; even.
        value_dim: V of values.
        mlp_dim: Hidden width of the SwiGLU.
        geometry: Block sizes of the sparse attention, in tokens.
        attention: `"nsa"`, or `"dense"` for the dense twin, which differs in the attention alone.
        compressor: φ of the compressed branch, `"mean"` or `"mlp"`.
        gate: `"sigmoid"` per head or `"softmax"` over the branches per group.
        shared_kv: One projection of keys and values for all branches instead of one each.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in every norm.
        tie_embeddings: Use the embedding as the output projection.
        backend: Code that runs the sparse attention: `"auto"`, `"reference"` or `"triton"`.

    Raises:
        UserError: If a value is out of range or does not fit another; the message names it.
    """

    vocab_size: int = 257
    dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 64
    mlp_dim: int = 2048
    geometry: Geometry = field(default_factory=Geometry)
    attention: Attention = "nsa"
    compressor: Compressor = "mean"
    gate: Gate = "sigmoid"
    shared_kv: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "value_dim",
            "mlp_dim",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"model.{name} must be a positive integer, got {value!r}")
        for name, choices in (
            ("attention", get_args(Attention)),
            ("compressor", get_args(Compressor)),
            ("gate", get_args(Gate)),
            ("backend", get_args(Backend)),
        ):
            if getattr(self, name) not in choices:
                raise UserError(f"model.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("shared_kv", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"model.{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise UserError(f"model.{name} must be a positive number, got {value!r}")
        if not isinstance(self.geometry, Geometry):
            raise UserError(f"model.geometry must be a Geometry, got {type(self.geometry).__name__}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                "model.num_heads must be a multiple of model.num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"model.head_dim must be even for rotary positions, got {self.head_dim}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Build from nested plain values, as TOML or JSON give them; missing keys take their defaults.

        Raises:
            UserError: If a key is unknown (the message names the nearest valid one) or a value does not fit.
        """
        return from_table(cls, values, section="model")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, from which `from_dict` builds an equal configuration."""
        return asdict(self)
