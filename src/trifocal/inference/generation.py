"""Continuing a batch of equally long prompts, by the engine."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trifocal.inference.cached_model import CachedModel
from trifocal.inference.engine import Engine
from trifocal.inference.request import Request
from trifocal.inference.sampler import Sampling
from trifocal.models.decoder import DecoderLM
from trifocal.ops.validation import check_rank, check_whole_number


def generate(
    model: DecoderLM, tokens: Tensor, max_new_tokens: int, *, stop_token: int | None = None, **options: Any
) -> Tensor:
    """Continue each row of a batch of equally long prompts.

    Args:
        model, tokens, max_new_tokens: See `stream`.
        stop_token: A row that draws it is done and filled up with it; None never stops.
        options: Further arguments of `stream`.

    Returns:
        Prompts and their continuations, [B, T + max_new_tokens].

    Raises:
        ValueError: If an argument is out of range.
        FloatingPointError: If logits are not finite, for a prompt or for a generated token.
    """
    steps = stream(model, tokens, max_new_tokens, stop_token=stop_token, **options)
    columns = [tokens, *(step[:, None].to(tokens.dtype) for step in steps)]
    missing = max_new_tokens - (len(columns) - 1)
    if missing:
        assert stop_token is not None
        columns.append(tokens.new_full((len(tokens), missing), stop_token))
    return torch.cat(columns, dim=1)


def stream(
    model: DecoderLM,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    seed: int | None = None,
    stop_token: int | None = None,
    prefill_chunk_size: int = 0,
    **sampling: Any,
) -> Iterator[Tensor]:
    """The tokens of `generate`, each yielded when it is drawn.

    Args:
        model: The model; under autocast it runs in autocast's type.
        tokens: Prompts, [B, T], at least one token each.
        max_new_tokens: Tokens to add.
        seed: Makes the draw repeatable, row `i` draws with `seed + i`; None takes it from PyTorch's global generator.
        stop_token: A row that draws it is done; None never stops.
        prefill_chunk_size: Tokens of a prompt that go through the model at a time, which bounds memory; 0: up to
            65,536, on a CPU up to 8,192.
        sampling: `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`; see `Sampling`.

    Yields:
        The next token of every row, [B], int64; the last when every row has stopped.

    Raises:
        ValueError: If an argument is out of range.
        FloatingPointError: If logits are not finite; no token is drawn from them.
    """
    check_rank("tokens", tokens, "[B, T]")
    if 0 in tokens.shape:
        raise ValueError(f"tokens must be [B, T] with at least one token a row, got {list(tokens.shape)}")
    check_whole_number("max_new_tokens", max_new_tokens, 0)
    check_whole_number("prefill_chunk_size", prefill_chunk_size, 0)
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    samplings = [Sampling(seed=(seed + row) % 2**64, **sampling) for row in range(len(tokens))]
    if max_new_tokens == 0:
        return
    cached = CachedModel(
        model,
        max_sequences=len(tokens),
        max_length=tokens.shape[1] + max_new_tokens - 1,
        prefill_chunk_size=prefill_chunk_size,
    )
    stop_tokens = () if stop_token is None else (stop_token,)
    requests = [
        Request(prompt=prompt, max_new_tokens=max_new_tokens, sampling=own, stop_tokens=stop_tokens)
        for prompt, own in zip(tokens.tolist(), samplings, strict=True)
    ]
    row_of = {id(request): row for row, request in enumerate(requests)}
    rows: list[list[int]] = [[] for _ in requests]
    ended = [False] * len(requests)
    out = 0
    for update in Engine(cached).run(requests):
        row = row_of[id(update.request)]
        if update.token is None:
            raise FloatingPointError("the model's output is not finite: its weights are broken")
        rows[row].append(update.token)
        ended[row] = update.completion is not None
        # Rows begin one after another; a column is whole once every row that goes on has its token.
        while any(len(drawn) > out for drawn in rows) and all(
            len(drawn) > out or done for drawn, done in zip(rows, ended, strict=True)
        ):
            yield torch.tensor([drawn[out] if len(drawn) > out else stop_token for drawn in rows], device=tokens.device)
            out += 1
