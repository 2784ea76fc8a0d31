"""Parts that all attention layers share: checked sizes, projections, norms of queries and keys, rotary tables.

Shape letters as in DESIGN.md: B batch, T tokens, E model dim, H query heads, G KV heads, D and V dims, C compressed
blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trifocal.nn.context import TokenShard
from trifocal.nn.norm import AllHeadsRMSNorm, RMSNorm, is_autocast
from trifocal.nn.projection import is_plain, project
from trifocal.nn.rope import UNSCALED, RopeScaling, rotary_tables
from trifocal.ops import Documents, Geometry
from trifocal.ops.choice_loss import Sample
from trifocal.ops.layout import num_compressed_slots, place_compressed_blocks
from trifocal.ops.validation import check_geometry, check_number, check_rank, check_type, check_whole_number

INDEX_DIM = 64
"""Di, width of an index query or key."""
INPUT_MAPS = (".q_proj", ".k_proj", ".v_proj", ".gate.proj", ".index.query_proj", ".index.key_proj")
"""Ends of the names of an attention's maps that are one product in training; see `trifocal.nn.projection`."""


class RotaryTables(NamedTuple):
    """Pairs of cosines and sines, the same in every layer alike: those of a whole forward pass, or of all positions.

    Attributes:
        tokens: Rotations of the tokens of this process, [T, D/2].
        index_tokens: Rotations of the tokens for an index, [T, Di/2]; None from a layer without one.
        blocks: Rotations of all compressed blocks, [C, D/2]; None from a layer without them.
    """

    tokens: tuple[Tensor, Tensor]
    index_tokens: tuple[Tensor, Tensor] | None = None
    blocks: tuple[Tensor, Tensor] | None = None


ChoiceSample = tuple[Sample, ...]
"""What teaches a layer's choice of blocks in a training step: queries of each chunk of its tokens; one chunk where all
tokens are here. See `trifocal.ops.choice_loss`."""


@dataclass(frozen=True)
class Projected:
    """New tokens of a layer behind its input projection, [B, T, heads, *]; nothing is rotated.

    Attributes:
        q: Queries, [B, T, H, D].
        keys, values: Those of each branch, [B, T, G, *]: one for all, or cmp, slc and win.
        gates: [B, T, H, 3]; None in a layer without gates.
        index: Queries [B, T, G, Di] and keys [B, T, Di] of the index; None without one.
    """

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    gates: Tensor | None = None
    index: tuple[Tensor, Tensor] | None = None

    @property
    def selected(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the selected branch."""
        middle = len(self.keys) // 2
        return self.keys[middle], self.values[middle]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Projected":
        """The same with a function of each tensor, by which tokens are arranged in another way."""
        return Projected(
            function(self.q),
            [function(k) for k in self.keys],
            [function(v) for v in self.values],
            None if self.gates is None else function(self.gates),
            None if self.index is None else (function(self.index[0]), function(self.index[1])),
        )


class KVCache(Protocol):
    """Keys and values of the earlier tokens of a batch."""

    def attend(self, attention: "AttentionBase", new: Projected) -> Tensor:
        """Append new tokens and attend, [1, N, ...] -> [1, N, H, V]."""


class AttentionBase(nn.Module):
    """Projections of an attention layer, and its rotary positions.

    Args:
        dim: E, width of input and output.
        num_heads: H, query heads.
        num_kv_heads: G, KV heads; H/G query heads share one. Divides H.
        head_dim: D of queries and keys; even.
        value_dim: V of values.
        geometry: Block sizes, in tokens; None in a layer without compressed blocks.
        branches: Keys and values lie side by side in the outputs of k_proj and v_proj, for this many branches.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: Change of the rotary frequencies for sequences longer than those of pretraining.
        qk_norm: Whether each head's query and key, of every branch, pass an RMSNorm before they are rotated.
        qk_norm_all_heads: Whether one such norm is over all heads of a branch instead of each head.
        norm_eps: Epsilon of these norms.
        qkv_bias: Whether q_proj, k_proj and v_proj have biases.
        o_bias: Whether o_proj has one.

    Raises:
        ValueError: If the sizes do not fit one another.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        geometry: Geometry | None = None,
        branches: int = 1,
        rope_theta: float = 10000.0,
        rope_scaling: RopeScaling = UNSCALED,
        qk_norm: bool = False,
        qk_norm_all_heads: bool = False,
        norm_eps: float = 1e-6,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in {**sizes, "head_dim": head_dim, "value_dim": value_dim}.items():
            check_whole_number(name, size, 1)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
        check_number("rope_theta", rope_theta)
        if not rope_theta > 0:
            raise ValueError(f"rope_theta must be above 0, got {rope_theta}")
        check_type("rope_scaling", rope_scaling, RopeScaling)
        if qk_norm_all_heads and not qk_norm:
            raise ValueError("qk_norm_all_heads needs qk_norm=True, got False")
        if geometry is not None:
            check_geometry(geometry)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.geometry, self.branches = geometry, branches
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(dim, branches * num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, branches * num_kv_heads * value_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * value_dim, dim, bias=o_bias)
        self.index: nn.Module | None = None
        self.q_norm, self.k_norm = (
            (AllHeadsRMSNorm(heads * head_dim, norm_eps) if qk_norm_all_heads else RMSNorm(head_dim, norm_eps))
            if qk_norm
            else None
            for heads in (num_heads, num_kv_heads)
        )

    def rotary_tables(
        self, x: Tensor, cu_seqlens: Tensor | Documents | None = None, local_tokens: TokenShard | None = None
    ) -> RotaryTables:
        """Tables to be shared by layers alike; x [B, T, E] gives length, device and type."""
        documents, positions = documents_and_positions(x, cu_seqlens, local_tokens)
        num_tokens = x.shape[1] if local_tokens is None else local_tokens.num_tokens
        exact, geometry = torch.promote_types(x.dtype, torch.float32), self.geometry

        def tables(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
            return rotary_tables(positions, width, self.rope_theta, exact, self.rope_scaling)

        tokens = tables(positions, self.head_dim)
        index = None if self.index is None else tables(positions, INDEX_DIM)
        if geometry is None:
            return RotaryTables(tokens, index)
        num_slots = num_compressed_slots(num_tokens, geometry, documents)
        if documents is None:
            starts = torch.arange(num_slots, device=x.device) * geometry.compression_stride
        else:
            _, (last_tokens, _) = place_compressed_blocks(documents, num_slots, geometry)
            # A slot that no document fills stands at the first token of all.
            firsts = (last_tokens - (geometry.compression_block_size - 1)).where(last_tokens < num_tokens, 0)
            starts = documents.positions[firsts]
        return RotaryTables(tokens, index, tables(starts, self.head_dim))

    def _exact_tables(
        self, given: RotaryTables | None, x: Tensor, documents: Documents | None, local_tokens: TokenShard | None
    ) -> RotaryTables:
        """The given tables, or new ones where there are none or others are rounded, as FSDP rounds a layer's inputs."""
        if given is not None:
            check_type("rotary", given, RotaryTables)
        if given is None or given.tokens[0].dtype.itemsize < torch.promote_types(x.dtype, torch.float32).itemsize:
            return self.rotary_tables(x, documents, local_tokens)
        return given

    def _on_padded_rows(
        self,
        forward: Callable[..., Any],
        x: Tensor,
        key_padding_mask: Tensor,
        cu_seqlens: Tensor | Documents | None,
        **given: Any,
    ) -> Tensor:
        """The output for x [B, T, E] padded on the right, zero at padding, by the forward pass of a class: `self(x)`
        would run hooks twice. No token sees one behind it: it is enough that padding is finite and gets no gradient.
        """
        check_padding(x, key_padding_mask, cu_seqlens)
        padding = key_padding_mask[..., None]
        return self._on_rows(forward, x.masked_fill(padding, 0), key_padding_mask, **given).masked_fill(padding, 0)

    def _on_rows(self, forward: Callable[..., Any], x: Tensor, key_padding_mask: Tensor, **given: Any) -> Tensor:
        o: Tensor = forward(self, x, **given)
        return o

    def _project(
        self, x: Tensor, *others: nn.Linear, apart: Sequence[nn.Linear] = ()
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Queries [B, T, H, D], and keys [B, T, G, D] and values [B, T, G, V] of each branch, normed and not rotated;
        and the outputs of other maps of the same input and of maps `apart`, as `project` gives them.
        """
        linears = [self.q_proj, self.k_proj, self.v_proj, *others]
        q, *parts = project(x, linears, [1, self.branches, self.branches, *[1] * len(others)], apart)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        heads = [part.unflatten(-1, (self.num_kv_heads, -1)) for part in parts[: 2 * self.branches]]
        keys, values = heads[: self.branches], heads[self.branches :]
        if self.q_norm is not None and self.k_norm is not None:
            q, keys = self.q_norm(q), [self.k_norm(k) for k in keys]
        return q, keys, values, parts[2 * self.branches :]


def documents_and_positions(
    x: Tensor, cu_seqlens: Tensor | Documents | None, local_tokens: TokenShard | None = None
) -> tuple[Documents | None, Tensor]:
    """Documents, checked, and the position of each of the T tokens in its document, [T]; those of `local_tokens`."""
    if local_tokens is not None:
        return local_tokens.documents, local_tokens.positions
    num_tokens = x.shape[1]
    if cu_seqlens is None:
        return None, torch.arange(num_tokens, device=x.device)
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, got x of shape {list(x.shape)}")
    documents = Documents.of(cu_seqlens, num_tokens, x.device)
    return documents, documents.positions


def check_input(x: Tensor, first_map: nn.Linear) -> None:
    """Refuse a layer's input that is not [B, T, E], or not of its weights' type where autocast casts neither."""
    check_rank("x", x, "[B, T, E]")
    dim = first_map.in_features
    if x.shape[2] != dim:
        raise ValueError(f"x must have the shape [B, T, E] with E = {dim}, got {list(x.shape)}")
    # A map that is more than a product with its weight, such as a quantized one, knows its types itself.
    if not is_autocast(x) and is_plain(first_map) and x.dtype != first_map.weight.dtype:
        raise ValueError(
            f"x must have the type of the layer's weights, {first_map.weight.dtype}, got {x.dtype}: cast one of them, "
            "or use torch.autocast"
        )


def check_padding(x: Tensor, key_padding_mask: Tensor, cu_seqlens: Tensor | Documents | None) -> None:
    """Refuse a padding mask of x [B, T, E] with padding in front of a row's tokens, which reads it on the host."""
    if cu_seqlens is not None:
        raise ValueError("key_padding_mask does not go with cu_seqlens: packed documents need no padding")
    check_rank("key_padding_mask", key_padding_mask, "[B, T]")
    if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != x.shape[:2]:
        raise ValueError(
            f"key_padding_mask must be bool, {list(x.shape[:2])}, True at padding, got {key_padding_mask.dtype}, "
            f"{list(key_padding_mask.shape)}; an attention_mask of transformers is its opposite: give mask == 0"
        )
    wrong = key_padding_mask[:, :-1] & ~key_padding_mask[:, 1:]
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(f"key_padding_mask has padding before a token of row {row}: pad after the tokens (right)")
