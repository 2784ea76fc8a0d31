"""Requests, completions and updates of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trifocal.inference.sampler import Sampling
from trifocal.ops.validation import check_type, check_whole_number

FinishReason = Literal["stop", "length", "error"]
MAX_LIKELIEST = 20
"""Likeliest tokens that a request may ask for."""


def token_tensor(name: str, tokens: Any, pattern: str, vocab_size: int = 0) -> Tensor:
    """Tokens as int64, on their device; ValueError unless they are whole numbers of the pattern's shape, `"[T]"` or
    `"[B, T]"`, and, if it is given and they are on the host, of the vocabulary.
    """
    if isinstance(tokens, Tensor):
        found = tokens
    else:
        # NumPy reads a list of whole numbers in a fifth of PyTorch's time, a millisecond for a long prompt.
        array = np.asarray(tokens)
        if array.dtype.kind not in "biufc":
            raise ValueError(f"{name} must be whole numbers, got {array.dtype}")
        # PyTorch knows not every type without a sign; tokens from 2**63 on become negative, which no vocabulary has.
        found = torch.as_tensor(array.astype(np.int64) if array.dtype.kind == "u" else array)
    if found.ndim != pattern.count(",") + 1 or found.numel() == 0:
        raise ValueError(f"{name} must be {pattern} with at least one token, got {list(found.shape)}")
    if found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers, got {found.dtype}")
    found = found.to(torch.int64)
    if vocab_size and found.device.type == "cpu" and not in_vocabulary(found, vocab_size):
        raise ValueError(f"{name} has tokens outside the vocabulary of {vocab_size}")
    return found


def in_vocabulary(tokens: Tensor, vocab_size: int) -> bool:
    """Whether all tokens, at least one, are from 0 to under `vocab_size`."""
    low, high = tokens.aminmax()
    return 0 <= int(low) <= int(high) < vocab_size


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: Tokens, at least one.
        max_new_tokens: Tokens to add at most.
        sampling: How they are drawn; sample `i` of several draws with `seed + i`.
        samples: Continuations; they share the prompt's pages.
        stop_tokens: A sequence that draws one of them ends with it.
        stop: Strings; a sequence whose text has one of them ends, and its text ends before it. Needs a tokenizer.
        likeliest: Likeliest tokens to give beside each token, up to `MAX_LIKELIEST`.
        score_prompt: Whether to give the log-probabilities of the prompt's tokens too.
        name: For messages.
        prompt_tensor: The prompt as int64, [T]. A long list takes its time, so it is read once: changes are not seen.

    Raises:
        ValueError: If a value is out of range.
    """

    prompt: Sequence[int] | NDArray[np.integer[Any]]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    samples: int = 1
    stop_tokens: Sequence[int] = ()
    stop: Sequence[str] = ()
    likeliest: int = 0
    score_prompt: bool = False
    name: str = ""
    prompt_tensor: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_whole_number("max_new_tokens", self.max_new_tokens, 1)
        check_whole_number("samples", self.samples, 1)
        check_whole_number("likeliest", self.likeliest, 0, MAX_LIKELIEST)
        object.__setattr__(self, "prompt_tensor", token_tensor("a prompt", self.prompt, "[T]").clone())
        check_type("sampling", self.sampling, Sampling)
        if (
            isinstance(self.stop, str)
            or not isinstance(self.stop, Sequence)
            or not all(isinstance(text, str) for text in self.stop)
        ):
            raise ValueError(f"stop must be a sequence of strings, got {self.stop!r}")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")

    @property
    def longest(self) -> int:
        """Tokens that the caches hold at the end: the last drawn one is never read."""
        return len(self.prompt_tensor) + self.max_new_tokens - 1


class TokenScore(NamedTuple):
    """How likely a token was.

    Attributes:
        log_probability: Natural log-probability by the model, without temperature, penalty and filters.
        likeliest: The likeliest tokens in its place with theirs, most likely first.
    """

    log_probability: float
    likeliest: list[tuple[int, float]]


@dataclass
class Completion:
    """A finished sequence.

    Attributes:
        request: The request.
        sample: Which of its continuations.
        tokens: New tokens, a stop token included.
        log_probabilities: Natural log-probability of each token by the model, without temperature, penalty and filters.
        text: Text of the tokens, without a stop string; empty without a tokenizer.
        finish_reason: "stop" for a stop token or string, "length" at `max_new_tokens`, "error" where logits were not
            finite.
        reused_tokens: Prompt tokens served from the prefix cache.
    """

    request: Request
    sample: int
    tokens: list[int]
    log_probabilities: list[float]
    text: str
    finish_reason: FinishReason
    reused_tokens: int = 0


class Update(NamedTuple):
    """A new token of a sequence, or its end.

    Attributes:
        request: The request.
        sample: Which of its continuations.
        token: The token; None where logits were not finite.
        score: The token's.
        text: What it adds to the text; empty in the middle of a character, and without a tokenizer.
        completion: The whole sequence, with its last token.
        prompt_scores: With the first token, those of the prompt's tokens from the second on, if they were asked for.
    """

    request: Request
    sample: int
    token: int | None
    score: TokenScore
    text: str
    completion: Completion | None
    prompt_scores: list[TokenScore]
