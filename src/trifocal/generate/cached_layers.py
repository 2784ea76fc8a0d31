"""A decoder's layers as decoding runs them: weights prepared once, and per kind of attention how it uses the caches.

Prepared are copies in the type of the products, those that read the same input joined. The residual stream, norms
and gates stay in fp32 (fp64 for a model in fp64). A new kind of attention has its place in `_KINDS`.
"""

import copy
import functools
import operator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trifocal.generate.prefill import Chunk, Compress, causal_attention, extend_dense, extend_sparse
from trifocal.generate.products import MatrixProducts
from trifocal.nn import Block, DenseAttention, GroupSoftmaxGate, MeanCompressor, NSAttention, SigmoidGate
from trifocal.nn.gate import NUM_BRANCHES
from trifocal.ops import (
    DecodeBatch,
    DenseCache,
    Geometry,
    SparseCache,
    append_dense,
    append_sparse,
    decode_attention,
    decode_dense_attention,
    nsa_attention,
)

Rotary = tuple[Tensor, Tensor]


class CachedAttention(Protocol):
    """Attention between its joined input projection and its output projection.

    Attributes:
        weight, bias: Of the joined projection, [outputs, E] and [outputs]; a bias of None is none.
    """

    weight: Tensor
    bias: Tensor | None

    def prefill(self, projected: Tensor, cache: Any, chunk: Chunk) -> Tensor:
        """Append a chunk of one sequence and attend: [1, T, outputs] -> [1, T, H * V]."""

    def decode(
        self, projected: Tensor, cache: Any, batch: DecodeBatch, rotary: Rotary, products: MatrixProducts
    ) -> Tensor:
        """Append new tokens of a batch and attend: [B, T, outputs] -> [B, T, H * V]."""


class CachedLayer:
    """One block with prepared weights.

    Args:
        block: The decoder's block; what is prepared does not follow later changes of its weights.
        geometry: Block sizes, in tokens, for the longest sequence; see `decode_geometry`.
        dtype: Type of the products and of keys and values.
        products: Of decoding, for a learned φ.
    """

    def __init__(self, block: nn.Module, geometry: Geometry, dtype: torch.dtype, products: MatrixProducts) -> None:
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, NSAttention | DenseAttention)
        self._attention: CachedAttention = _KINDS[type(attention)](attention, geometry, dtype, products)
        self._norm, self._eps = whole(block.attention_norm.weight), block.attention_norm.eps
        self._mlp_norm, self._mlp_eps = whole(block.mlp_norm.weight), block.mlp_norm.eps
        self._out = whole(attention.o_proj.weight).to(dtype)
        self._gate_up = joined([mlp.gate_proj.weight, mlp.up_proj.weight], dtype)
        self._down = whole(mlp.down_proj.weight).to(dtype)

    def prefill(self, x: Tensor, cache: Any, chunk: Chunk, products: MatrixProducts) -> Tensor:
        """The residual stream of a chunk, [1, T, E] -> [1, T, E]."""
        projected = self._project(x, products)
        return self._finish(x, self._attention.prefill(projected, cache, chunk), products)

    def decode(self, x: Tensor, cache: Any, batch: DecodeBatch, rotary: Rotary, products: MatrixProducts) -> Tensor:
        """The residual stream of new tokens, [B, T, E] -> [B, T, E]."""
        projected = self._project(x, products)
        return self._finish(x, self._attention.decode(projected, cache, batch, rotary, products), products)

    def _project(self, x: Tensor, products: MatrixProducts) -> Tensor:
        return products.norm_linear(x, self._norm, self._eps, self._attention.weight, self._attention.bias)

    def _finish(self, x: Tensor, o: Tensor, products: MatrixProducts) -> Tensor:
        x = products.add_linear(x, o, self._out)
        hidden = products.norm_swiglu(x, self._mlp_norm, self._mlp_eps, self._gate_up)
        return products.add_linear(x, hidden, self._down)


class CachedSparseAttention:
    """`NSAttention` with caches; arguments as of `CachedLayer`."""

    def __init__(
        self, attention: NSAttention, geometry: Geometry, dtype: torch.dtype, products: MatrixProducts
    ) -> None:
        self._geometry, self._backend, self._shared = geometry, attention.backend, attention.shared_kv
        self._heads = (attention.num_heads, attention.num_kv_heads)
        self._gate = attention.gate
        linears = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.bias: Tensor | None = None
        if isinstance(self._gate, SigmoidGate):
            linears.append(self._gate.proj)
            self.bias = torch.cat(
                [
                    torch.zeros_like(whole(linear.weight)[:, 0]) if linear.bias is None else whole(linear.bias)
                    for linear in linears
                ]
            ).to(dtype)
        else:
            self._gate_weight, self._gate_bias = (
                whole(x).to(dtype) for x in (self._gate.proj.weight, self._gate.proj.bias)
            )
        self.weight = joined([linear.weight for linear in linears], dtype)
        branches = 1 if self._shared else NUM_BRANCHES
        groups = attention.num_kv_heads
        keys, values = [groups * attention.head_dim] * branches, [groups * attention.value_dim] * branches
        gates = [linears[3].out_features] if self.bias is not None else []
        self._sizes = [attention.num_heads * attention.head_dim, *keys, *values, *gates]
        self._phi = (_prepared(attention.k_compressor, dtype), _prepared(attention.v_compressor, dtype))
        self._phi_of_rows: tuple[Compress, Compress] | None = None
        if not isinstance(attention.k_compressor, MeanCompressor):
            self._phi_of_rows = (_of_windows(self._phi[0], products), _of_windows(self._phi[1], products))

    def prefill(self, projected: Tensor, cache: SparseCache, chunk: Chunk) -> Tensor:
        """As `CachedAttention.prefill`."""
        q, keys, values, gates = self._split(projected, MatrixProducts())
        window = None if self._shared else (keys[2], values[2])
        seen = extend_sparse(
            cache, chunk, (keys[0], values[0]), (keys[1], values[1]), window, self._geometry, self._phi
        )
        return nsa_attention(chunk.rotate(q), *seen, gates, self._geometry, backend=self._backend).flatten(2)

    def decode(
        self, projected: Tensor, cache: SparseCache, batch: DecodeBatch, rotary: Rotary, products: MatrixProducts
    ) -> Tensor:
        """As `CachedAttention.decode`."""
        q, keys, values, gates = self._split(projected, products)
        k_win, v_win = (None, None) if self._shared else (keys[2], values[2])
        append_sparse(
            cache, batch, keys[0], values[0], keys[1], values[1], k_win, v_win, self._geometry, rotary,
            self._phi_of_rows, self._backend,
        )  # fmt: skip
        o = decode_attention(q, gates, cache, batch, self._geometry, rotary, window=True, backend=self._backend)
        return o.flatten(2)

    def _split(self, projected: Tensor, products: MatrixProducts) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
        """q [B, T, H, D]; keys and values of cmp, slc, win, each [B, T, G, *]; gates [B, T, H, 3]."""
        q, *parts = projected.split(self._sizes, dim=-1)
        heads, groups = self._heads
        q = q.unflatten(-1, (heads, -1))
        if self.bias is None:
            gates = self._softmax_gates(q, products)
        else:
            logits = full(parts.pop())
            gates = products.by_row(torch.sigmoid, logits.flatten(0, 1)).view(*logits.shape[:2], heads, NUM_BRANCHES)
        parts = [part.unflatten(-1, (groups, -1)) for part in parts]
        branches = len(parts) // 2
        times = NUM_BRANCHES // branches
        return q, parts[:branches] * times, parts[branches:] * times, gates

    def _softmax_gates(self, q: Tensor, products: MatrixProducts) -> Tensor:
        """As `GroupSoftmaxGate`, with a mean that adds the heads one after another."""
        assert isinstance(self._gate, GroupSoftmaxGate)
        q_per_kv = self._gate.q_per_kv
        pooled = functools.reduce(operator.add, q.unflatten(2, (-1, q_per_kv)).to(full(q).dtype).unbind(3)) / q_per_kv
        logits = full(products.linear(pooled.to(q.dtype), self._gate_weight, self._gate_bias))
        gates = products.by_row(lambda rows: rows.softmax(-1), logits.flatten(0, 2)).view(logits.shape)
        return gates.repeat_interleave(q_per_kv, dim=2)


class CachedDenseAttention:
    """`DenseAttention` with caches; arguments as of `CachedLayer`."""

    def __init__(
        self, attention: DenseAttention, geometry: Geometry, dtype: torch.dtype, products: MatrixProducts
    ) -> None:
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.weight = joined([linear.weight for linear in linears], dtype)
        self.bias = None
        self._sizes = [linear.out_features for linear in linears]
        self._heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)

    def prefill(self, projected: Tensor, cache: DenseCache, chunk: Chunk) -> Tensor:
        """As `CachedAttention.prefill`."""
        q, k, v = self._split(projected)
        return causal_attention(chunk.rotate(q), *extend_dense(cache, chunk, k, v)).flatten(2)

    def decode(
        self, projected: Tensor, cache: DenseCache, batch: DecodeBatch, rotary: Rotary, products: MatrixProducts
    ) -> Tensor:
        """As `CachedAttention.decode`."""
        q, k, v = self._split(projected)
        append_dense(cache, batch, k, v, rotary)
        return decode_dense_attention(q, cache, batch, rotary).flatten(2)

    def _split(self, projected: Tensor) -> list[Tensor]:
        parts = projected.split(self._sizes, dim=-1)
        return [part.unflatten(-1, (heads, -1)) for part, heads in zip(parts, self._heads, strict=True)]


_KINDS: dict[type, Any] = {NSAttention: CachedSparseAttention, DenseAttention: CachedDenseAttention}


class _Product(nn.Module):
    """A linear map of decoding's products, in the place of `nn.Linear`."""

    def __init__(self, weight: Tensor, products: MatrixProducts) -> None:
        super().__init__()
        self._weight, self._products = weight, products

    def forward(self, x: Tensor) -> Tensor:
        return self._products.linear(x, self._weight)


def _prepared(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module, a learned φ, with copies of its weights in another type."""
    other = copy.copy(module)
    other._parameters = {
        name: None if parameter is None else nn.Parameter(whole(parameter).to(dtype), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    other._modules = {name: _prepared(child, dtype) for name, child in module.named_children()}
    return other


def _of_windows(phi: nn.Module, products: MatrixProducts) -> Any:
    """φ of the tokens of blocks, [N, l, G, *] -> [N, G, *], where a block's result does not depend on the others."""
    other = copy.copy(phi)
    other._modules = {
        name: _Product(child.weight, products) if isinstance(child, nn.Linear) else child
        for name, child in phi.named_children()
    }
    return lambda windows: products.by_row(lambda rows: other(rows)[:, 0], windows)


def whole(parameter: Tensor) -> Tensor:
    """A parameter's values; of a sharded one in every process, which must all call this."""
    found = parameter.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def joined(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights that read the same input, one above the other, in the type of the products."""
    return torch.cat([whole(weight).to(dtype) for weight in weights])


def full(x: Tensor) -> Tensor:
    """In fp32, or fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
