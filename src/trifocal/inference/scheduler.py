"""Which sequences are in the caches: which enter and which are swapped out, in the order of their age."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from trifocal.inference.cached_model import CachedModel, CachedSequence, SwappedSequence
from trifocal.inference.pages import pages_for_one_more
from trifocal.inference.request import Request
from trifocal.inference.sampler import Sampling
from trifocal.inference.text_stream import TextStream


@dataclass(eq=False)
class RequestState:
    """A sequence on its way: it waits, goes through its prompt, runs, may be swapped out, and ends.

    Attributes:
        request: The request.
        age: Grows with every new sequence: the youngest has the largest.
        sampling: The request's, with the seed of this sample.
        sample: Which continuation of the request.
        cached: Its place in the caches while it is there.
        swapped: Its caches on the host while it is swapped out.
        place: Its place in the batch while it takes part in steps.
        logits: Logits of its prompt's last token, until its first tokens are drawn.
        launched: Tokens whose draw is queued.
        tokens, log_probabilities: What the host knows of them.
        text: Text so far.
        stream: Makes text of tokens; None without a tokenizer.
        ended: Whether it has its last token.
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
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    text: str = ""
    stream: TextStream | None = None
    ended: bool = False

    @property
    def rows(self) -> int:
        """Sequences that it becomes: those of its samples while it is in its prompt."""
        return 1 if self.launched else self.request.samples


class Scheduler:
    """Keeps sequences in order of age, and counts pages and rows for them.

    First come, first served; one prompt at a time is prefilled.

    Args:
        model: Whose pages and rows are shared out.

    Attributes:
        waiting: Not yet in the caches.
        swapped: On the host, oldest first.
        prefilling: The sequence whose prompt is prefilled, if there is one.
        running: Sequences that draw tokens, oldest first.
    """

    def __init__(self, model: CachedModel) -> None:
        self._model = model
        self.waiting: deque[RequestState] = deque()
        self.swapped: list[RequestState] = []
        self.prefilling: RequestState | None = None
        self.running: list[RequestState] = []

    @property
    def idle(self) -> bool:
        """Whether no sequence is left."""
        return not (self.waiting or self.swapped or self.prefilling or self.running)

    def enter(self) -> Iterator[RequestState]:
        """Sequences to admit now, oldest first; each leaves its queue once it is admitted, when the next is asked for.

        A sequence is admitted if its pages are free and every running one that needs more can still get one, so that
        it is not swapped out again at once.
        """
        while self.prefilling is None:
            queue: list[RequestState] | deque[RequestState] = self.swapped or self.waiting
            if not queue or queue[0].rows > self._model.num_free_rows:
                return
            missing = self._model.pages.pages_of(self._places(queue[0]))
            spare = sum(map(_needs_pages, self.running))
            if missing + spare > self._model.pages.num_free:
                return
            yield queue[0]
            del queue[0]

    def short_of_pages(self, states: list[RequestState]) -> bool:
        """Whether a token more for each of these needs more pages than are free and not meant for a prompt."""
        pages = self._model.pages
        needed = pages_for_one_more(pages, (state.cached.table for state in states if state.cached is not None))
        if self.prefilling is not None and self.prefilling.cached is not None:
            table = self.prefilling.cached.table
            needed += table.missing(len(self.prefilling.request.prompt) - table.length)
        return needed > pages.num_free

    def youngest(self) -> RequestState:
        """The youngest sequence in the caches."""
        return self.prefilling or self.running[-1]

    def swap_out(self, state: RequestState) -> None:
        """Move a sequence to the host; it is the next to enter of its age."""
        assert state.cached is not None
        state.swapped, state.cached = self._model.swap_out(state.cached), None
        if state is self.prefilling:
            self.prefilling = None
        else:
            self.running.remove(state)
        self.swapped.append(state)
        self.swapped.sort(key=lambda state: state.age)

    def run(self, state: RequestState) -> None:
        """Count a sequence among those that run."""
        self.running.append(state)
        self.running.sort(key=lambda state: state.age)

    def _places(self, state: RequestState) -> int:
        """Tokens that a sequence needs pages for to go on."""
        if state.launched:
            assert state.swapped is not None
            return state.swapped.length + 1
        return len(state.request.prompt)


def _needs_pages(state: RequestState) -> bool:
    """Whether a sequence in the caches may need more pages before it ends."""
    assert state.cached is not None
    table = state.cached.table
    return table.missing(state.request.longest - table.length) > 0
