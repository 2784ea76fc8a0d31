"""Continuous batching: requests come and go, all that run take one step together, finished ones make room at once.

```python
engine = Engine(CachedModel(model, max_sequences=8, max_length=4096), tokenizer)
completions = engine.complete([Request(prompt=tokens, max_new_tokens=100) for tokens in prompts])
```
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from trifocal.data import Tokenizer
from trifocal.generate.cached_model import CachedModel
from trifocal.generate.request import Completion, FinishReason, Request, Update, token_tensor
from trifocal.generate.sampler import NO_TOKEN
from trifocal.generate.scheduler import Job, Scheduler
from trifocal.generate.step_runner import Drawn, StepRunner
from trifocal.generate.text_stream import TextStream

# A token's text may depend on so many tokens before it.
_NEIGHBOURS = 32


class RequestTooLong(ValueError):
    """A request that could never run.

    Attributes:
        fits: Tokens, prompt and new ones together, that would fit.
    """

    def __init__(self, request: Request, fits: int) -> None:
        name = f"{request.name}: " if request.name else ""
        super().__init__(
            f"{name}a prompt of {len(request.prompt):,} tokens with {request.max_new_tokens:,} new ones is too long: "
            f"together {fits:,} fit"
        )
        self.fits = fits


class Engine:
    """Runs requests on a model with caches.

    The tokens of a sequence do not depend on what else runs, nor on whether it had to leave the caches for a while.

    Args:
        model: The model; all of its sequences are the engine's.
        tokenizer: For text and stop strings.
        record: Whether steps are recorded as CUDA graphs; without effect on a CPU.
    """

    def __init__(self, model: CachedModel, tokenizer: Tokenizer | None = None, *, record: bool = True) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._runner = StepRunner(model, record=record)
        self._scheduler = Scheduler(model)
        self._ages = itertools.count()
        # Steps that are queued, and whose token each place holds.
        self._outstanding: deque[tuple[Drawn, list[tuple[int, Job]]]] = deque()
        # Read, and not returned yet: a step that fails returns nothing.
        self._updates: list[Update] = []
        # The host reads a step while the GPU computes the next.
        self._steps_ahead = 0 if model.device.type == "cpu" else 1

    @property
    def idle(self) -> bool:
        """Whether every request has ended, and every update was returned."""
        return self._scheduler.idle and not self._updates

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._scheduler.waiting)

    def submit(self, *requests: Request) -> None:
        """Queue requests; each begins when there is room.

        Raises:
            RequestTooLong: If one can never fit; none is queued.
            ValueError: If a token is outside of the vocabulary, there are more samples than sequences fit, or stop
                strings come without a tokenizer; none is queued.
        """
        for request in requests:
            self._check(request)
        self._scheduler.waiting += [self._job(request, 0) for request in requests]

    def _check(self, request: Request) -> None:
        token_tensor(request.name or "the prompt", request.prompt, "[T]", self._model.config.vocab_size)
        # The last drawn token is never read, and needs no place.
        fits = min(self._model.max_length, self._model.pages.num_pages * self._model.pages.page_size)
        if request.longest > fits:
            raise RequestTooLong(request, fits + 1)
        if request.samples > self._model.max_sequences:
            raise ValueError(f"{request.samples} samples at a time were asked for, {self._model.max_sequences} fit")
        if request.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer")

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Let requests in, run a chunk of a prompt, add a token to each running sequence; updates since the last call.

        A sequence's first token is returned before its second is begun.
        """
        self._enter()
        if self._scheduler.prefilling is not None and self._prefill(self._scheduler.prefilling):
            self._read_down_to(0)
        else:
            self._launch()
            self._read_down_to(self._steps_ahead)
        updates, self._updates = self._updates, []
        return updates

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Update]:
        """Submit requests and work until all have ended, those of earlier calls too; updates as they come."""
        self.submit(*requests)
        while not self.idle:
            yield from self.step()

    def complete(self, requests: Iterable[Request]) -> list[Completion]:
        """Finished sequences in the order of the requests and their samples.

        Requests of earlier calls that have not ended, such as one that was interrupted, end too; theirs are left out.
        """
        requests = list(requests)
        order = {id(request): number for number, request in enumerate(requests)}
        ended = (update.completion for update in self.run(requests) if update.completion is not None)
        found = [completion for completion in ended if id(completion.request) in order]
        return sorted(found, key=lambda completion: (order[id(completion.request)], completion.sample))

    def _job(self, request: Request, sample: int) -> Job:
        seed = (request.sampling.seed + sample) % 2**64
        stream = None
        if self._tokenizer is not None:
            stream = TextStream(self._tokenizer, list(request.prompt[-_NEIGHBOURS:]), request.stop)
        return Job(request, next(self._ages), replace(request.sampling, seed=seed), sample, stream=stream)

    def _enter(self) -> None:
        for job in self._scheduler.enter():
            cached = self._model.admit() if job.swapped is None else self._model.swap_in(job.swapped)
            if job.launched:
                try:
                    job.place = self._runner.place(cached, job.sampling, [*job.request.prompt, *job.tokens])
                except BaseException:
                    self._model.free(cached)
                    raise
                self._scheduler.run(job)
            else:
                self._scheduler.prefilling = job
            job.cached, job.swapped = cached, None

    def _prefill(self, job: Job) -> bool:
        """One chunk of a prompt; after the last one, draw the first token of every sample."""
        assert job.cached is not None
        prompt, begin = job.request.prompt, job.cached.length
        if job.logits is None:
            chunk = torch.as_tensor(prompt[begin : begin + self._model.prefill_chunk_size], dtype=torch.int64)
            logits = self._model.prefill_chunk(job.cached, chunk.to(self._model.device))
            if job.cached.length < len(prompt):
                return False
            job.logits = logits
        jobs, drawn = [job], []
        try:
            for sample in range(1, job.request.samples):
                jobs.append(self._job(job.request, sample))
                jobs[-1].cached = self._model.fork(job.cached)
            for each in jobs:
                assert each.cached is not None
                each.place = self._runner.place(each.cached, each.sampling, prompt)
                drawn.append((self._runner.draw_first(each.place, job.logits), [(0, each)]))
        except BaseException:
            for each in jobs:
                self._leave_batch(each)
            for each in jobs[1:]:
                if each.cached is not None:
                    self._model.free(each.cached)
            raise
        self._scheduler.prefilling = job.logits = None
        self._outstanding += drawn
        for each in jobs:
            each.launched = 1
            self._scheduler.run(each)
            self._leave_batch_if_launched(each)
        return True

    def _launch(self) -> None:
        """Queue a step of all that run."""
        while self._scheduler.short_of_pages(self._active()):
            if self._outstanding:
                # A sequence may have ended by now; and of one that leaves, the host must know every token.
                self._read_down_to(0)
                continue
            youngest = self._scheduler.youngest()
            self._scheduler.swap_out(youngest)
            self._leave_batch(youngest)
        active = self._active()
        if not active:
            self._read_down_to(0)
            return
        grown: list[Job] = []
        try:
            for job in active:
                self._grow(job)
                grown.append(job)
            moved = self._runner.move_together([place for job in active if (place := job.place) is not None])
            for job in active:
                assert job.place is not None
                job.place = moved.get(job.place, job.place)
            places = [(job.place, job) for job in active if job.place is not None]
            self._outstanding.append((self._runner.run([place for place, _ in places]), places))
        except BaseException:
            for job in grown:
                assert job.cached is not None
                job.cached.table.shrink(1)
            raise
        for job in active:
            job.launched += 1
            self._leave_batch_if_launched(job)

    def _active(self) -> list[Job]:
        """Those that take part in the next step."""
        return [job for job in self._scheduler.running if job.place is not None]

    def _grow(self, job: Job) -> None:
        assert job.cached is not None and job.place is not None
        table = job.cached.table
        before = len(table.pages)
        copies = table.grow(1)
        if copies:
            self._model.cache.copy_pages(copies)
            before -= 1
        self._runner.set_pages(job.place, table.pages, before)

    def _leave_batch_if_launched(self, job: Job) -> None:
        """A sequence whose last token is queued takes part in no further step."""
        if job.launched == job.request.max_new_tokens:
            self._leave_batch(job)

    def _leave_batch(self, job: Job) -> None:
        if job.place is not None:
            self._runner.remove(job.place)
            job.place = None

    def _read_down_to(self, count: int) -> None:
        """Read queued steps, oldest first, until so many are left."""
        while len(self._outstanding) > count:
            drawn, places = self._outstanding[0]
            tokens, log_p = drawn.read()
            self._outstanding.popleft()
            # A sequence that has ended took part in one more step, whose token is dropped.
            self._updates += [self._take(job, tokens[place], log_p[place]) for place, job in places if not job.ended]

    def _take(self, job: Job, token: int, log_p: float) -> Update:
        """Count a token in, and end the sequence if it is its last."""
        request = job.request
        if token == NO_TOKEN:
            text = job.stream.end() if job.stream is not None else ""
            job.text += text
            return Update(request, job.sample, None, log_p, text, self._end(job, "error"))
        job.tokens.append(token)
        job.log_probabilities.append(log_p)
        reason: FinishReason | None = None
        text = ""
        if token in request.stop_tokens:
            reason = "stop"
        elif job.stream is not None:
            text = job.stream.add(token)
            if job.stream.stopped:
                reason = "stop"
        if reason is None and len(job.tokens) == request.max_new_tokens:
            reason = "length"
        if reason is not None and job.stream is not None:
            text += job.stream.end()
            if job.stream.stopped:
                reason = "stop"
        job.text += text
        return Update(request, job.sample, token, log_p, text, None if reason is None else self._end(job, reason))

    def _end(self, job: Job, reason: FinishReason) -> Completion:
        assert job.cached is not None
        job.ended = True
        self._leave_batch(job)
        self._scheduler.running.remove(job)
        # A queued step may still write into these pages; their next owner writes after it.
        self._model.free(job.cached)
        job.cached = None
        return Completion(job.request, job.sample, job.tokens, job.log_probabilities, job.text, reason)
