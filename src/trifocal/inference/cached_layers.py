"""A decoder's layers as decoding runs them: weights prepared once, and per kind of attention how it uses the caches.

Weights are copied in the type of the products; those that read the same input are joined. The residual stream, norms
and gates stay in fp32 (fp64 for a model in fp64). A new kind of attention has its place in `_KINDS`.
"""

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trifocal.inference.prefill import Chunk, Compress, causal_attention, extend_dense, extend_sparse
from trifocal.inference.products import Products, PyTorchLinear
from trifocal.nn import (
    Block,
    DenseAttention,
    MeanCompressor,
    NSAttention,
    RMSNorm,
    SelectedAttention,
    WindowAttention,
)
from trifocal.nn.attention_base import AttentionBase
from trifocal.nn.chooser import choose_blocks
from trifocal.nn.gate import NUM_BRANCHES
from trifocal.nn.projection import ALIGNMENT
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
    selected_attention,
    window_attention,
)
from trifocal.ops.decode.linear import Norm, Residual

Rotary = tuple[Tensor, Tensor]


class CachedAttention(Protocol):
    """Attention between its joined input projection and its output projection.

    Attributes:
        weight, bias: The joined projection's, [outputs, E] and [outputs], or None.
        padded_weight, padded_bias: The same with zeros behind it, up to whole memory lines of outputs, as in training:
            a GPU's copy engine reads values from no others.
        num_sigmoids: How many of its last outputs are gates before their sigmoid.
    """

    weight: Tensor
    bias: Tensor | None
    padded_weight: Tensor
    padded_bias: Tensor | None
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
        """Append and attend the new tokens of a batch, [B, T, *] -> [B, T, H, V]; arguments of `prefill`."""


class CachedLayer:
    """One block with prepared weights.

    Args:
        block: The decoder's block; later changes of its weights are not seen.
        geometry: Block sizes, in tokens, for the longest sequence; see `decode_geometry`.
        dtype: Type of the products and of keys and values.
        products: The products of decoding.
    """

    def __init__(self, block: nn.Module, geometry: Geometry, dtype: torch.dtype, products: Products) -> None:
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, AttentionBase)
        self._products = products
        self._attention: CachedAttention = _KINDS[type(attention)](attention, geometry, dtype, products)
        norms = [_prepared_norm(norm) for norm in (block.attention_norm, block.mlp_norm)]
        self._norm, self._mlp_norm = (None if block.norm_after else norm for norm in norms)
        self._out_norm, self._down_norm = (norm if block.norm_after else None for norm in norms)
        self._out, self._out_bias = _prepared_linear([attention.o_proj], dtype)
        self._gate_up, self._gate_up_bias = _prepared_linear([mlp.gate_proj, mlp.up_proj], dtype)
        self._down, self._down_bias = _prepared_linear([mlp.down_proj], dtype)

    def prefill(self, residual: Residual, cache: Any, chunk: Chunk) -> Residual:
        """The residual stream of a chunk's T tokens."""
        attention, products = self._attention, PyTorchLinear()
        projected, gates = products.normed_linear(
            residual, self._norm, attention.padded_weight, attention.padded_bias, attention.num_sigmoids,
            padding=len(attention.padded_weight) - len(attention.weight),
        )  # fmt: skip
        o = attention.prefill(projected[None], None if gates is None else gates[None], cache, chunk)
        return self._end(residual, o, products)

    def decode(self, residual: Residual, cache: Any, batch: DecodeBatch, rotary: Rotary) -> Residual:
        """The residual stream of B * T new tokens."""
        attention, products, shape = self._attention, self._products, (len(batch.rows), -1)
        projected, gates = products.normed_linear(
            residual, self._norm, attention.weight, attention.bias, attention.num_sigmoids
        )
        gates = None if gates is None else gates.unflatten(0, shape)
        o = attention.decode(projected.unflatten(0, shape), gates, cache, batch, rotary)
        return self._end(residual, o, products)

    def _end(self, residual: Residual, o: Tensor, products: Products) -> Residual:
        """The residual stream after the block, from that before it and the attention's heads [B, T, H, V]."""
        o = o.flatten(0, 1).flatten(1)
        residual = _added(o, self._out, residual, self._out_bias, self._out_norm, products)
        if self._gate_up_bias is None and self._mlp_norm is not None:
            hidden = products.normed_swiglu(residual, self._mlp_norm, self._gate_up)
        else:
            both, _ = products.normed_linear(residual, self._mlp_norm, self._gate_up, self._gate_up_bias)
            gate, up = both.chunk(2, dim=-1)
            hidden = products.by_row(functional.silu, gate) * up
        return _added(hidden, self._down, residual, self._down_bias, self._down_norm, products)


def _added(
    x: Tensor, weight: Tensor, residual: Residual, bias: Tensor | None, norm: Norm | None, products: Products
) -> Residual:
    """The residual stream plus `norm(x W^T + bias)`; without sums of squares where there is a norm."""
    if norm is None:
        return products.residual_linear(x, weight, residual, bias)
    out = residual.x + normed(products.linear(x, weight, bias), norm, products)
    return Residual(out, out[:, :0])


class _CachedAttention:
    """The joined projection of a layer, and its queries, keys and values; arguments as of `CachedLayer`.

    Args:
        gate: A projection of the same input whose outputs are gates.
    """

    def __init__(
        self, attention: AttentionBase, dtype: torch.dtype, products: Products, gate: nn.Linear | None = None
    ) -> None:
        self._num_heads, self._num_kv_heads = attention.num_heads, attention.num_kv_heads
        self._products, self._branches = products, attention.branches
        keys, values = self._num_kv_heads * attention.head_dim, self._num_kv_heads * attention.value_dim
        self._sizes = [attention.q_proj.out_features, *[keys] * self._branches, *[values] * self._branches]
        linears = [attention.q_proj, attention.k_proj, attention.v_proj]
        weight, bias = _prepared_linear([*linears, *([gate] if gate else [])], dtype)
        outputs = len(weight)
        padding = -outputs % ALIGNMENT
        self.padded_weight = functional.pad(weight, (0, 0, 0, padding))
        self.padded_bias = None if bias is None else functional.pad(bias, (0, padding))
        self.weight = self.padded_weight[:outputs]
        self.bias = None if self.padded_bias is None else self.padded_bias[:outputs]
        self.num_sigmoids = gate.out_features if gate else 0
        self._q_norm, self._k_norm = (
            None if norm is None else _prepared_norm(norm) for norm in (attention.q_norm, attention.k_norm)
        )

    def _split(self, projected: Tensor, products: Products) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """q [B, T, H, D], and the keys and values of each branch, [B, T, G, *]."""
        q, *parts = projected.split(self._sizes, dim=-1)
        heads = [part.unflatten(-1, (self._num_kv_heads, -1)) for part in parts]
        keys, values = heads[: self._branches], heads[self._branches :]
        q = normed(q.unflatten(-1, (self._num_heads, -1)), self._q_norm, products)
        return q, [normed(k, self._k_norm, products) for k in keys], values


class CachedSparseAttention(_CachedAttention):
    """`NSAttention` with caches; arguments as of `CachedLayer`."""

    def __init__(self, attention: NSAttention, geometry: Geometry, dtype: torch.dtype, products: Products) -> None:
        super().__init__(attention, dtype, products, attention.gate.proj)
        self._geometry, self._backend, self._shared = geometry, attention.backend, attention.shared_kv
        self._phi = (_prepared(attention.k_compressor, dtype), _prepared(attention.v_compressor, dtype))
        self._phi_of_blocks: tuple[Compress, Compress] | None = None
        if not isinstance(attention.k_compressor, MeanCompressor):
            self._phi_of_blocks = (_of_blocks(self._phi[0], products), _of_blocks(self._phi[1], products))

    def prefill(self, projected: Tensor, gates: Tensor | None, cache: SparseCache, chunk: Chunk) -> Tensor:
        """See `CachedAttention.prefill`."""
        q, keys, values = self._of_branches(projected, PyTorchLinear())
        gates = self._gates(gates)
        raw, selected = (keys[0], values[0]), (keys[-2], values[-2])
        window = None if self._shared else (keys[2], values[2])
        seen = extend_sparse(cache, chunk, raw, selected, window, self._geometry, self._phi)
        assert seen.v_cmp is not None
        return nsa_attention(chunk.rotate(q), *seen, gates, self._geometry, backend=self._backend)  # type: ignore[arg-type]

    def decode(
        self, projected: Tensor, gates: Tensor | None, cache: SparseCache, batch: DecodeBatch, rotary: Rotary
    ) -> Tensor:
        """See `CachedAttention.decode`."""
        q, keys, values = self._of_branches(projected, self._products)
        gates = self._gates(gates)
        k_win, v_win = (None, None) if self._shared else (keys[2], values[2])
        append_sparse(
            cache, batch, keys[0], values[0], keys[1], values[1], k_win, v_win, self._geometry, rotary,
            self._phi_of_blocks, self._backend,
        )  # fmt: skip
        return decode_attention(q, gates, cache, batch, self._geometry, rotary, window=True, backend=self._backend)

    def _of_branches(self, projected: Tensor, products: Products) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """q, and the keys and values of cmp, slc, win."""
        q, keys, values = self._split(projected, products)
        times = NUM_BRANCHES // self._branches
        return q, keys * times, values * times

    def _gates(self, gates: Tensor | None) -> Tensor:
        """[B, T, H, 3], from those of the projection, [B, T, 3 * H]."""
        assert gates is not None
        return gates.unflatten(-1, (self._num_heads, NUM_BRANCHES))


class CachedSelectedAttention(_CachedAttention):
    """`SelectedAttention` with caches; arguments as of `CachedLayer`."""

    def __init__(
        self, attention: SelectedAttention, geometry: Geometry, dtype: torch.dtype, products: Products
    ) -> None:
        super().__init__(attention, dtype, products)
        self._geometry, self._backend, self._phi = geometry, attention.backend, attention.k_compressor

    def prefill(self, projected: Tensor, gates: Tensor | None, cache: SparseCache, chunk: Chunk) -> Tensor:
        """See `CachedAttention.prefill`."""
        q, [k], [v] = self._split(projected, PyTorchLinear())
        geometry, backend = self._geometry, self._backend
        k_cmp, _, k_slc, v_slc, *_ = extend_sparse(cache, chunk, (k, None), (k, v), None, geometry, (self._phi,) * 2)
        q = chunk.rotate(q)
        chosen = choose_blocks(q, k_cmp, chunk.stop, geometry, None, backend)
        return selected_attention(q, k_slc, v_slc, chosen, geometry, backend=backend)

    def decode(
        self, projected: Tensor, gates: Tensor | None, cache: SparseCache, batch: DecodeBatch, rotary: Rotary
    ) -> Tensor:
        """See `CachedAttention.decode`."""
        q, [k], [v] = self._split(projected, self._products)
        geometry, backend = self._geometry, self._backend
        append_sparse(cache, batch, k, None, k, v, None, None, geometry, rotary, backend=backend)
        return decode_attention(q, None, cache, batch, geometry, rotary, window=False, backend=backend)


class CachedDenseAttention(_CachedAttention):
    """`DenseAttention` with caches; arguments as of `CachedLayer`."""

    def __init__(self, attention: DenseAttention, geometry: Geometry, dtype: torch.dtype, products: Products) -> None:
        super().__init__(attention, dtype, products)

    def prefill(self, projected: Tensor, gates: Tensor | None, cache: DenseCache, chunk: Chunk) -> Tensor:
        """See `CachedAttention.prefill`."""
        q, [k], [v] = self._split(projected, PyTorchLinear())
        return causal_attention(chunk.rotate(q), *extend_dense(cache, chunk, k, v))

    def decode(
        self, projected: Tensor, gates: Tensor | None, cache: DenseCache, batch: DecodeBatch, rotary: Rotary
    ) -> Tensor:
        """See `CachedAttention.decode`."""
        q, [k], [v] = self._split(projected, self._products)
        append_dense(cache, batch, k, v, rotary)
        return decode_dense_attention(q, cache, batch, rotary)


class CachedWindowAttention(_CachedAttention):
    """`WindowAttention` with caches, which hold the whole past; arguments as of `CachedLayer`."""

    def __init__(self, attention: WindowAttention, geometry: Geometry, dtype: torch.dtype, products: Products) -> None:
        super().__init__(attention, dtype, products)
        self._window, self._backend = attention.window_size, attention.backend

    def prefill(self, projected: Tensor, gates: Tensor | None, cache: DenseCache, chunk: Chunk) -> Tensor:
        """See `CachedAttention.prefill`."""
        q, [k], [v] = self._split(projected, PyTorchLinear())
        k, v = extend_dense(cache, chunk, k, v)
        return window_attention(chunk.rotate(q), k, v, self._window, backend=self._backend)

    def decode(
        self, projected: Tensor, gates: Tensor | None, cache: DenseCache, batch: DecodeBatch, rotary: Rotary
    ) -> Tensor:
        """See `CachedAttention.decode`."""
        q, [k], [v] = self._split(projected, self._products)
        append_dense(cache, batch, k, v, rotary, self._backend)
        return decode_dense_attention(q, cache, batch, rotary, window_size=self._window, backend=self._backend)


_KINDS: dict[type, Any] = {
    NSAttention: CachedSparseAttention,
    SelectedAttention: CachedSelectedAttention,
    DenseAttention: CachedDenseAttention,
    WindowAttention: CachedWindowAttention,
}


class _Product(nn.Module):
    """A linear map by decoding's products, in the place of `nn.Linear`."""

    def __init__(self, weight: Tensor, products: Products) -> None:
        super().__init__()
        self._weight, self._products = weight, products

    def forward(self, x: Tensor) -> Tensor:
        return self._products.linear(x, self._weight)


def _prepared_linear(linears: list[nn.Linear], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of maps that read the same input, one above the other; no bias where none has one."""
    weight = joined([linear.weight for linear in linears], dtype)
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [weight.new_zeros(x.out_features) if x.bias is None else whole(x.bias).to(dtype) for x in linears]
    return weight, torch.cat(biases)


def _prepared_norm(norm: RMSNorm) -> Norm:
    return Norm(copied(norm.weight, torch.promote_types(norm.weight.dtype, torch.float32)), norm.eps)


def normed(x: Tensor, norm: Norm | None, products: Products) -> Tensor:
    """Tokens, heads or all heads of a token through their norm, in the type of x: [..., D] -> [..., D]."""
    if norm is None:
        return x
    weight, eps = norm

    def by_row(rows: Tensor) -> Tensor:
        return functional.rms_norm(rows.to(weight.dtype), weight.shape, weight, eps).to(rows.dtype)

    return products.by_row(by_row, x.reshape(-1, len(weight))).view(x.shape)


def _prepared(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module, a learned φ, with copies of its weights in another type."""
    other = copy.copy(module)
    other._parameters = {
        name: None if parameter is None else nn.Parameter(copied(parameter, dtype), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    other._modules = {name: _prepared(child, dtype) for name, child in module.named_children()}
    return other


def _of_blocks(phi: nn.Module, products: Products) -> Compress:
    """φ of the tokens of blocks, [N, l, G, *] -> [N, G, *], where a block's result does not depend on the others."""
    other = copy.copy(phi)
    other._modules = {
        name: _Product(child.weight, products) if isinstance(child, nn.Linear) else child
        for name, child in phi.named_children()
    }
    return lambda blocks: products.by_row(lambda rows: other(rows)[:, 0], blocks)


def whole(parameter: Tensor) -> Tensor:
    """A parameter's values, contiguous; of a sharded one in every process, which must all call this."""
    found = parameter.detach()
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).contiguous()


def copied(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """As `whole`, in a type, in memory of its own: later changes of the parameter are not seen."""
    return whole(parameter).to(dtype, copy=True)


def joined(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights that read the same input, one above the other, in the type of the products."""
    return torch.cat([whole(weight).to(dtype) for weight in weights])
