"""Continuous batching: requests come and go, all that run take one step together, finished ones make room at once.

```python
engine = Engine(CachedModel(model, max_sequences=8, max_length=4096), tokenizer)
completions = engine.complete([Request(prompt=tokens, max_new_tokens=100) for tokens in prompts])
```
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trifocal.data import Tokenizer
from trifocal.inference.cached_model import CachedModel, CachedSequence
from trifocal.inference.prefix_cache import PrefixCache
from trifocal.inference.prompt_lookup import PromptLookup
from trifocal.inference.request import Completion, FinishReason, Request, TokenScore, Update, token_tensor
from trifocal.inference.sampler import NO_TOKEN
from trifocal.inference.scheduler import RequestState, Scheduler
from trifocal.inference.step_runner import MAX_DRAFTS, SampledTokens, StepRunner
from trifocal.inference.text_stream import TextStream
from trifocal.ops.decode.caches import MAX_NEW_TOKENS

# Tokens of context needed to decode one token's text.
_NEIGHBOURS = 32
# A pass over a short piece of a prompt takes as long as one over this many tokens.
_PASS_TOKENS = 256
# Logits of a scored prompt at a time.
_SCORED_LOGITS = 2**26


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
        speculate: Whether up to four running sequences guess their next tokens from what followed the last ones before,
            and check eight at a time. The draws are those of one token at a time, up to rounding: a step of eight
            tokens adds up in another order.

    Attributes:
        reused_tokens: Prompt tokens served from the prefix cache.
        guessed_tokens, right_tokens: Tokens that were guessed, and those of them that were right.
    """

    def __init__(self, model: CachedModel, tokenizer: Tokenizer | None = None, *, speculate: bool = False) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._runner = StepRunner(model)
        self._prefixes = PrefixCache(model)
        self._scheduler = Scheduler(model, self._prefixes)
        self._ages = itertools.count()
        self.reused_tokens = self.guessed_tokens = self.right_tokens = 0
        # Steps that are queued, and whose token each place holds.
        self._outstanding: deque[tuple[SampledTokens, list[tuple[int, RequestState]]]] = deque()
        # Read, and not returned yet: a step that fails returns nothing.
        self._updates: list[Update] = []
        # The host reads a step while the GPU computes the next.
        self._steps_ahead = 0 if model.device.type == "cpu" or speculate else 1
        self._speculate = speculate

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
        self._scheduler.waiting += [self._state(request, 0) for request in requests]

    def cancel(self, request: Request) -> None:
        """Forget a request; its pages are free at once, and nothing more of it is returned."""
        for state in self._scheduler.drop(request):
            self._free(state)
        self._updates = [update for update in self._updates if update.request is not request]

    def _check(self, request: Request) -> None:
        token_tensor(request.name or "the prompt", request.prompt_tensor, "[T]", self._model.config.vocab_size)
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
        """Admit requests, decode one token each, prefill the tokens of a chunk; updates since the last call.

        A sequence's first token is returned before its second is begun.
        """
        # A step that failed may have left more; a guess follows tokens that the host knows.
        self._read_down_to(self._steps_ahead)
        self._enter()
        self._launch()
        self._read_down_to(0 if self._prefill() else self._steps_ahead)
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

    def warm_up(self) -> None:
        """Run chunks of prompts and the steps of every batch size, so that a GPU has compiled and recorded them."""
        self._model.warm_up_chunks()
        # The one token comes from the prompt.
        self.complete([Request(prompt=[0], max_new_tokens=1)])
        self._runner.warm_up()

    def _state(self, request: Request, sample: int) -> RequestState:
        seed = (request.sampling.seed + sample) % 2**64
        stream = None
        if self._tokenizer is not None:
            before = request.prompt_tensor[-_NEIGHBOURS:].tolist()
            # From a whole character on: some tokenizers read no character of a row of bytes that begins inside of one.
            begins = (i for i in range(min(4, len(before))) if self._tokenizer.decode(before[i:])[:1] != "\ufffd")
            stream = TextStream(self._tokenizer, before[next(begins, 0) :], request.stop)
        return RequestState(request, next(self._ages), replace(request.sampling, seed=seed), sample, stream=stream)

    def _enter(self) -> None:
        for state, prefix in self._scheduler.enter():
            if state.swapped is not None:
                cached = self._model.swap_in(state.swapped)
            elif prefix is not None:
                cached = self._model.fork(prefix)
                state.reused_tokens = cached.length
                self.reused_tokens += cached.length
            else:
                cached = self._model.admit()
            if state.launched:
                try:
                    state.place = self._place(cached, state)
                except BaseException:
                    self._model.free(cached)
                    raise
            state.cached, state.swapped = cached, None
            self._scheduler.enqueue(state)

    def _place(self, cached: CachedSequence, state: RequestState) -> int:
        prompt = state.request.prompt_tensor
        # A long list takes its time, and without a penalty only the last token is read.
        read = prompt[-1:] if state.sampling.repetition_penalty == 1 else prompt
        tokens = [*read.tolist(), *state.tokens]
        return self._runner.place(cached, state.sampling, tokens, likeliest=state.request.likeliest > 0)

    def _prefill(self) -> bool:
        """Pieces of prompts, together about as many tokens as one chunk; whether a first token is on its way."""
        budget, ended = self._model.prefill_chunk_size, False
        while budget > 0 and (state := self._scheduler.next_prompt()) is not None:
            budget -= max(self._prefill_piece(state), _PASS_TOKENS)
            ended |= state.launched > 0
        return ended

    def _prefill_piece(self, state: RequestState) -> int:
        """One piece of a prompt; after the last one, draw the first token of every sample. Returns its tokens."""
        assert state.cached is not None
        prompt, begin, size = state.request.prompt_tensor, state.cached.length, self._model.prefill_chunk_size
        scored = state.request.score_prompt
        if scored:
            size = min(size, max(1, _SCORED_LOGITS // self._model.config.vocab_size))
        if state.logits is None:
            state.logits = self._model.prefill_chunk(state.cached, prompt[begin : begin + size], all_logits=scored)
        if scored:
            # From the first token without a score: a piece is in the caches, also where its scores found no memory.
            following = prompt[len(state.prompt_scores) + 1 : state.cached.length + 1]
            state.prompt_scores += _scores(state.logits, following, state.request.likeliest)
        state.logits = None if state.prompt_left else state.logits[-1:]
        count = state.cached.length - begin
        self._prefixes.keep(state.keys, state.cached)
        if state.logits is None:
            return count
        states, drawn = [state], []
        try:
            for sample in range(1, state.request.samples):
                states.append(self._state(state.request, sample))
                states[-1].cached = self._model.fork(state.cached)
                states[-1].prompt_scores = state.prompt_scores
                states[-1].reused_tokens = state.reused_tokens
            for each in states:
                assert each.cached is not None
                each.place = self._place(each.cached, each)
                drawn.append((self._runner.draw_first(each.place, state.logits), [(0, each)]))
        except BaseException:
            for each in states:
                self._leave_batch(each)
            for each in states[1:]:
                if each.cached is not None:
                    self._model.free(each.cached)
            raise
        state.logits = None
        self._scheduler.prefilling.remove(state)
        self._outstanding += drawn
        for each in states:
            each.launched = 1
            self._scheduler.enqueue(each)
            self._leave_batch_if_launched(each)
        return count

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
        # A penalty depends on the tokens before, which a draft does not know.
        guess = len(active) <= MAX_DRAFTS and all(state.sampling.repetition_penalty == 1 for state in active)
        drafts = [self._draft(state, self._speculate and guess) for state in active]
        guesses = any(len(draft) > 1 for draft in drafts)
        grown: list[tuple[RequestState, int]] = []
        try:
            for state, draft in zip(active, drafts, strict=True):
                self._grow(state, len(draft))
                grown.append((state, len(draft)))
            moved = self._runner.move_together([place for state in active if (place := state.place) is not None])
            for state in active:
                assert state.place is not None
                state.place = moved.get(state.place, state.place)
            places = [(state.place, state) for state in active if state.place is not None]
            if guesses:
                by_place = {place: draft for (place, _), draft in zip(places, drafts, strict=True)}
                drawn = self._runner.run_drafts(by_place)
            else:
                self._outstanding.append((self._runner.run([place for place, _ in places]), places))
        except BaseException:
            for state, count in grown:
                assert state.cached is not None
                state.cached.table.shrink(count)
            raise
        if guesses:
            for place, state in places:
                self._take_draft(state, place, by_place[place], drawn[place])
            return
        for state in active:
            state.launched += 1
            self._leave_batch_if_launched(state)

    def _draft(self, state: RequestState, guess: bool) -> Sequence[int]:
        """A sequence's last token, and maybe a guess of the next ones that needs no more pages than one token."""
        if not guess:
            return state.tokens[-1:] or [0]
        assert state.cached is not None
        if state.lookup is None:
            state.lookup = PromptLookup([*state.request.prompt_tensor.tolist(), *state.tokens])
        length, pages = state.cached.length, self._model.pages
        room = pages.pages_of(length + 1) * pages.page_size - length
        left = state.request.max_new_tokens - state.launched
        return state.tokens[-1:] + state.lookup.guess(min(MAX_NEW_TOKENS, room, left) - 1)

    def _take_draft(
        self, state: RequestState, place: int, draft: Sequence[int], drawn: Sequence[tuple[int, TokenScore]]
    ) -> None:
        """Count in what was drawn, up to the first token that was guessed wrong."""
        assert state.cached is not None
        table, right = state.cached.table, 0
        for index, (token, score) in enumerate(drawn):
            self._updates.append(self._take(state, token, score))
            state.launched += 1
            if state.ended or index + 1 == len(draft) or token != draft[index + 1]:
                break
            right += 1
        self.guessed_tokens += len(draft) - 1
        self.right_tokens += right
        if state.lookup is not None and len(draft) > 1:
            state.lookup.judge(right)
        if not state.ended:
            table.shrink(len(draft) - 1 - right)
            self._runner.accept(place, table.length, token)

    def _active(self) -> list[RequestState]:
        """Sequences of the next step."""
        return [state for state in self._scheduler.running if state.place is not None]

    def _grow(self, state: RequestState, count: int) -> None:
        assert state.cached is not None and state.place is not None
        table = state.cached.table
        before = len(table.pages)
        copies = table.grow(count)
        if copies:
            self._model.cache.copy_pages(copies)
            before -= 1
        if before < len(table.pages):
            self._runner.set_pages(state.place, table.pages, before)

    def _leave_batch_if_launched(self, state: RequestState) -> None:
        """A sequence whose last token is queued takes part in no further step."""
        if state.launched == state.request.max_new_tokens:
            self._leave_batch(state)

    def _leave_batch(self, state: RequestState) -> None:
        if state.place is not None:
            self._runner.remove(state.place)
            state.place = None

    def _read_down_to(self, count: int) -> None:
        """Read queued steps, oldest first, until `count` are left."""
        while len(self._outstanding) > count:
            drawn, places = self._outstanding[0]
            rows = drawn.read()
            self._outstanding.popleft()
            # A sequence that has ended took part in one more step, whose token is dropped.
            self._updates += [self._take(state, *rows[place]) for place, state in places if not state.ended]

    def _take(self, state: RequestState, token: int, score: TokenScore) -> Update:
        """Count a token in, and end the sequence if it is its last."""
        request = state.request
        if len(score.likeliest) > request.likeliest:
            score = TokenScore(score.log_probability, score.likeliest[: request.likeliest])
        prompt_scores, state.prompt_scores = state.prompt_scores, []
        if token == NO_TOKEN:
            text = state.stream.end() if state.stream is not None else ""
            state.text += text
            return Update(request, state.sample, None, score, text, self._end(state, "error"), prompt_scores)
        state.tokens.append(token)
        if state.lookup is not None:
            state.lookup.add(token)
        state.log_probabilities.append(score.log_probability)
        reason: FinishReason | None = None
        text = ""
        if token in request.stop_tokens:
            reason = "stop"
        elif state.stream is not None:
            text = state.stream.add(token)
            if state.stream.stopped:
                reason = "stop"
        if reason is None and len(state.tokens) == request.max_new_tokens:
            reason = "length"
        if reason is not None and state.stream is not None:
            text += state.stream.end()
            if state.stream.stopped:
                reason = "stop"
        state.text += text
        completion = None if reason is None else self._end(state, reason)
        return Update(request, state.sample, token, score, text, completion, prompt_scores)

    def _end(self, state: RequestState, reason: FinishReason) -> Completion:
        self._scheduler.running.remove(state)
        self._free(state)
        return Completion(
            state.request, state.sample, state.tokens, state.log_probabilities, state.text, reason, state.reused_tokens
        )

    def _free(self, state: RequestState) -> None:
        """End a sequence that is in no queue any more."""
        state.ended = True
        self._leave_batch(state)
        if state.cached is not None:
            # A queued step may still write into these pages; their next owner writes after it.
            self._model.free(state.cached)
            state.cached = None


def _scores(logits: Tensor, tokens: Tensor, likeliest: int) -> list[TokenScore]:
    """Scores of the tokens behind the first places of a prompt's piece; logits [T, vocab_size], at most T tokens."""
    log_p = logits[: len(tokens)].log_softmax(-1)
    own = log_p.gather(1, tokens.to(log_p.device)[:, None])[:, 0].tolist()
    best = log_p.topk(min(likeliest, log_p.shape[1]))
    pairs = (list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return [TokenScore(*score) for score in zip(own, pairs, strict=True)]
