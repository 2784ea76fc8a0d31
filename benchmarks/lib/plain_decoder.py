"""A plain dense model in PyTorch: SDPA over a static cache, compiled, recorded as a CUDA graph.

It is the fastest simple program for the task: sequences of one length, no pages, the likeliest
token.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from lib.recorder import Unavailable
from trifocal.models import DecoderLM
from trifocal.nn.rope import rotary_tables, rotate


class _Layer(NamedTuple):
    """Weights of a layer, those with the same input joined, and its cache, [B, G, length, *]."""

    attention_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    k: Tensor
    v: Tensor


class PlainDecoder:
    """Takes one token a sequence at the last position of a cache that is full but for it.

    The cache is as long as the past and the new token, so that SDPA needs no mask: its best case. `tokens` is the last
    token of each sequence, which a step overwrites with the next. Residual stream and norms have the products' type.
    """

    @torch.no_grad()
    def __init__(self, model: DecoderLM, sequences: int, length: int, dtype: torch.dtype) -> None:
        config = model.config
        if config.norm_after or config.qk_norm or config.qkv_bias or config.o_bias or config.mlp_bias:
            raise Unavailable("the plain model has no norms behind its layers or of heads, and no biases")
        device = model.embedding.weight.device
        self._config, self._length = config, length
        self.tokens = torch.zeros(sequences, dtype=torch.int64, device=device)
        exact = torch.promote_types(dtype, torch.float32)
        positions = torch.arange(length, device=device)
        self._cos, self._sin = rotary_tables(positions, config.head_dim, config.rope_theta, exact, config.rope_scaling)

        weights = model.state_dict()

        def joined(prefix: str, *names: str) -> Tensor:
            return torch.cat([weights[f"{prefix}{name}.weight"] for name in names]).to(dtype)

        def cache(width: int) -> Tensor:
            return torch.randn(sequences, config.num_kv_heads, length, width, device=device, dtype=dtype)

        self._layers = []
        for number in range(config.num_layers):
            block = f"blocks.{number}."
            layer = _Layer(
                joined(block, "attention_norm"),
                joined(f"{block}attention.", "q_proj", "k_proj", "v_proj"),
                joined(block, "attention.o_proj"),
                joined(block, "mlp_norm"),
                joined(f"{block}mlp.", "gate_proj", "up_proj"),
                joined(block, "mlp.down_proj"),
                cache(config.head_dim),
                cache(config.value_dim),
            )
            self._layers.append(layer)
        self._embedding, self._norm = joined("", "embedding"), joined("", "norm")
        self._output = self._embedding if model.head is None else joined("", "head")

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits of the last tokens of the sequences, [B, T] -> [B, T, vocab_size]; T is 1 or the cache's length."""
        config, count = self._config, tokens.shape[1]
        assert count in (1, self._length), (count, self._length)
        cos, sin = self._cos[-count:], self._sin[-count:]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        sizes = [heads * config.head_dim, kv_heads * config.head_dim, kv_heads * config.value_dim]
        x = self._embedding[tokens]
        for layer in self._layers:
            normed = rms_norm(x, layer.attention_norm.shape, layer.attention_norm, config.norm_eps)
            q, k, v = linear(normed, layer.qkv).split(sizes, dim=-1)
            q, k = (rotate(x.unflatten(-1, (-1, config.head_dim)), cos, sin).transpose(1, 2) for x in (q, k))
            layer.k[:, :, -count:] = k
            layer.v[:, :, -count:] = v.unflatten(-1, (kv_heads, -1)).transpose(1, 2)
            o = scaled_dot_product_attention(q, layer.k, layer.v, is_causal=count > 1, enable_gqa=True)
            x = x + linear(o.transpose(1, 2).flatten(2), layer.o)
            normed = rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, config.norm_eps)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        return linear(rms_norm(x, self._norm.shape, self._norm, config.norm_eps), self._output)

    def step(self) -> None:
        """Append the last token of every sequence, and take the likeliest next one."""
        self.tokens.copy_(self.logits(self.tokens[:, None])[:, 0].argmax(-1))
