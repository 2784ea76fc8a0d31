"""Selected attention as a whole layer: one softmax over first, local and selected blocks, without gates."""

from typing import Any

import torch
from torch import Tensor

from trifocal.nn.attention_base import (
    ChoiceSample,
    KVCache,
    Projected,
    RotaryTables,
    check_input,
    documents_and_positions,
)
from trifocal.nn.chooser import ChoosingAttention, choose_blocks, rotate_blocks, split_heads
from trifocal.nn.compressor import MeanCompressor
from trifocal.nn.context import Chunk, TokenShard, chunks_of, joined
from trifocal.nn.rope import rotate
from trifocal.ops import Documents, Geometry, selected_attention
from trifocal.ops.dispatch import Backend


class SelectedAttention(ChoosingAttention):
    """Attention to the tokens of the first, the last and the most important blocks.

    Keys and values are those of dense attention: a dense model's weights fit as they are, and with enough blocks to
    cover the past both are equal. Compressed keys, the means of the unrotated keys, choose the blocks and are not
    attended to; nothing is learned by choosing. Or an index chooses, which its own loss teaches: then this is the
    attention of arXiv:2606.13392.

    Args:
        geometry: Block sizes, in tokens; its window is not used.
        backend: `"auto"`, `"reference"` or `"triton"`; see `trifocal.ops.dispatch`.
        **sizes: `chooser`, `dim`, `num_heads`, `num_kv_heads`, `head_dim`, `value_dim` and the rest of
            `AttentionBase`. The heads that share a KV head share its chosen blocks too.

    Raises:
        ValueError: If the sizes do not fit one another.

    Source: arXiv:2509.24663 (InfLLM-V2), with the choice of arXiv:2502.11089, Eq. 8 to 11.
    """

    def __init__(self, *, geometry: Geometry, backend: Backend = "auto", **sizes: Any) -> None:
        super().__init__(geometry=geometry, backend=backend, **sizes)
        self.k_compressor = MeanCompressor(geometry, backend)

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
        """Attend; arguments and result as in `NSAttention.forward`."""
        check_input(x, self.q_proj)
        if key_padding_mask is not None:
            given = {"rotary": rotary, "selected_blocks": selected_blocks}
            return self._on_padded_rows(SelectedAttention.forward, x, key_padding_mask, cu_seqlens, **given)
        documents, positions = documents_and_positions(x, cu_seqlens, local_tokens)
        drawn = self._draw(x, positions) if choice_sample is None and cache is None and local_tokens is None else None
        q, [k], [v], _, heads = self._project_all(x, choice_sample or drawn)
        if cache is not None:
            index = None if heads is None else split_heads(heads)
            return self.o_proj(cache.attend(self, Projected(q, [k], [v], index=index)).flatten(2))
        raw = [k.detach()] if selected_blocks is None and self.chooser == "compressed" else []
        rotary = self._exact_tables(rotary, x, documents, local_tokens)
        q, k = (rotate(states, *rotary.tokens) for states in (q, k))
        (k, v, *raw), index = self._gathered([k, v, *raw], heads, rotary, local_tokens)
        k_cmp = None
        if raw:
            with torch.no_grad():
                k_cmp = rotate_blocks(self.k_compressor(raw[0], documents), rotary)

        def attend(chunk: Chunk) -> Tensor:
            q_rows, keys = chunk.queries(q), chunk.keys(k)
            if selected_blocks is not None:
                chosen: Tensor | None = chunk.queries(selected_blocks)
            else:
                chosen = self._chosen(q_rows, keys, index, chunk)
            if chosen is None:
                assert k_cmp is not None
                with torch.no_grad():
                    few = chunk.keys(k_cmp, self._num_compressed(chunk))
                    chosen = choose_blocks(q_rows, few, chunk.num_keys, self.geometry, chunk.documents, self.backend)
            values = chunk.keys(v)
            return selected_attention(
                q_rows, keys, values, chosen, self.geometry, cu_seqlens=chunk.documents, backend=self.backend
            )

        o = self.o_proj(joined([attend(chunk) for chunk in chunks_of(x, documents, local_tokens)]).flatten(2))
        return self._result(o, choice_sample, drawn, q, k, index, documents, local_tokens)
