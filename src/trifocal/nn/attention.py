"""Attention layers: Native Sparse Attention and its dense baseline, with the same interface.

Inputs are [B, T, E]. Shape letters as in DESIGN.md: H query heads, G KV heads, D and V dims, C compressed blocks.
A group is the query heads that share one KV head.
"""

from typing import Any, Literal

from torch import Tensor, nn

from trifocal.nn.attention_base import (
    AttentionBase,
    ChoiceSample,
    KVCache,
    Projected,
    RotaryTables,
    check_input,
    documents_and_positions,
)
from trifocal.nn.chooser import Chooser, ChoosingAttention, rotate_blocks, split_heads
from trifocal.nn.compressor import MeanCompressor, MLPCompressor, compress_keys_and_values
from trifocal.nn.context import Chunk, TokenShard, chunks_of, joined
from trifocal.nn.gate import NUM_BRANCHES, SigmoidGate
from trifocal.nn.rope import UNSCALED, RopeScaling, rotate
from trifocal.ops import Documents, Geometry, nsa_attention, window_attention
from trifocal.ops.dispatch import Backend, check_backend
from trifocal.ops.geometry import LARGEST_SIZE
from trifocal.ops.support import flash_attention_obstacle
from trifocal.ops.validation import check_whole_number


class NSAttention(ChoosingAttention):
    """Native Sparse Attention as a layer: projections, rotary positions, compressor, gates, three branches.

    Each branch has its own keys and values. Queries are rotated once, keys by the position of their token, compressed
    keys by the position of their block's first token.

    Args:
        dim, num_heads, num_kv_heads, head_dim, value_dim: Sizes, as of `AttentionBase`. The query heads that share a
            KV head share its chosen blocks too.
        geometry: Block sizes, in tokens.
        compressor: φ: `"mean"`, or `"mlp"`, the paper's learnable one.
        shared_kv: One projection of keys and values for all branches instead of one each.
        chooser: What chooses the blocks: `"compressed"` keys, an `"index"`, or the `"exact"` mass.
        backend: `"auto"`, `"reference"` or `"triton"`; see `trifocal.ops.dispatch`.
        rope_theta, rope_scaling, qk_norm, qk_norm_all_heads, norm_eps, qkv_bias, o_bias: As of `AttentionBase`.

    Raises:
        ValueError: If the sizes do not fit one another.

    Source: arXiv:2502.11089, Section 3.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        geometry: Geometry,
        compressor: Literal["mean", "mlp"] = "mean",
        shared_kv: bool = False,
        chooser: Chooser = "compressed",
        backend: Backend = "auto",
        rope_theta: float = 10000.0,
        rope_scaling: RopeScaling = UNSCALED,
        qk_norm: bool = False,
        qk_norm_all_heads: bool = False,
        norm_eps: float = 1e-6,
        qkv_bias: bool = False,
        o_bias: bool = False,
    ) -> None:
        super().__init__(
            dim=dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            geometry=geometry,
            # In the order cmp, slc, win.
            branches=1 if shared_kv else NUM_BRANCHES,
            chooser=chooser,
            backend=backend,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            qk_norm=qk_norm,
            qk_norm_all_heads=qk_norm_all_heads,
            norm_eps=norm_eps,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
        )
        if compressor not in ("mean", "mlp"):
            raise ValueError(f"compressor must be 'mean' or 'mlp', got {compressor!r}")
        self.shared_kv = shared_kv
        self.k_compressor, self.v_compressor = (
            MLPCompressor(geometry, width) if compressor == "mlp" else MeanCompressor(geometry, backend)
            for width in (self.head_dim, self.value_dim)
        )
        self.gate = SigmoidGate(self.q_proj.in_features, self.num_heads)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Documents | None = None,
        key_padding_mask: Tensor | None = None,
        rotary: RotaryTables | None = None,
        selected_blocks: Tensor | None = None,
        cache: KVCache | None = None,
        choice_sample: ChoiceSample | None = None,
        local_tokens: TokenShard | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            x: The layer's input, [B, T, E].
            cu_seqlens: Boundaries of packed documents, [documents + 1], with B == 1; or `Documents`, checked once.
            key_padding_mask: True at padding, [B, T], as of `nn.MultiheadAttention`; a row's padding lies behind its
                tokens. The output is zero there. With it only `rotary` and `selected_blocks` are read.
            rotary: From `rotary_tables` for these tokens, where layers share them.
            selected_blocks: Blocks to read instead of the most important ones, [B, T, G, N]; see `nsa_attention`.
            cache: Holds earlier tokens, which give these their positions; the other arguments are ignored with it.
            choice_sample: What teaches the choice in a training step.
            local_tokens: Where processes share each sequence, the tokens of x. Then documents and the rotary tables'
                compressed blocks are those of the whole sequence.

        Returns:
            [B, T, E]; with a sample, and the loss and recall of the choice, summed over queries and groups, [2].

        Raises:
            ValueError: If x, the boundaries or the mask do not fit.
        """
        check_input(x, self.q_proj)
        if key_padding_mask is not None:
            given = {"rotary": rotary, "selected_blocks": selected_blocks}
            return self._on_padded_rows(NSAttention.forward, x, key_padding_mask, cu_seqlens, **given)
        documents, positions = documents_and_positions(x, cu_seqlens, local_tokens)
        drawn = self._draw(x, positions) if choice_sample is None and cache is None and local_tokens is None else None
        q, keys, values, [logits], heads = self._project_all(x, choice_sample or drawn, self.gate.proj)
        gates = self.gate(x, logits)
        if cache is not None:
            index = None if heads is None else split_heads(heads)
            return self.o_proj(cache.attend(self, Projected(q, keys, values, gates, index)).flatten(2))
        rotary = self._exact_tables(rotary, x, documents, local_tokens)
        # Compressed keys are made of unrotated ones. Shared keys are rotated once.
        q, *rotated = (rotate(states, *rotary.tokens) for states in (q, *keys[-2:]))
        (raw, *gathered), index = self._gathered([keys[0], *rotated, *values], heads, rotary, local_tokens)
        rotated, values = gathered[: len(rotated)], gathered[len(rotated) :]
        v_cmp, v_slc, v_win = values * (NUM_BRANCHES // self.branches)
        k_slc, k_win = rotated[0], rotated[-1]
        compressors = self.k_compressor, self.v_compressor
        k_cmp, v_cmp = compress_keys_and_values(compressors, raw, v_cmp, documents)
        k_cmp = rotate_blocks(k_cmp, rotary)

        def attend(chunk: Chunk) -> Tensor:
            q_rows, keys, blocks = chunk.queries(q), chunk.keys(k_slc), self._num_compressed(chunk)
            if selected_blocks is None:
                chosen = self._chosen(q_rows, keys, index, chunk)
            else:
                chosen = chunk.queries(selected_blocks)
            return nsa_attention(
                q_rows,
                chunk.keys(k_cmp, blocks),
                chunk.keys(v_cmp, blocks),
                keys,
                chunk.keys(v_slc),
                chunk.keys(k_win),
                chunk.keys(v_win),
                chunk.queries(gates),
                self.geometry,
                cu_seqlens=chunk.documents,
                selected_blocks=chosen,
                backend=self.backend,
            )

        o = self.o_proj(joined([attend(chunk) for chunk in chunks_of(x, documents, local_tokens)]).flatten(2))
        return self._result(o, choice_sample, drawn, q, k_slc, index, documents, local_tokens)


class DenseAttention(AttentionBase):
    """Causal attention over the whole past: the dense baseline of `NSAttention`. Arguments as of `AttentionBase`."""

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Documents | None = None,
        key_padding_mask: Tensor | None = None,
        rotary: RotaryTables | None = None,
        cache: KVCache | None = None,
        local_tokens: TokenShard | None = None,
    ) -> Tensor:
        """Attend; arguments and result as in `NSAttention.forward`.

        How packed documents are attended to: `trifocal.nn.packed`. Queries that are the last ones of more keys attend
        as in a window of all these keys.
        """
        check_input(x, self.q_proj)
        if key_padding_mask is not None:
            return self._on_padded_rows(DenseAttention.forward, x, key_padding_mask, cu_seqlens, rotary=rotary)
        documents, _ = documents_and_positions(x, cu_seqlens, local_tokens)
        q, [k], [v], _ = self._project(x)
        if cache is not None:
            return self.o_proj(cache.attend(self, Projected(q, [k], [v])).flatten(2))
        rotary = self._exact_tables(rotary, x, documents, local_tokens)
        q, k = (rotate(states, *rotary.tokens) for states in (q, k))
        if local_tokens is None:
            o = self._attend(q, k, v, documents)
        else:
            seen = self._seen((k, v), local_tokens)
            o = joined([self._attend(chunk.queries(q), k, v, chunk.documents) for chunk, (k, v) in seen])
        return self.o_proj(o.flatten(2))

    def _seen(self, xs: tuple[Tensor, Tensor], local_tokens: TokenShard) -> list[tuple[Chunk, list[Tensor]]]:
        """For each chunk of this process's keys and values, those of all processes that its queries see."""
        gathered = local_tokens.shard.gather(xs)
        return [(chunk, [chunk.keys(x) for x in gathered]) for chunk in local_tokens.chunks]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        """q [B, T, H, D], k [B, S, G, D], v [B, S, G, V] -> [B, T, H, V]."""
        if q.shape[1] < k.shape[1]:
            return window_attention(q, k, v, k.shape[1], cu_seqlens=documents)
        if documents is None:
            return dense_attention(q, k, v)
        # Imported here, because PyTorch's varlen attention imports its compiler.
        from trifocal.nn.packed import packed_attention

        return packed_attention(q, k, v, documents)


class WindowAttention(DenseAttention):
    """Causal attention over only the last tokens.

    Args:
        window_size: Keys that a query sees, its own included.
        backend: `"auto"`, `"reference"` or `"triton"`; see `trifocal.ops.dispatch`.
        **sizes: As of `DenseAttention`.

    Raises:
        ValueError: If the sizes do not fit one another.
    """

    def __init__(self, *, window_size: int, backend: Backend = "auto", **sizes: Any) -> None:
        super().__init__(**sizes)
        check_whole_number("window_size", window_size, 1, LARGEST_SIZE)
        check_backend(backend)
        self.window_size, self.backend = window_size, backend

    def _seen(self, xs: tuple[Tensor, Tensor], local_tokens: TokenShard) -> list[tuple[Chunk, list[Tensor]]]:
        return local_tokens.windows(xs, self.window_size)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        return window_attention(q, k, v, self.window_size, cu_seqlens=documents, backend=self.backend)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q [B, T, H, D], k [B, T, G, D], v [B, T, G, V]."""
    # Not every kernel behind SDPA shares keys between heads; those for other types and devices get copies.
    obstacle = flash_attention_obstacle(q.device.type, q.device.index, q.dtype, q.shape[3])
    shared = not obstacle and q.shape[3] == v.shape[3]
    copies = 1 if shared else q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(copies, dim=1) for x in (k, v))
    o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    return o.transpose(1, 2)
