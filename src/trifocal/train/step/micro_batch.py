"""A micro-batch as the model takes it: plain rows, or one row of packed documents."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from trifocal.data import Batch
from trifocal.ops import Documents
from trifocal.ops.layout import check_boundaries, pad_boundaries

LossFunction = Callable[..., Tensor]


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[None]:
    """bf16 matrix products for "bf16"; nothing for "fp32". The weights are fp32 either way."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def model_inputs(batch: Batch, *, pad_documents: bool = False, documents: int = 0) -> list[Tensor]:
    """Tokens, targets and, where one is inside a row, or `documents` is not 0, checked boundaries, on the host.
    `pad_documents` appends empty ones up to that many and more, so that compiled code and graphs fit the next batch
    too.
    """
    num_tokens, row_length, cu_seqlens = batch.rows.numel(), batch.rows.shape[1], batch.cu_seqlens
    if cu_seqlens is None and documents:
        cu_seqlens = torch.arange(0, num_tokens + 1, row_length, dtype=torch.int32)
    if cu_seqlens is None:
        return [batch.tokens, batch.targets]
    check_boundaries(cu_seqlens, num_tokens)
    if not torch.isin(torch.arange(0, num_tokens, row_length), cu_seqlens).all():
        raise ValueError(f"each row of {row_length} tokens must begin a document, got {cu_seqlens.tolist()}")
    if pad_documents:
        cu_seqlens = pad_boundaries(cu_seqlens, num_tokens, documents)
    return [batch.tokens, batch.targets, cu_seqlens]


def call_with(loss_function: LossFunction, inputs: list[Tensor], rows: torch.Size) -> Tensor:
    """Call the model with `model_inputs` of a batch with rows of a shape [B, S]; rows of documents become one."""
    tokens, targets, *boundaries = inputs
    if not boundaries:
        return loss_function(tokens, targets)
    documents = Documents.from_checked(boundaries[0], rows.numel(), row_length=rows[1])
    return loss_function(tokens.reshape(1, -1), targets.reshape(1, -1), cu_seqlens=documents)
