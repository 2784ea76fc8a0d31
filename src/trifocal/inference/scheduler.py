"""Which sequences are in the caches: which enter and which are swapped out, in the order of their age."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from torch import Tensor

from trifocal.inference.cached_model import CachedModel, CachedSequence, SwappedSequence
from trifocal.inference.pages import pages_for_one_more
from trifocal.inference.prefix_cache import PrefixCache
from trifocal.inference.prompt_lookup import PromptLookup
from trifocal.inference.request import Request, TokenScore
from trifocal.inference.sampler import Sampling
from trifocal.inference.text_stream import TextStream

_AGE = attrgetter("age")


@dataclass(eq=False)
class RequestState:
    """A sequence on its way: it waits, goes through its prompt, runs, may be swapped out, and ends.

    The youngest has the largest `age`. A sequence is `cached`, or `swapped` to the host, or waits; it has a `place` in
    the batch while it takes part in steps. `logits` are those of a piece of its prompt, until it is scored, or of its
    last token, until its first tokens are drawn; `launched` tokens are queued, and `tokens` those that the host has
    read. By the hashes of its prompt's chunks, `keys`, prefixes are kept and found.
    """

    request: Request
    age: int
    sampling: Sampling
    sample: int = 0
    cached: CachedSequence | None = None
    swapped: SwappedSequence | None = None
    place: int | None = None
    logits: Tensor | None = None
    launched: int = 0
    keys: list[bytes] = field(default_factory=list)
    reused_tokens: int = 0
    prompt_scores: list[TokenScore] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    text: str = ""
    stream: TextStream | None = None
    lookup: PromptLookup | None = None
    ended: bool = False

    @property
    def rows(self) -> int:
        """Sequences that it becomes: those of its samples while it is in its prompt."""
        return 1 if self.launched else self.request.samples

    @property
    def prompt_left(self) -> int:
        """Tokens of its prompt that are not in the caches."""
        assert self.cached is not None
        return len(self.request.prompt_tensor) - self.cached.length


class Scheduler:
    """Keeps sequences in order of age, and counts pages and rows for them.

    First come, first served: a sequence is admitted after all that came before it. Kept prefixes give way to sequences.
    A sequence is `waiting` (not yet in the caches), `swapped` (on the host), `prefilling` (its prompt is computed) or
    `running` (it draws tokens); all but the first oldest first.
    """

    def __init__(self, model: CachedModel, prefixes: PrefixCache) -> None:
        self._model, self._prefixes = model, prefixes
        self.waiting: deque[RequestState] = deque()
        self.swapped: list[RequestState] = []
        self.prefilling: list[RequestState] = []
        self._shortest_next = False
        self.running: list[RequestState] = []

    @property
    def idle(self) -> bool:
        """Whether no sequence is left."""
        return not (self.waiting or self.swapped or self.prefilling or self.running)

    def enter(self) -> Iterator[tuple[RequestState, CachedSequence | None]]:
        """Sequences to admit now, oldest first, each with a kept prefix of its prompt or None; each leaves its queue
        when the next is asked for. Pages must be free beside those of the prompts and one for each running sequence.
        """
        while True:
            queue: list[RequestState] | deque[RequestState] = self.swapped or self.waiting
            taken = sum(state.rows - 1 for state in self.prefilling) + self._prefixes.num_unused_rows
            if not queue or queue[0].rows + taken > self._model.num_free_rows:
                return
            state, prefix = queue[0], None
            if state.swapped is None and not state.request.score_prompt:
                prompt = state.request.prompt_tensor
                state.keys = state.keys or self._prefixes.keys(prompt)
                prefix = self._prefixes.find(state.keys, len(prompt) - 1)
            length = len(state.request.prompt_tensor)
            if state.launched and state.swapped is not None:
                length = state.swapped.length + 1
            missing = self._model.pages.pages_of(length) - (len(prefix.table.pages) if prefix else 0)
            missing += self._pages_of_prompts() + sum(map(_needs_pages, self.running))
            while missing > self._model.pages.num_free:
                if not self._prefixes.drop(but=prefix):
                    return
            yield state, prefix
            del queue[0]

    def short_of_pages(self, states: list[RequestState]) -> bool:
        """Whether a token more for each of these needs more pages than are free, even without kept prefixes."""
        pages = self._model.pages
        needed = pages_for_one_more(pages, (state.cached.table for state in states if state.cached is not None))
        while needed + self._pages_of_prompts() > pages.num_free:
            if not self._prefixes.drop():
                return True
        return False

    def _pages_of_prompts(self) -> int:
        """Pages that the prompts that are prefilled still need."""
        return sum(state.cached.table.missing(state.prompt_left) for state in self.prefilling if state.cached)

    def next_prompt(self) -> RequestState | None:
        """The prompt to prefill next: in turn the oldest and the one with the fewest tokens left."""
        if not self.prefilling:
            return None
        self._shortest_next = not self._shortest_next
        if self._shortest_next:
            return min(self.prefilling, key=lambda state: state.prompt_left)
        return self.prefilling[0]

    def youngest(self) -> RequestState:
        """The youngest sequence in the caches."""
        return max(self.prefilling[-1:] + self.running[-1:], key=lambda state: state.age)

    def swap_out(self, state: RequestState) -> None:
        """Move a sequence to the host; it is the next to enter of its age."""
        assert state.cached is not None
        state.swapped, state.cached = self._model.swap_out(state.cached), None
        (self.running if state.launched else self.prefilling).remove(state)
        insort(self.swapped, state, key=_AGE)

    def enqueue(self, state: RequestState) -> None:
        """Count a sequence in the caches among those that run, or whose prompts are prefilled."""
        insort(self.running if state.launched else self.prefilling, state, key=_AGE)

    def drop(self, request: Request) -> list[RequestState]:
        """Take a request's sequences out of all queues; those that were taken."""
        dropped = []
        for queue in (self.waiting, self.swapped, self.prefilling, self.running):
            mine = [state for state in queue if state.request is request]
            for state in mine:
                queue.remove(state)
            dropped += mine
        return dropped


def _needs_pages(state: RequestState) -> bool:
    """Whether a sequence in the caches may need more pages before it ends."""
    assert state.cached is not None
    table = state.cached.table
    return table.missing(state.request.longest - table.length) > 0
