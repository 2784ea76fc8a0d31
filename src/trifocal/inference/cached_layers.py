"""A decoder's layers as decoding runs them, with weights prepared once.

Weights are copied in the type of the products; those that read the same input are joined. The residual stream, norms
and gates stay in fp32 (fp64 for a model in fp64).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from trifocal.errors import UserError
from trifocal.inference.cached_attention import AttentionRule
from trifocal.inference.prefill import Chunk
from trifocal.models.decoder import DecoderLM
from trifocal.nn import Block, NSAttention, RMSNorm
from trifocal.nn.attention_base import AttentionBase, Projected, RotaryTables
from trifocal.nn.chooser import IndexHeads
from trifocal.nn.gate import NUM_BRANCHES
from trifocal.nn.norm import AllHeadsRMSNorm
from trifocal.nn.projection import ALIGNMENT, whole
from trifocal.ops import DecodeBatch, Geometry
from trifocal.ops.decode import linear as products
from trifocal.ops.decode.linear import Norm, Residual

_READ: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, RMSNorm, AllHeadsRMSNorm)


class CachedLayer:
    """One block with prepared weights; later changes of the block's are not seen.

    `geometry` is for the longest sequence, see `decode_geometry`; `dtype` is that of the products and of keys and
    values. `norm` is the norm in front of the block, None where norms stand behind; `next_norm` is the one that reads
    the block's result, to be set where there is one.
    """

    next_norm: Norm | None = None

    def __init__(self, block: nn.Module, geometry: Geometry, dtype: torch.dtype, tables: RotaryTables) -> None:
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, AttentionBase)
        self._rule = AttentionRule(attention, geometry, tables, lambda phi: _prepared(phi, dtype))
        self._num_heads, self._num_kv_heads = attention.num_heads, attention.num_kv_heads
        self._branches = attention.branches
        norms = [_prepared_norm(norm) for norm in (block.attention_norm, block.mlp_norm)]
        self.norm, self._mlp_norm = (None if block.norm_after else norm for norm in norms)
        self._out_norm, self._down_norm = (norm if block.norm_after else None for norm in norms)
        self._q_norm, self._k_norm = (
            None if norm is None else _prepared_norm(norm) for norm in (attention.q_norm, attention.k_norm)
        )
        linears = [attention.q_proj, attention.k_proj, attention.v_proj]
        if isinstance(attention.index, IndexHeads):
            linears += [attention.index.query_proj, attention.index.key_proj]
        self._has_index = attention.index is not None
        keys, values = (attention.num_kv_heads * width for width in (attention.head_dim, attention.value_dim))
        self._sizes = [attention.q_proj.out_features, *[keys] * self._branches, *[values] * self._branches]
        self._sizes += [linear.out_features for linear in linears[3:]]
        # Last, as only last columns go through a sigmoid.
        self._num_gates = 0
        if isinstance(attention, NSAttention):
            linears.append(attention.gate.proj)
            self._num_gates = attention.gate.proj.out_features
        # Zeros behind, up to whole memory lines of outputs, as in training: a GPU's copy engine reads values from no
        # others. Decoding takes the front part.
        self._num_inner = sum(linear.out_features for linear in linears)
        self._in, self._in_bias = _prepared_linear(linears, dtype, -self._num_inner % ALIGNMENT)
        self._out, self._out_bias = _prepared_linear([attention.o_proj], dtype)
        self._gate_up, self._gate_up_bias = _prepared_linear([mlp.gate_proj, mlp.up_proj], dtype)
        self._down, self._down_bias = _prepared_linear([mlp.down_proj], dtype)

    def prefill(self, x: Tensor, cache: Any, chunk: Chunk) -> Tensor:
        """The residual stream of a chunk's T tokens, [T, E], by PyTorch's products, the fastest for many rows."""
        dtype, first_gate = self._in.dtype, self._num_inner - self._num_gates
        projected = functional.linear(normed(x, self.norm).to(dtype), self._in, self._in_bias)
        gates = projected[:, first_gate : self._num_inner].to(x.dtype).sigmoid() if self._num_gates else None
        o = self._rule.prefill(self._split(projected[None, :, :first_gate], gates, normed), cache, chunk)
        x = x + normed(functional.linear(o.flatten(0, 1).flatten(1), self._out, self._out_bias), self._out_norm)
        hidden = _swiglu(normed(x, self._mlp_norm).to(dtype), self._gate_up, self._gate_up_bias)
        return x + normed(functional.linear(hidden, self._down, self._down_bias), self._down_norm)

    def decode(self, residual: Residual, cache: Any, batch: DecodeBatch) -> Residual:
        """The residual stream of B * T new tokens, by products whose sums do not depend on the number of rows."""
        bias = None if self._in_bias is None else self._in_bias[: self._num_inner]
        projected, gates = products.normed_linear(
            residual, self.norm, self._in[: self._num_inner], bias, num_sigmoids=self._num_gates
        )
        new = self._split(projected.unflatten(0, (len(batch.rows), -1)), gates, normed_by_row)
        o = self._rule.decode(new, cache, batch).flatten(0, 1).flatten(1)
        residual = _added(o, self._out, residual, self._out_bias, self._out_norm, self._mlp_norm)
        if self._gate_up_bias is None and self._mlp_norm is not None:
            hidden = products.normed_swiglu(residual, self._mlp_norm, self._gate_up)
        else:
            both, _ = products.normed_linear(residual, self._mlp_norm, self._gate_up, self._gate_up_bias)
            gate, up = both.chunk(2, dim=-1)
            hidden = products.by_row(functional.silu, gate) * up
        return _added(hidden, self._down, residual, self._down_bias, self._down_norm, self.next_norm)

    def _split(
        self, projected: Tensor, gates: Tensor | None, norm: Callable[[Tensor, Norm | None], Tensor]
    ) -> Projected:
        """The parts of the joined projection, [B, T, *], and its gates, [B * T, 3 * H]; `norm` norms heads."""
        q, *parts = projected.split(self._sizes, dim=-1)
        heads = [part.unflatten(-1, (self._num_kv_heads, -1)) for part in parts[: 2 * self._branches]]
        q = norm(q.unflatten(-1, (self._num_heads, -1)), self._q_norm)
        keys = [norm(k, self._k_norm) for k in heads[: self._branches]]
        index = None
        if self._has_index:
            q_idx, k_idx = parts[2 * self._branches :]
            index = q_idx.unflatten(-1, (self._num_kv_heads, -1)), k_idx
        if gates is not None:
            gates = gates.view(*projected.shape[:2], self._num_heads, NUM_BRANCHES)
        return Projected(q, keys, heads[self._branches :], gates, index)


def _swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`silu(x W_gate^T) * x W_up^T` of joined weights. Two products, not halves of one: with gaps between its rows the
    activation takes more than twice as long.
    """
    biases = (None, None) if bias is None else bias.chunk(2)
    gate, up = (functional.linear(x, *half) for half in zip(weight.chunk(2), biases, strict=True))
    return functional.silu(gate, inplace=True).mul_(up)


def _added(
    x: Tensor, weight: Tensor, residual: Residual, bias: Tensor | None, norm: Norm | None, next_norm: Norm | None
) -> Residual:
    """The residual stream plus `norm(x W^T + bias)`; without sums of squares where there is a norm."""
    if norm is None:
        return products.residual_linear(x, weight, residual, bias, next_norm=next_norm)
    out = residual.x + normed_by_row(products.linear(x, weight, bias), norm)
    return Residual(out, out[:, :0])


def _prepared_linear(linears: list[nn.Linear], dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor | None]:
    """Weights and biases, None where no map has one, of maps with the same input, then `padding` outputs of zeros."""
    joined = torch.cat([whole(linear.weight) for linear in linears])
    weight = copied(functional.pad(joined, (0, 0, 0, padding)), dtype)
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [joined.new_zeros(x.out_features) if x.bias is None else whole(x.bias) for x in linears]
    return weight, functional.pad(torch.cat(biases), (0, padding)).to(dtype)


def check_plain(model: DecoderLM) -> None:
    """Raise UserError unless the weights of the layers say all that they compute."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        # Quantized maps have a method of this name, and parametrizations a module.
        if weight is None or isinstance(weight, nn.Module):
            continue
        forwards = [kind.forward for kind in _READ if isinstance(module, kind)]
        own = "weight" in module._parameters or is_parametrized(module, "weight")
        if not own or "forward" in module.__dict__ or type(module).forward not in forwards:
            raise UserError(
                f"decoding reads only weights, but {name} computes more than a layer with its weight: merge adapters "
                "into the weights, and remove hooks that make these"
            )


def _prepared_norm(norm: RMSNorm) -> Norm:
    return Norm(copied(norm.weight, torch.promote_types(norm.weight.dtype, torch.float32)), norm.eps)


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    """Tokens, heads or all heads of a token through their norm, in the type of x: [..., D] -> [..., D]."""
    if norm is None:
        return x
    weight, eps = norm
    rows = x.reshape(-1, len(weight)).to(weight.dtype)
    return functional.rms_norm(rows, weight.shape, weight, eps).to(x.dtype).view(x.shape)


def normed_by_row(x: Tensor, norm: Norm | None) -> Tensor:
    """`normed`, whose bits do not depend on the other rows."""
    if norm is None:
        return x
    return products.by_row(lambda row: normed(row, norm), x.reshape(-1, len(norm.weight))).view(x.shape)


def _prepared(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module, a learned φ, with copies of its weights in another type."""
    other = copy.copy(module)
    other._parameters = {
        name: None if parameter is None else nn.Parameter(copied(parameter, dtype), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    other._modules = {name: _prepared(child, dtype) for name, child in module.named_children()}
    return other


def copied(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """As `whole`, in a type, in its own memory: later changes of the parameter are not seen."""
    return whole(parameter).to(dtype, copy=True)
