"""What is asked of the engine, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trifocal.generate.sampler import Sampling
from trifocal.ops.validation import check_whole_number

FinishReason = Literal["stop", "length", "error"]


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
        name: For messages.

    Raises:
        ValueError: If a value is out of range.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    samples: int = 1
    stop_tokens: Sequence[int] = ()
    stop: Sequence[str] = ()
    name: str = ""

    def __post_init__(self) -> None:
        check_whole_number("max_new_tokens", self.max_new_tokens, 1)
        check_whole_number("samples", self.samples, 1)
        if not len(self.prompt):
            raise ValueError("a prompt must have at least one token")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")

    @property
    def longest(self) -> int:
        """Tokens that the caches hold at the end: the last drawn one is never read."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass
class Completion:
    """A finished sequence.

    Attributes:
        request: The request.
        sample: Which of its continuations.
        tokens: New tokens, a stop token included.
        log_probabilities: Of the tokens, by the model without temperature, penalty and filters; natural logs.
        text: Of the tokens, without a stop string; empty without a tokenizer.
        finish_reason: "stop" for a stop token or string, "length" at `max_new_tokens`, "error" where logits were not
            finite.
    """

    request: Request
    sample: int
    tokens: list[int]
    log_probabilities: list[float]
    text: str
    finish_reason: FinishReason


class Update(NamedTuple):
    """A new token of a sequence, or its end.

    Attributes:
        request: The request.
        sample: Which of its continuations.
        token: The token; None where logits were not finite.
        log_probability: Of the token; see `Completion`.
        text: What it adds to the text; empty in the middle of a character, and without a tokenizer.
        completion: The whole sequence, with its last token.
    """

    request: Request
    sample: int
    token: int | None
    log_probability: float
    text: str
    completion: Completion | None
