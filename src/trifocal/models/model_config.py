"""The configuration of a decoder: everything that its weights depend on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import torch
import tyro

from trifocal.errors import UserError
from trifocal.fields import check_at_least, check_types, from_table
from trifocal.nn.rope import UNSCALED, RopeScaling
from trifocal.ops import Geometry
from trifocal.ops.dispatch import Backend, resolve
from trifocal.ops.geometry import LARGEST_SIZE

Attention = Literal["nsa", "selected", "window", "dense"]
Compressor = Literal["mean", "mlp"]
Chooser = Literal["compressed", "index"]
Selection = Literal["importance", "exact", "random"]
MAX_LAYERS = 10_000
"""Each layer is an object of Python: more of them would take minutes to make."""
# No pair turns: every angle is 0 in the precision of the tables.
_UNROTATED = RopeScaling(rope_type="linear", factor=1e300)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of a `DecoderLM`. The default sizes are those of the production preset, m7c, on bytes.

    Args:
        from_: Folder of weights, run or checkpoint that training begins with, `from` in files and flags; empty: random
            weights. It is no part of the model: equal models may come from different folders.
        vocab_size: Tokens of the vocabulary.
        dim: E, width of the residual stream.
        num_layers: Decoder blocks.
        num_heads: H, query heads.
        num_kv_heads: G, KV heads; H/G query heads share one, and its chosen blocks. Divides `num_heads`.
        head_dim: D of queries and keys; even.
        value_dim: V of values.
        mlp_dim: Hidden width of the SwiGLU.
        geometry: Block sizes of the sparse attention, in tokens.
        attention: `"nsa"`; `"selected"`, one softmax over first, local and selected blocks, without gates; `"window"`,
            only the last tokens; or `"dense"`, for the dense baseline. They differ only in the attention.
        layer_types: The attention of each layer, where layers differ; fewer names than layers repeat, their number
            divides that of the layers, and saved configurations name every layer. Empty: `attention` in all of them.
        sliding_window: Keys that a query of a window layer sees; 0 takes `geometry.window_size`.
        chooser: What scores the blocks: `"compressed"`, the keys of the compressed branch; or `"index"`, small queries
            and keys that do nothing else, taught by a loss: `train.choice_loss_weight`.
        selection: `"importance"`, by the chooser's scores; or a control: `"exact"`, by the attention of the selected
            branch itself over the whole past; `"random"`, which draws the blocks that are not forced.
        compressor: Compressor of the keys and values of a block, `"mean"` or `"mlp"`.
        shared_kv: One projection of keys and values for all branches instead of one each.
        qk_norm: Whether each head's query and key pass an RMSNorm before they are rotated.
        qk_norm_all_heads: Whether one such norm is over all heads of a branch, instead of each head; with `qk_norm`.
        norm_after: Whether a layer's RMSNorms are behind attention and MLP, instead of in front of them.
        qkv_bias: Whether the projections of queries, keys and values have biases.
        o_bias: Whether the attention's output projection has a bias.
        mlp_bias: Whether the SwiGLU's maps have biases.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: Scaling of the rotary frequencies, for sequences longer than those of pretraining.
        unscaled_layers: Layers, by number, whose rotary frequencies `rope_scaling` does not change.
        unrotated_layers: Layers, by number, whose queries and keys are not rotated.
        norm_eps: Added to the mean square in every norm.
        tie_embeddings: Use the embedding as the output projection.
        backend: Code that runs the sparse attention: `"auto"`, `"reference"` or `"triton"`.

    Raises:
        UserError: If a value is out of range or does not fit another; the message names it.
    """

    from_: Annotated[str, tyro.conf.arg(name="from")] = field(default="", compare=False)
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
    layer_types: tuple[Attention, ...] = ()
    sliding_window: int = 0
    chooser: Chooser = "compressed"
    selection: Selection = "importance"
    compressor: Compressor = "mean"
    shared_kv: bool = False
    qk_norm: bool = False
    qk_norm_all_heads: bool = False
    norm_after: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    unscaled_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        check_types(self, "model")
        check_at_least(self, "model", vocab_size=1, dim=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1)
        check_at_least(self, "model", value_dim=1, mlp_dim=1, sliding_window=0)
        for name, most in (("num_layers", MAX_LAYERS), ("sliding_window", LARGEST_SIZE)):
            if getattr(self, name) > most:
                raise UserError(f"model.{name} must be at most {most}, got {getattr(self, name)}")
        for name in ("rope_theta", "norm_eps"):
            if getattr(self, name) <= 0:
                raise UserError(f"model.{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                "model.num_heads must be a multiple of model.num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"model.head_dim must be even for rotary positions, got {self.head_dim}")
        if self.qk_norm_all_heads and not self.qk_norm:
            raise UserError("model.qk_norm_all_heads needs model.qk_norm = true, got false")
        if self.layer_types:
            times, rest = divmod(self.num_layers, len(self.layer_types))
            if rest:
                raise UserError(
                    "model.layer_types names the attention of each layer, or of a few that repeat: their number must "
                    f"divide {self.num_layers} layers, got {len(self.layer_types)}"
                )
            object.__setattr__(self, "layer_types", self.layer_types * times)
        for name in ("unscaled_layers", "unrotated_layers"):
            layers = getattr(self, name)
            if not all(0 <= layer < self.num_layers for layer in layers):
                raise UserError(f"model.{name} must be layers from 0 to {self.num_layers - 1}, got {layers!r}")

    @property
    def attention_of_layers(self) -> tuple[Attention, ...]:
        """The attention of each layer, first to last."""
        return self.layer_types or (self.attention,) * self.num_layers

    def rope_scaling_of(self, layer: int) -> RopeScaling:
        """Scaling of the rotary frequencies in a layer."""
        if layer in self.unrotated_layers:
            return _UNROTATED
        return UNSCALED if layer in self.unscaled_layers else self.rope_scaling

    @property
    def window_of_layers(self) -> int:
        """Keys that a query of a window layer sees."""
        return self.sliding_window or self.geometry.window_size

    @property
    def chooses_blocks(self) -> bool:
        """Whether any layer selects blocks."""
        return any(kind in ("nsa", "selected") for kind in self.attention_of_layers)

    @property
    def has_index(self) -> bool:
        """Whether any layer chooses its blocks by an index."""
        return self.chooses_blocks and self.chooser == "index" and self.selection == "importance"

    @property
    def undecodable(self) -> str:
        """Why the model cannot decode; empty if it can."""
        if self.chooses_blocks and self.selection != "importance":
            return f'model.selection "{self.selection}" is a control for training and evaluation, which cannot decode'
        return ""

    @property
    def untaught_choice(self) -> str:
        """Why the choice has nothing that its own loss could teach; empty if it has."""
        if not self.chooses_blocks:
            return "no layer chooses blocks"
        if self.selection != "importance":
            return f'model.selection "{self.selection}" learns nothing'
        return "" if self.chooser == "index" else 'model.chooser is "compressed", and the loss teaches an "index"'

    def resolved_backend(self, operation: str, precision: str, device: torch.device) -> str:
        """The backend of attention whose products have this precision, as of `trifocal.ops.dispatch.resolve`."""
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        q = torch.empty(1, 1, self.num_heads, self.head_dim, dtype=dtype, device=device)
        v = torch.empty(1, 1, self.num_kv_heads, self.value_dim, dtype=dtype, device=device)
        return resolve(operation, self.backend, q, v, self.geometry)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Build from nested plain values, as TOML or JSON give them; missing keys take their defaults."""
        return from_table(cls, values, section="model")

    def to_dict(self) -> dict[str, Any]:
        """Nested values of JSON types, without `from_`, from which `from_dict` builds an equal configuration."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del plain["from_"]
        return plain
