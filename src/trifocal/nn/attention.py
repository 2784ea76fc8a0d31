"""Attention layers: Native Sparse Attention and its dense twin, with the same interface.

Inputs are [B, T, E]. Shape letters as in DESIGN.md: H query heads, G KV heads, D and V dims, C compressed blocks.
A group is the query heads that share one KV head.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trifocal.nn.compressor import MeanCompressor, MLPCompressor
from trifocal.nn.gate import NUM_BRANCHES, GroupSoftmaxGate, SigmoidGate
from trifocal.nn.projection import project
from trifocal.nn.rope import rotary_tables, rotate
from trifocal.ops import Documents, Geometry, nsa_attention
from trifocal.ops.dispatch import check_backend
from trifocal.ops.layout import compressed_layout, max_packed_compressed_blocks
from trifocal.ops.validation import check_geometry, check_rank, check_whole_number

KeysValues = tuple[Tensor, Tensor]


class RotaryTables(NamedTuple):
    """Cosines and sines of a whole forward pass, the same in every layer.

    Attributes:
        cos, sin: Of the tokens, [T, D/2].
        cos_cmp, sin_cmp: Of the compressed blocks, [C, D/2]; None in dense attention.
    """

    cos: Tensor
    sin: Tensor
    cos_cmp: Tensor | None = None
    sin_cmp: Tensor | None = None


class NSACache(Protocol):
    """Interface of a sparse layer's decoding cache; `trifocal.generate` implements it."""

    @property
    def length(self) -> int:
        """Tokens that the cache has seen."""

    def extend(
        self,
        raw: KeysValues,
        selected: KeysValues,
        window: KeysValues | None,
        compress: Callable[[Tensor, Tensor, int], KeysValues],
    ) -> tuple[KeysValues, KeysValues, KeysValues]:
        """Append T tokens and return the keys and values that their queries see.

        Args:
            raw: Unrotated keys and values of the compressed branch, [B, T, G, D] and [B, T, G, V].
            selected: Rotated keys and values of the selected branch.
            window: Those of the window branch; None when it shares the selected branch's.
            compress: Makes rotated compressed keys and values of the whole blocks in a stretch of raw ones; the
                last argument is the position of the stretch's first token.

        Returns:
            Keys and values of all compressed blocks, of all tokens, and of the last `min(S, T + w - 1)` tokens.
        """


class DenseCache(Protocol):
    """Interface of a dense layer's decoding cache."""

    @property
    def length(self) -> int:
        """Tokens that the cache has seen."""

    def extend(self, k: Tensor, v: Tensor) -> KeysValues:
        """Append rotated keys and values of T tokens and return those of all tokens so far."""


class _Attention(nn.Module):
    """The common part of both attentions: checked sizes, projections, rotary tables; arguments as of `NSAttention`.

    Args:
        branches: Keys and values lie side by side in the outputs of k_proj and v_proj, for this many branches.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        rope_theta: float,
        branches: int = 1,
    ) -> None:
        super().__init__()
        _check_sizes(dim, num_heads, num_kv_heads, head_dim, value_dim, rope_theta)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, branches * num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, branches * num_kv_heads * value_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * value_dim, dim, bias=False)

    def _rotary_tables(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(positions, self.head_dim, self.rope_theta, torch.promote_types(x.dtype, torch.float32))


class NSAttention(_Attention):
    """Native Sparse Attention as a layer: projections, rotary positions, compressor, gates, three branches.

    Each branch has its own keys and values. Queries are rotated once, keys by the position of their token, compressed
    keys by the position of their block's first token.

    Args:
        dim: E, width of input and output.
        num_heads: H, query heads.
        num_kv_heads: G, KV heads; H/G query heads share one, and its chosen blocks. Divides H.
        head_dim: D of queries and keys; even.
        value_dim: V of values.
        geometry: Block sizes, in tokens.
        compressor: φ: `"mean"`, or `"mlp"`, the paper's learnable one.
        gate: `"sigmoid"` per head, or `"softmax"` over the branches per group.
        shared_kv: One projection of keys and values for all branches instead of one each.
        rope_theta: Base of the rotary frequencies.
        backend: `"auto"`, `"reference"` or `"triton"`; see `trifocal.ops.dispatch`.

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
        gate: Literal["sigmoid", "softmax"] = "sigmoid",
        shared_kv: bool = False,
        rope_theta: float = 10000.0,
        backend: Literal["auto", "reference", "triton"] = "auto",
    ) -> None:
        check_geometry(geometry)
        # Branches are in the order cmp, slc, win.
        branches = 1 if shared_kv else NUM_BRANCHES
        super().__init__(dim, num_heads, num_kv_heads, head_dim, value_dim, rope_theta, branches)
        if compressor not in ("mean", "mlp"):
            raise ValueError(f"compressor must be 'mean' or 'mlp', got {compressor!r}")
        if gate not in ("sigmoid", "softmax"):
            raise ValueError(f"gate must be 'sigmoid' or 'softmax', got {gate!r}")
        check_backend(backend)
        self.geometry, self.shared_kv, self.backend = geometry, shared_kv, backend
        self.k_compressor, self.v_compressor = (
            MLPCompressor(geometry, width, backend) if compressor == "mlp" else MeanCompressor(geometry, backend)
            for width in (head_dim, value_dim)
        )
        self.gate: SigmoidGate | GroupSoftmaxGate
        if gate == "sigmoid":
            self.gate = SigmoidGate(dim, num_heads)
        else:
            self.gate = GroupSoftmaxGate(num_heads, num_kv_heads, head_dim)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Documents | None = None,
        cache: NSACache | None = None,
        rotary: RotaryTables | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: The layer's input, [B, T, E].
            cu_seqlens: Borders of packed documents, [documents + 1], with B == 1; or `Documents`, checked once.
            cache: Earlier tokens; the T tokens are appended to them.
            rotary: From `rotary_tables` for these tokens, where layers share them; without a cache.

        Returns:
            [B, T, E].

        Raises:
            ValueError: If both documents and a cache are given, or the borders do not fit.
        """
        _check_input(x, self.q_proj.in_features)
        documents, positions = _locate(x, cu_seqlens, cache)
        q, (k_cmp, k_slc, k_win), (v_cmp, v_slc, v_win), gates = self._project(x)

        cos, sin = self._rotary_tables(positions, q) if rotary is None else (rotary.cos, rotary.sin)
        q = rotate(q, cos, sin)
        k_slc = rotate(k_slc, cos, sin)
        k_win = k_slc if self.shared_kv else rotate(k_win, cos, sin)
        if cache is None:
            k_cmp, v_cmp = self._compress(k_cmp, v_cmp, 0, documents, rotary)
        else:
            (k_cmp, v_cmp), (k_slc, v_slc), (k_win, v_win) = cache.extend(
                (k_cmp, v_cmp), (k_slc, v_slc), None if self.shared_kv else (k_win, v_win), self._compress
            )
        o = nsa_attention(
            q,
            k_cmp,
            v_cmp,
            k_slc,
            v_slc,
            k_win,
            v_win,
            gates,
            self.geometry,
            cu_seqlens=documents,
            backend=self.backend,
        )
        return self.o_proj(o.flatten(2))

    def selected_keys(self, projected: Tensor, documents: Documents | None = None) -> Tensor:
        """The selected branch's rotated keys, [B, T, G, D], from `k_proj`'s output; full attention would read these.

        Args:
            projected: [B, T, branches * G * D].
            documents: Packed documents, if there are several.
        """
        branches = projected.unflatten(-1, (-1, self.num_kv_heads, self.head_dim)).unbind(2)
        k_slc = branches[0] if self.shared_kv else branches[1]
        _, positions = _locate(projected, documents, None)
        return rotate(k_slc, *self._rotary_tables(positions, k_slc))

    def rotary_tables(self, x: Tensor, cu_seqlens: Documents | None = None) -> RotaryTables:
        """Tables for tokens without a cache, for all layers of these sizes; x [B, T, E] gives length, device, type."""
        documents, positions = _locate(x, cu_seqlens, None)
        if documents is None:
            num_blocks = self.geometry.num_compressed_blocks(x.shape[1])
        else:
            num_blocks = max_packed_compressed_blocks(x.shape[1], self.geometry)
        starts = self._block_starts(num_blocks, documents, x.device)
        return RotaryTables(*self._rotary_tables(positions, x), *self._rotary_tables(starts, x))

    def _project(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
        """q [B, T, H, D]; keys and values of cmp, slc, win, each [B, T, G, *]; gates [B, T, H, 3]."""
        branches = 1 if self.shared_kv else NUM_BRANCHES
        linears, parts = [self.q_proj, self.k_proj, self.v_proj], [1, branches, branches]
        if isinstance(self.gate, SigmoidGate):
            q, *keys_values, logits = project(x, [*linears, self.gate.proj], [*parts, 1])
            gates = self.gate(x, logits)
            q = q.unflatten(-1, (self.num_heads, self.head_dim))
        else:
            q, *keys_values = project(x, linears, parts)
            q = q.unflatten(-1, (self.num_heads, self.head_dim))
            gates = self.gate(q)
        heads = [part.unflatten(-1, (self.num_kv_heads, -1)) for part in keys_values]
        keys, values = heads[:branches], heads[branches:]
        return q, keys * (NUM_BRANCHES // branches), values * (NUM_BRANCHES // branches), gates

    def _compress(
        self,
        k_raw: Tensor,
        v_raw: Tensor,
        first_position: int,
        documents: Documents | None = None,
        rotary: RotaryTables | None = None,
    ) -> KeysValues:
        """Compress unrotated keys and values and rotate the keys; `first_position` is that of the first token."""
        k_cmp, v_cmp = self.k_compressor(k_raw, documents), self.v_compressor(v_raw, documents)
        if rotary is not None and rotary.cos_cmp is not None and rotary.sin_cmp is not None:
            return rotate(k_cmp, rotary.cos_cmp, rotary.sin_cmp), v_cmp
        starts = self._block_starts(k_cmp.shape[1], documents, k_cmp.device)
        return rotate(k_cmp, *self._rotary_tables(first_position + starts, k_cmp)), v_cmp

    def _block_starts(self, num_blocks: int, documents: Documents | None, device: torch.device) -> Tensor:
        if documents is None:
            return torch.arange(num_blocks, device=device) * self.geometry.compression_stride
        return compressed_layout(documents, num_blocks, self.geometry).starts


class DenseAttention(_Attention):
    """Causal attention over the whole past: the dense twin of `NSAttention`, the baseline of every comparison.

    Args:
        dim: E, width of input and output.
        num_heads: H, query heads.
        num_kv_heads: G, KV heads; H/G query heads share one. Divides H.
        head_dim: D of queries and keys; even.
        value_dim: V of values.
        rope_theta: Base of the rotary frequencies.

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
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__(dim, num_heads, num_kv_heads, head_dim, value_dim, rope_theta)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Documents | None = None,
        cache: DenseCache | None = None,
        rotary: RotaryTables | None = None,
    ) -> Tensor:
        """Attend; arguments and result as in `NSAttention.forward`.

        How packed documents are attended to: `trifocal.nn.packed`.
        """
        _check_input(x, self.q_proj.in_features)
        documents, positions = _locate(x, cu_seqlens, cache)
        q, k, v = project(x, [self.q_proj, self.k_proj, self.v_proj])
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.value_dim))
        cos, sin = self._rotary_tables(positions, q) if rotary is None else (rotary.cos, rotary.sin)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        if documents is None:
            o = _dense_attention(q, k, v)
        else:
            # Imported here, because PyTorch's varlen attention imports its compiler.
            from trifocal.nn.packed import packed_attention

            o = packed_attention(q, k, v, documents)
        return self.o_proj(o.flatten(2))

    def rotary_tables(self, x: Tensor, cu_seqlens: Documents | None = None) -> RotaryTables:
        """As `NSAttention.rotary_tables`."""
        return RotaryTables(*self._rotary_tables(_locate(x, cu_seqlens, None)[1], x))


def _dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last T positions over S: q [B, T, H, D], k [B, S, G, D], v [B, S, G, V]."""
    num_queries, num_keys, num_kv_heads = q.shape[1], k.shape[1], k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if num_queries == 1:
        # A single query sees every key: its heads act as the queries of their KV head, and no key is copied.
        q = q.squeeze(2).unflatten(1, (num_kv_heads, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).flatten(1, 2)[:, None]
    # Copied for every head, because not every kernel behind SDPA shares keys between heads.
    q_per_kv = q.shape[1] // num_kv_heads
    k, v = k.repeat_interleave(q_per_kv, dim=1), v.repeat_interleave(q_per_kv, dim=1)
    mask = None
    if num_queries < num_keys:
        # `is_causal` would align the first query with the first key; the queries are the last ones.
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return o.transpose(1, 2)


def _locate(
    x: Tensor, cu_seqlens: Tensor | Documents | None, cache: NSACache | DenseCache | None
) -> tuple[Documents | None, Tensor]:
    """Documents, checked, and the position of each of the T tokens in its document, [T]."""
    num_tokens = x.shape[1]
    if cu_seqlens is None:
        first = 0 if cache is None else cache.length
        return None, torch.arange(first, first + num_tokens, device=x.device)
    if cache is not None:
        raise ValueError("cu_seqlens and cache cannot be given together: a cache holds one document a row")
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, got x of shape {list(x.shape)}")
    documents = Documents.of(cu_seqlens, num_tokens)
    if not isinstance(cu_seqlens, Documents):
        documents = documents.to(x.device)
    return documents, documents.positions


def _check_sizes(dim: int, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int, rope_theta: float) -> None:
    sizes = {
        "dim": dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
    }
    for name, size in sizes.items():
        check_whole_number(name, size, 1)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
    if not rope_theta > 0:
        raise ValueError(f"rope_theta must be above 0, got {rope_theta}")


def _check_input(x: Tensor, dim: int) -> None:
    check_rank("x", x, "[B, T, E]")
    if x.shape[2] != dim:
        raise ValueError(f"x must have the shape [B, T, E] with E = {dim}, got {list(x.shape)}")
