"""Which sequences are in the caches: who enters, who must leave for a while, in the order of their age."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from trifocal.generate.cached_model import CachedModel, CachedSequence, SwappedSequence
from trifocal.generate.pages import pages_for_one_more
from trifocal.generate.request import Request
from trifocal.generate.sampler import Sampling
from trifocal.generate.text_stream import TextStream


@dataclass(eq=False)
class Job:
    """A sequence on its way: it waits, goes through its prompt, runs, may be swapped out, and ends.

    Attributes:
        request: The request.
        age: Grows with every new job: the youngest has the largest.
        sampling: The request's, with the seed of this sample.
        sample: Which continuation of the request.
        cached: Its place in the caches while it is there.
        swapped: Its caches on the host while it is swapped out.
        place: Its place in the batch while it takes part in steps.
        logits: Of its prompt's last token, until its first tokens are drawn.
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
    """Keeps jobs in order of age, and counts pages and rows for them.

    One job at a time goes through its prompt. Nobody enters before an older one, so that each gets its turn.

    Args:
        model: Whose pages and rows are shared out.

    Attributes:
        waiting: Not yet in the caches.
        swapped: On the host, oldest first.
        prefilling: The job that goes through its prompt, if there is one.
        running: Those that draw tokens, oldest first.
    """

    def __init__(self, model: CachedModel) -> None:
        self._model = model
        self.waiting: deque[Job] = deque()
        self.swapped: list[Job] = []
        self.prefilling: Job | None = None
        self.running: list[Job] = []

    @property
    def idle(self) -> bool:
        """Whether no job is left."""
        return not (self.waiting or self.swapped or self.prefilling or self.running)

    def enter(self) -> Iterator[Job]:
        """Jobs that may enter now, oldest first; each leaves its queue once it has entered, when the next is asked for.

        A job enters if its pages are free and every running one that needs more can still get one, so that it need not
        leave again at once.
        """
        while self.prefilling is None:
            queue: list[Job] | deque[Job] = self.swapped or self.waiting
            if not queue or queue[0].rows > self._model.num_free_rows:
                return
            missing = self._model.pages.pages_of(self._places(queue[0]))
            spare = sum(map(_needs_pages, self.running))
            if missing + spare > self._model.pages.num_free:
                return
            yield queue[0]
            del queue[0]

    def short_of_pages(self, jobs: list[Job]) -> bool:
        """Whether a token more for each of these needs more pages than are free and not meant for a prompt."""
        pages = self._model.pages
        needed = pages_for_one_more(pages, (job.cached.table for job in jobs if job.cached is not None))
        if self.prefilling is not None and self.prefilling.cached is not None:
            table = self.prefilling.cached.table
            needed += table.missing(len(self.prefilling.request.prompt) - table.length)
        return needed > pages.num_free

    def youngest(self) -> Job:
        """The youngest job in the caches."""
        return self.prefilling or self.running[-1]

    def swap_out(self, job: Job) -> None:
        """Move a job to the host; it is the next to enter of its age."""
        assert job.cached is not None
        job.swapped, job.cached = self._model.swap_out(job.cached), None
        if job is self.prefilling:
            self.prefilling = None
        else:
            self.running.remove(job)
        self.swapped.append(job)
        self.swapped.sort(key=lambda job: job.age)

    def run(self, job: Job) -> None:
        """Count a job among those that run."""
        self.running.append(job)
        self.running.sort(key=lambda job: job.age)

    def _places(self, job: Job) -> int:
        """Tokens that a job needs pages for to go on."""
        if job.launched:
            assert job.swapped is not None
            return job.swapped.length + 1
        return len(job.request.prompt)


def _needs_pages(job: Job) -> bool:
    """Whether a job in the caches may need more pages before it ends."""
    assert job.cached is not None
    table = job.cached.table
    return table.missing(job.request.longest - table.length) > 0
