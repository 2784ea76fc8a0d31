"""A decoder's layers as decoding runs them: weights prepared once, and per kind of attention how it uses the caches.

Prepared are copies in the type of the products, those that read the same input joined. The residual stream, norms
and gates stay in fp32 (fp64 for a model in fp64). A new kind of attention has its place in `_KINDS`.
"""

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trifocal.generate.prefill import Chunk, Compress, causal_attention, extend_dense, extend_sparse
from trifocal.generate.products import MatrixProducts, RowProducts
from trifocal.nn import Block, DenseAttention, MeanCompressor, NSAttention, SigmoidGate
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
from trifocal.ops.decode_linear import Norm, Residual

Rotary = tuple[Tensor, Tensor]


class CachedAttention(Protocol):
    """Attention between its joined input projection and its output projection.

    Attributes:
        weight, bias: Of the joined projection, [outputs, E] and [outputs], or None.
        num_sigmoids: How many of its last outputs are gates before their sigmoid.
    """

    weight: Tensor
    bias: Tensor | None
    num_sigmoids: int

    def prefill(self, projected: Tensor, gates: Tensor | None, cache: Any, chunk: Chunk) -> Tensor:
        """Append a chunk of one sequence and attend.

        Args:
            projected: The projection's outputs without the gates, [1, T, *].
            gates: [1, T, num_sigmoids]; None without.
            cache: The layer's caches.
            chunk: Where the tokens lie.

        Returns:
            [1, T, H, V].
        """

    def decode(self, projected: Tensor, gates: Tensor | None, cache: Any, batch: DecodeBatch, rotary: Rotary) -> Tensor:
        """As `prefill`, for the new tokens of a batch, [B, T, *] -> [B, T, H, V]."""


class CachedLayer:
    """One block with prepared weights.

    Args:
        block: The decoder's block; what is prepared does not follow later changes of its weights.
        geometry: Block sizes, in tokens, for the longest sequence; see `decode_geometry`.
        dtype: Type of the products and of keys and values.
        products: Of decoding.
    """

    def __init__(self, block: nn.Module, geometry: Geometry, dtype: torch.dtype, products: RowProducts) -> None:
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, NSAttention | DenseAttention)
        self._products = products
        self._attention: CachedAttention = _KINDS[type(attention)](attention, geometry, dtype, products)
        self._norm, self._mlp_norm = (
            Norm(in_full(whole(norm.weight)), norm.eps) for norm in (block.attention_norm, block.mlp_norm)
        )
        self._out = whole(attention.o_proj.weight).to(dtype)
        self._gate_up = joined([mlp.gate_proj.weight, mlp.up_proj.weight], dtype)
        self._down = whole(mlp.down_proj.weight).to(dtype)

    def prefill(self, residual: Residual, cache: Any, chunk: Chunk) -> Residual:
        """The residual stream of a chunk's T tokens."""

        def attend(projected: Tensor, gates: Tensor | None) -> Tensor:
            return self._attention.prefill(projected[None], None if gates is None else gates[None], cache, chunk)

        return self._run(residual, attend, MatrixProducts())

    def decode(self, residual: Residual, cache: Any, batch: DecodeBatch, rotary: Rotary) -> Residual:
        """The residual stream of B * T new tokens."""
        shape = (len(batch.rows), -1)

        def attend(projected: Tensor, gates: Tensor | None) -> Tensor:
            gates = None if gates is None else gates.unflatten(0, shape)
            return self._attention.decode(projected.unflatten(0, shape), gates, cache, batch, rotary)

        return self._run(residual, attend, self._products)

    def _run(
        self, residual: Residual, attend: Callable[[Tensor, Tensor | None], Tensor], products: RowProducts
    ) -> Residual:
        attention = self._attention
        o = attend(
            *products.normed_linear(residual, self._norm, attention.weight, attention.bias, attention.num_sigmoids)
        )
        residual = products.residual_linear(o.flatten(0, 1).flatten(1), self._out, residual)
        hidden = products.normed_swiglu(residual, self._mlp_norm, self._gate_up)
        return products.residual_linear(hidden, self._down, residual)


class CachedSparseAttention:
    """`NSAttention` with caches; arguments as of `CachedLayer`."""

    def __init__(self, attention: NSAttention, geometry: Geometry, dtype: torch.dtype, products: RowProducts) -> None:
        self._geometry, self._backend, self._shared = geometry, attention.backend, attention.shared_kv
        self._num_heads, self._num_kv_heads = attention.num_heads, attention.num_kv_heads
        self._products = products
        branches = 1 if self._shared else NUM_BRANCHES
        keys, values = self._num_kv_heads * attention.head_dim, self._num_kv_heads * attention.value_dim
        self._sizes = [self._num_heads * attention.head_dim, *[keys] * branches, *[values] * branches]
        weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        gate = attention.gate
        self._gate_weight, self._gate_bias = (whole(x).to(dtype) for x in (gate.proj.weight, gate.proj.bias))
        self.bias, self.num_sigmoids = None, 0
        if isinstance(gate, SigmoidGate):
            weights.append(gate.proj.weight)
            self.bias = torch.cat((self._gate_bias.new_zeros(sum(self._sizes)), self._gate_bias))
            self.num_sigmoids = self._num_heads * NUM_BRANCHES
        self.weight = joined(weights, dtype)
        self._phi = (_prepared(attention.k_compressor, dtype), _prepared(attention.v_compressor, dtype))
        self._phi_of_blocks: tuple[Compress, Compress] | None = None
        if not isinstance(attention.k_compressor, MeanCompressor):
            self._phi_of_blocks = (_of_blocks(self._phi[0], products), _of_blocks(self._phi[1], products))

    def prefill(self, projected: Tensor, gates: Tensor | None, cache: SparseCache, chunk: Chunk) -> Tensor:
        """As `CachedAttention.prefill`."""
        q, keys, values = self._split(projected)
        gates = self._gates(q, gates, MatrixProducts())
        raw, selected = (keys[0], values[0]), (keys[-2], values[-2])
        window = None if self._shared else (keys[2], values[2])
        seen = extend_sparse(cache, chunk, raw, selected, window, self._geometry, self._phi)
        return nsa_attention(chunk.rotate(q), *seen, gates, self._geometry, backend=self._backend)

    def decode(
        self, projected: Tensor, gates: Tensor | None, cache: SparseCache, batch: DecodeBatch, rotary: Rotary
    ) -> Tensor:
        """As `CachedAttention.decode`."""
        q, keys, values = self._split(projected)
        gates = self._gates(q, gates, self._products)
        k_win, v_win = (None, None) if self._shared else (keys[2], values[2])
        append_sparse(
            cache, batch, keys[0], values[0], keys[1], values[1], k_win, v_win, self._geometry, rotary,
            self._phi_of_blocks, self._backend,
        )  # fmt: skip
        return decode_attention(q, gates, cache, batch, self._geometry, rotary, window=True, backend=self._backend)

    def _split(self, projected: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """q [B, T, H, D], and the keys and values of cmp, slc, win, each [B, T, G, *]."""
        q, *parts = projected.split(self._sizes, dim=-1)
        heads = [part.unflatten(-1, (self._num_kv_heads, -1)) for part in parts]
        branches = len(heads) // 2
        times = NUM_BRANCHES // branches
        return q.unflatten(-1, (self._num_heads, -1)), heads[:branches] * times, heads[branches:] * times

    def _gates(self, q: Tensor, gates: Tensor | None, products: RowProducts) -> Tensor:
        """[B, T, H, 3]: those of the projection, or as `GroupSoftmaxGate` with a mean that adds heads in order."""
        if gates is not None:
            return gates.unflatten(-1, (self._num_heads, NUM_BRANCHES))
        heads = q.unflatten(2, (self._num_kv_heads, -1))
        q_per_kv = heads.shape[3]
        pooled = functools.reduce(operator.add, in_full(heads).unbind(3)) / q_per_kv
        logits = in_full(products.linear(pooled.to(q.dtype), self._gate_weight, self._gate_bias))
        softmax = products.by_row(lambda rows: rows.softmax(-1), logits.flatten(0, 2))
        return softmax.view(logits.shape).repeat_interleave(q_per_kv, dim=2)


class CachedDenseAttention:
    """`DenseAttention` with caches; arguments as of `CachedLayer`."""

    def __init__(
        self, attention: DenseAttention, geometry: Geometry, dtype: torch.dtype, products: RowProducts
    ) -> None:
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.weight = joined([linear.weight for linear in linears], dtype)
        self.bias, self.num_sigmoids = None, 0
        self._sizes = [linear.out_features for linear in linears]
        self._heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)

    def prefill(self, projected: Tensor, gates: Tensor | None, cache: DenseCache, chunk: Chunk) -> Tensor:
        """As `CachedAttention.prefill`."""
        q, k, v = self._split(projected)
        return causal_attention(chunk.rotate(q), *extend_dense(cache, chunk, k, v))

    def decode(
        self, projected: Tensor, gates: Tensor | None, cache: DenseCache, batch: DecodeBatch, rotary: Rotary
    ) -> Tensor:
        """As `CachedAttention.decode`."""
        q, k, v = self._split(projected)
        append_dense(cache, batch, k, v, rotary)
        return decode_dense_attention(q, cache, batch, rotary)

    def _split(self, projected: Tensor) -> list[Tensor]:
        parts = projected.split(self._sizes, dim=-1)
        return [part.unflatten(-1, (heads, -1)) for part, heads in zip(parts, self._heads, strict=True)]


_KINDS: dict[type, Any] = {NSAttention: CachedSparseAttention, DenseAttention: CachedDenseAttention}


class _Product(nn.Module):
    """A linear map by decoding's products, in the place of `nn.Linear`."""

    def __init__(self, weight: Tensor, products: RowProducts) -> None:
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


def _of_blocks(phi: nn.Module, products: RowProducts) -> Compress:
    """φ of the tokens of blocks, [N, l, G, *] -> [N, G, *], where a block's result does not depend on the others."""
    other = copy.copy(phi)
    other._modules = {
        name: _Product(child.weight, products) if isinstance(child, nn.Linear) else child
        for name, child in phi.named_children()
    }
    return lambda blocks: products.by_row(lambda rows: other(rows)[:, 0], blocks)


def whole(parameter: Tensor) -> Tensor:
    """A parameter's values; of a sharded one in every process, which must all call this."""
    found = parameter.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def joined(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights that read the same input, one above the other, in the type of the products."""
    return torch.cat([whole(weight).to(dtype) for weight in weights])


def in_full(x: Tensor) -> Tensor:
    """In fp32, or fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
