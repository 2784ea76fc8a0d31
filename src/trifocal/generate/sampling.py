"""Continuing token sequences: prefill, then one token a step."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trifocal.generate.cache import make_caches
from trifocal.models.decoder import DecoderLM
from trifocal.ops.validation import check_rank, check_whole_number


def generate(
    model: DecoderLM,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_token: int | None = None,
    prefill_chunk_size: int = 0,
) -> Tensor:
    """Continue each row of a batch of equally long prompts.

    Args:
        model: The model.
        tokens: Prompts, [B, T], at least one token each.
        max_new_tokens: Tokens to add.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Draw from the k most likely tokens, of equal ones those of lower index; 0 from all.
        top_p: Draw from the fewest most likely tokens whose probabilities reach p together; 1 from all.
        seed: Makes the draw repeatable; None takes PyTorch's global generator.
        stop_token: A row that draws it is done and filled up with it; None never stops.
        prefill_chunk_size: Tokens of the prompt that go through the model at a time, which bounds memory; 0 all.

    Returns:
        Prompts and their continuations, [B, T + max_new_tokens].

    Raises:
        ValueError: If an argument is out of range.
        FloatingPointError: If logits are not finite, for the prompt or for a generated token.
    """
    _check_arguments(tokens, max_new_tokens, temperature, top_k, top_p, prefill_chunk_size)
    if max_new_tokens == 0:
        return tokens.clone()
    batch, prompt_length = tokens.shape
    # Made outside of inference mode: training cannot use inference tensors.
    output = torch.cat((tokens, tokens.new_zeros(batch, max_new_tokens)), dim=1)
    steps = _steps(
        model,
        tokens,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_token=stop_token,
        prefill_chunk_size=prefill_chunk_size,
    )
    for position, step in enumerate(steps, start=prompt_length):
        output[:, position] = step.drawn
        # The first step is checked at once; later ones at the end, or always if each token waits for the GPU anyway.
        if stop_token is not None or position in (prompt_length, output.shape[1] - 1):
            step.check()
        if stop_token is not None and bool(step.finished.all()):
            output[:, position + 1 :] = stop_token
            break
    return output


def stream(
    model: DecoderLM,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_token: int | None = None,
    prefill_chunk_size: int = 0,
) -> Iterator[Tensor]:
    """As `generate`, with the same tokens, each yielded when it is drawn.

    Yields:
        The next token of every row, [B], int64; the last when every row has stopped.

    Raises:
        ValueError: If an argument is out of range.
        FloatingPointError: If logits are not finite; no token is drawn from them.
    """
    _check_arguments(tokens, max_new_tokens, temperature, top_k, top_p, prefill_chunk_size)
    for step in _steps(
        model,
        tokens,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_token=stop_token,
        prefill_chunk_size=prefill_chunk_size,
    ):
        step.check()
        yield step.drawn
        if stop_token is not None and bool(step.finished.all()):
            return


class _Step(NamedTuple):
    drawn: Tensor
    """[B]."""
    finished: Tensor
    """Which rows have drawn the stop token, [B]."""
    finite: Tensor
    """Whether all logits so far were, []."""

    def check(self) -> None:
        if not bool(self.finite):
            raise FloatingPointError("the model's output is not finite: its weights are broken")


@torch.inference_mode()
def _steps(
    model: DecoderLM,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop_token: int | None,
    prefill_chunk_size: int,
) -> Iterator[_Step]:
    """One step a token, without waiting for a GPU."""
    batch, prompt_length = tokens.shape
    length = prompt_length + max_new_tokens
    generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
    finished = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    finite = torch.ones((), dtype=torch.bool, device=tokens.device)
    caches = make_caches(model.config, length)
    for chunk in tokens.split(min(prefill_chunk_size or prompt_length, prompt_length), dim=1):
        hidden = model.hidden_states(chunk, cache=caches)
    for position in range(prompt_length, length):
        logits = model.logits(hidden[:, -1])
        finite = finite & logits.isfinite().all()
        # On a GPU, a draw from logits that are not finite is a device-side assertion: the process loses the GPU.
        logits = logits.masked_fill(~finite, 0.0)
        drawn = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if stop_token is not None:
            drawn = drawn.masked_fill(finished, stop_token)
            finished = finished | (drawn == stop_token)
        yield _Step(drawn, finished, finite)
        if position + 1 < length:
            hidden = model.hidden_states(drawn[:, None], cache=caches)


def sample(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draw one token a row: logits [B, vocab] -> [B]; temperature, then top-k, then top-p; see `generate`.

    Of equal logits the lower indices count as likelier.
    """
    if temperature == 0 or top_k == 1:
        # The first of equal ones, as PyTorch promises.
        return logits.argmax(-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Before the temperature: a low one makes all but the likeliest equal, at minus infinity.
    if 0 < top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]
        larger, equal = logits > smallest_kept, logits == smallest_kept
        room = top_k - larger.sum(-1, keepdim=True)
        kept = larger | (equal & (equal.cumsum(-1) <= room))
        logits = logits.masked_fill(~kept, -torch.inf)
    # Relative to the largest, so that a low temperature makes only unlikely logits infinite. A temperature under the
    # smallest number of this precision would be 0, and 0 / 0 is NaN.
    low = torch.finfo(logits.dtype).tiny
    p = ((logits - logits.amax(-1, keepdim=True)) / max(temperature, low)).softmax(-1)
    if top_p < 1:
        ranked, order = p.sort(dim=-1, descending=True, stable=True)
        # A token stays if the more likely ones do not reach top_p without it; the first always does.
        beyond = ranked.cumsum(-1) - ranked >= top_p
        beyond[:, 0] = False
        p = p.masked_fill(beyond.scatter(-1, order, beyond), 0.0)
    return torch.multinomial(p, 1, generator=generator).squeeze(-1)


def _check_arguments(
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    prefill_chunk_size: int,
) -> None:
    check_rank("tokens", tokens, "[B, T]")
    if 0 in tokens.shape:
        raise ValueError(f"tokens must be [B, T] with at least one token a row, got {list(tokens.shape)}")
    for name, value in (
        ("max_new_tokens", max_new_tokens),
        ("top_k", top_k),
        ("prefill_chunk_size", prefill_chunk_size),
    ):
        check_whole_number(name, value, 0)
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
