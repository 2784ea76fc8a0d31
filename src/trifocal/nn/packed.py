"""Causal attention within packed documents, for the dense baseline; its cost grows with the documents, not the pack.

A rule chooses the code before it runs; `trifocal.ops.dispatch.backend_choices()` counts the choices:

1. `varlen`: FlashAttention on the documents as they lie (`torch.nn.attention.varlen`), on a CUDA device of compute
   capability 8.0 or newer, for bfloat16 and float16 and D and V up to 192;
2. `rows`: PyTorch's SDPA on rows as long as the longest document, on any device and in any type.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from trifocal.ops import Documents
from trifocal.ops.dispatch import count_choice
from trifocal.ops.layout import Rows, take
from trifocal.ops.support import flash_attention_obstacle

# FlashAttention reads 16 bytes at a time.
HEAD_MULTIPLE = 8

_CAUSAL = (-1, 0)
# PyTorch 2.11 shares keys between heads without being asked; later ones have an argument for it.
_SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Attend causally within documents: q [1, T, H, D], k [1, T, G, D], v [1, T, G, V] -> [1, T, H, V]."""
    obstacle = flash_attention_obstacle(q.device.type, q.device.index, q.dtype, max(q.shape[3], v.shape[3]))
    if obstacle:
        count_choice("packed_attention", "rows", obstacle)
        return _rows(q, k, v, documents)
    count_choice("packed_attention", "varlen", "supported")
    return _varlen(q, k, v, documents)


def _varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    dim, value_dim = q.shape[3], v.shape[3]
    # One width for q, k and v: zeros change no score, and columns of zeros are cut off the output.
    width = -(-max(dim, value_dim) // HEAD_MULTIPLE) * HEAD_MULTIPLE
    q, k, v = (x[0] if x.shape[3] == width else pad(x[0], (0, width - x.shape[3])) for x in (q, k, v))
    # The bound is on the host; reading the longest document from the device would wait for the device.
    longest = documents.max_length or q.shape[0]
    boundaries = documents.cu_seqlens
    found = varlen_attn(
        q, k, v, boundaries, boundaries, longest, longest, scale=dim**-0.5, window_size=_CAUSAL, **_SHARED_KEYS
    )
    # A tuple where log-sum-exps are asked for.
    assert isinstance(found, Tensor)
    return found[None, ..., :value_dim]


def _rows(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    rows, q_per_kv = Rows.of(documents), q.shape[2] // k.shape[2]
    keys = rows.keys(torch.arange(rows.num_tokens, device=q.device, dtype=torch.int32))
    ids, positions = documents.ids[None], documents.positions[None]
    # Padding sees itself, so that every query has a key.
    mask = rows.cut(ids, padding=-1)[..., None] == take(ids, keys, padding=-1)[:, None]
    mask &= rows.cut(positions)[..., None] >= take(positions, keys, padding=0)[:, None]
    # Copied for every head, because not every kernel behind SDPA shares keys between heads.
    k, v = (take(x, keys).transpose(1, 2).repeat_interleave(q_per_kv, dim=1) for x in (k, v))
    o = scaled_dot_product_attention(rows.cut(q).transpose(1, 2), k, v, attn_mask=mask[:, None])
    return rows.join(o.transpose(1, 2))
