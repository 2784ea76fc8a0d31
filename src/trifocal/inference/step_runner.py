"""The next token of a whole batch: its state on the device, and one recorded step for each size of batch.

A sequence has a place in the batch, `0 <= place < max_sequences`. A step runs the first places, up to the next power of
two; a place without a sequence is padding. Everything that a step needs and changes (lengths, last tokens, settings)
stays on the device, so that the host can start a step before it knows the tokens of the one before. It knows the
lengths, and has steps recorded that leave out what no sequence needs: a choice while all blocks are chosen, the
compression of blocks where none ends.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trifocal.inference.cached_model import CachedModel, CachedSequence
from trifocal.inference.recorded_work import RecordedWork
from trifocal.inference.request import MAX_LIKELIEST, TokenScore
from trifocal.inference.sampler import Sampling, SamplingTensors, draw_step
from trifocal.ops import DecodeBatch
from trifocal.ops.decode.caches import MAX_NEW_TOKENS as NEW
from trifocal.ops.decode.caches import SparseCache
from trifocal.ops.devices import to_device

MAX_DRAFTS = 4
"""Sequences whose next tokens are guessed: with more, a step of eight tokens takes too long."""


class SampledTokens(NamedTuple):
    """Tokens on their way to the host: token and log-probability of each place, [places, 2], fp64, and maybe the
    likeliest behind them. `arrived` is recorded behind the copy; None on a CPU.
    """

    values: Tensor
    arrived: "torch.cuda.Event | None"

    def read(self) -> list[tuple[int, TokenScore]]:
        """Token and score of each place, waited for."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found = []
        # Every token of every sequence passes here: most have no likeliest ones.
        for token, log_probability, *likeliest in self.values.tolist():
            pairs = zip(map(int, likeliest[::2]), likeliest[1::2], strict=True) if likeliest else ()
            found.append((int(token), TokenScore(log_probability, list(pairs))))
        return found


class StepKind(NamedTuple):
    """Which launches a step needs, in the words of `DecodeBatch`."""

    takes_all: bool
    ends_block: bool


WHOLE_STEP = StepKind(takes_all=False, ends_block=True)
"""A step with every launch, which is right for any lengths."""


class StepRunner:
    """Runs decoding steps of a batch, recorded as CUDA graphs on a GPU; the first step of each size runs unrecorded."""

    def __init__(self, model: CachedModel) -> None:
        self._model, self._device = model, model.device
        count = model.max_sequences

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self._rows, self._lengths, self._num_new = numbers(count), numbers(count), numbers(count)
        self._block_table = numbers(count, model.most_pages)
        self._tokens = numbers(count, dtype=torch.int64)
        self._settings = SamplingTensors.empty(count, model.config.vocab_size, model.device)
        self._drawn = numbers(count, 2, dtype=torch.float64)
        self._likeliest = numbers(count, min(MAX_LIKELIEST, model.config.vocab_size), 2, dtype=torch.float64)
        self._free = list(range(count - 1, -1, -1))
        self._drafts, self._draft_lengths = numbers(MAX_DRAFTS, NEW, dtype=torch.int64), numbers(MAX_DRAFTS)
        self._draft_drawn = numbers(MAX_DRAFTS * NEW, 2, dtype=torch.float64)
        self._draft_likeliest = numbers(MAX_DRAFTS * NEW, *self._likeliest.shape[1:], dtype=torch.float64)
        # What the draw of each place needs: the filters, the likeliest tokens.
        self._needs: dict[int, tuple[bool, bool]] = {}
        self._graphs = RecordedWork(model.device)
        # Keys whose first step has run, a whole one, which compiles what a later one may need.
        self._begun: set[tuple[int, bool, bool, bool]] = set()
        # Tokens in the caches of each place.
        self._held: dict[int, int] = {}
        sparse = [cache for cache in model.cache.layers if isinstance(cache, SparseCache)]
        self._chooses, self._compresses = bool(sparse), any(cache.k_cmp is not None for cache in sparse)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run and record the steps of every batch size, and what they may leave out; no sequence has a place yet."""
        takes_all = (False, True) if self._chooses else (False,)
        ends_block = (True, False) if self._compresses else (True,)
        sizes = sorted({self._size(count + 1) for count in range(self._model.max_sequences)})
        for size, *kind in itertools.product(sizes, takes_all, ends_block):
            # The first compiles, the second is recorded.
            for _ in range(2):
                self._record((size, False, False, False), StepKind(*kind), partial(self._step, size, (False, False)))

    @torch.inference_mode()
    def place(
        self, sequence: CachedSequence, sampling: Sampling, tokens: Sequence[int], *, likeliest: bool = False
    ) -> int:
        """Give a sequence a place; its next token is drawn from `draw_first`, or follows `tokens[-1]`. Its caches hold
        all tokens but the last drawn one; only a repetition penalty needs more than the last one here.
        """
        place = min(self._free)
        pages = sequence.table.pages
        self._rows[place : place + 1].fill_(sequence.row)
        self._lengths[place : place + 1].fill_(sequence.length)
        self._num_new[place : place + 1].fill_(1)
        self._block_table[place, : len(pages)].copy_(to_device(torch.tensor(pages, dtype=torch.int32), self._device))
        self._tokens[place : place + 1].fill_(tokens[-1])
        seen = None
        if sampling.repetition_penalty != 1:
            seen = to_device(torch.tensor(tokens, dtype=torch.int64), self._device)
        self._settings.set_row(place, sampling, seen)
        # Last: a place that cannot be prepared stays free.
        self._free.remove(place)
        self._needs[place], self._held[place] = (sampling.filters, likeliest), sequence.length
        return place

    @torch.inference_mode()
    def remove(self, place: int) -> None:
        """Give a place back."""
        self._num_new[place : place + 1].zero_()
        del self._needs[place], self._held[place]
        self._free.append(place)

    @torch.inference_mode()
    def set_pages(self, place: int, pages: Sequence[int], first: int) -> None:
        """Tell a place its pages from number `first` on."""
        for index in range(first, len(pages)):
            self._block_table[place, index : index + 1].fill_(pages[index])

    @torch.inference_mode()
    def move_together(self, places: Sequence[int]) -> dict[int, int]:
        """Move sequences to lower places if a smaller step then takes them all; old places and new ones."""
        moved: dict[int, int] = {}
        occupied = sorted(places)
        while occupied and self._size(occupied[-1] + 1) > self._size(len(occupied)):
            source, target = occupied.pop(), min(self._free)
            for x in (self._rows, self._lengths, self._num_new, self._block_table, self._tokens):
                x[target].copy_(x[source])
            self._settings.copy_row(source, target)
            self._free.remove(target)
            self._needs[target], self._held[target] = self._needs[source], self._held[source]
            self.remove(source)
            moved[source] = target
            occupied = sorted([*occupied, target])
        return moved

    @torch.inference_mode()
    def draw_first(self, place: int, logits: Tensor) -> SampledTokens:
        """Draw a sequence's first token from the logits of its prompt's last one, [1, vocab_size]."""
        here, needs = slice(place, place + 1), self._needs[place]
        self._draw_here(here, logits, None, needs)
        values = self._host_values(1, needs)
        return self._fetch(values, self._drawn[here], self._likeliest[here])

    @torch.inference_mode()
    def run(self, places: Sequence[int]) -> SampledTokens:
        """One step of all sequences that have a place; `places`: which ones they are."""
        size = self._size(max(places) + 1)
        needs = self._needs_of(places)
        # Before the step, so that nothing changes if there is no memory.
        values = self._host_values(size, needs)
        kind = self._kind(dict.fromkeys(places, 1))
        self._record((size, *needs, False), kind, partial(self._step, size, needs))
        for place in places:
            self._held[place] += 1
        return self._fetch(values, self._drawn[:size], self._likeliest[:size])

    @torch.inference_mode()
    def run_drafts(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, list[tuple[int, TokenScore]]]:
        """Draw what follows each token of a draft: the last token of a sequence and a guess of those behind it, up to
        eight. Returns tokens and scores by place; the caller says with `accept` how many count.
        """
        size, needs = self._size(max(drafts) + 1), self._needs_of(drafts)
        rows = [drafts.get(place, ()) for place in range(size)]
        padded = torch.tensor([[*row, *[0] * (NEW - len(row))] for row in rows])
        self._drafts[:size].copy_(to_device(padded, self._device))
        self._draft_lengths[:size].copy_(
            to_device(torch.tensor([len(row) for row in rows], dtype=torch.int32), self._device)
        )
        values = self._host_values(size * NEW, needs)
        kind = self._kind({place: len(draft) for place, draft in drafts.items()})
        self._record((size, *needs, True), kind, partial(self._step_of_drafts, size, needs))
        found = self._fetch(values, self._draft_drawn[: size * NEW], self._draft_likeliest[: size * NEW]).read()
        return {place: found[place * NEW : place * NEW + len(draft)] for place, draft in drafts.items()}

    @torch.inference_mode()
    def accept(self, place: int, length: int, token: int) -> None:
        """Set how many tokens of a sequence the caches hold after drafts, and the last drawn one."""
        self._lengths[place : place + 1].fill_(length)
        self._tokens[place : place + 1].fill_(token)
        self._held[place] = length

    def _kind(self, num_new: Mapping[int, int]) -> StepKind:
        """The kind of a step in which places get these numbers of new tokens."""
        geometry = self._model.config.geometry
        spans = [(self._held[place], self._held[place] + new) for place, new in num_new.items()]
        return StepKind(
            self._chooses and all(end <= geometry.selected_tokens for _, end in spans),
            not self._compresses
            or any(geometry.num_compressed_blocks(begin) < geometry.num_compressed_blocks(end) for begin, end in spans),
        )

    def _needs_of(self, places: Iterable[int]) -> tuple[bool, bool]:
        filtered, likeliest = zip(*(self._needs[place] for place in places), strict=True)
        return any(filtered), any(likeliest)

    def _record(self, key: tuple[int, bool, bool, bool], kind: StepKind, work: Callable[[StepKind], None]) -> None:
        if key not in self._begun:
            kind = WHOLE_STEP
            self._begun.add(key)
        self._graphs.run((key, kind), lambda: work(kind))

    def _step(self, size: int, needs: tuple[bool, bool], kind: StepKind) -> None:
        """Append the last tokens, draw the next ones, grow by one; queued on the device, without a host look."""
        here = slice(size)
        batch = DecodeBatch(self._rows[here], self._lengths[here], self._num_new[here], self._block_table[here], *kind)
        logits = self._model.step(self._tokens[here, None], batch)[:, 0]
        # The lengths grow with the draw, so that a step that fails before can be run again.
        self._draw_here(here, logits, self._num_new[here], needs)

    def _step_of_drafts(self, size: int, needs: tuple[bool, bool], kind: StepKind) -> None:
        here = slice(size)
        batch = DecodeBatch(
            self._rows[here], self._lengths[here], self._draft_lengths[here], self._block_table[here], *kind
        )
        logits = self._model.step(self._drafts[here], batch).flatten(0, 1)
        rows = self._settings.rows(here)
        settings = SamplingTensors(**{name: x.repeat_interleave(NEW, 0) for name, x in vars(rows).items()})
        behind = torch.arange(1, NEW + 1, dtype=torch.int32, device=self._device)
        lengths, tokens = (self._lengths[here, None] + behind).flatten(), torch.zeros_like(self._drafts[here]).flatten()
        drawn, likeliest = self._draft_drawn[: size * NEW], self._draft_likeliest[: size * NEW]
        _draw(logits, settings, lengths, None, tokens, drawn, likeliest, needs)

    def _draw_here(self, here: slice, logits: Tensor, num_new: Tensor | None, needs: tuple[bool, bool]) -> None:
        _draw(
            logits, self._settings.rows(here), self._lengths[here], num_new, self._tokens[here], self._drawn[here],
            self._likeliest[here], needs,
        )  # fmt: skip

    def _host_values(self, count: int, needs: tuple[bool, bool]) -> Tensor:
        width = 2 + needs[1] * self._likeliest[0].numel()
        return torch.empty(count, width, dtype=self._drawn.dtype, pin_memory=self._device.type == "cuda")

    def _fetch(self, values: Tensor, drawn: Tensor, likeliest: Tensor) -> SampledTokens:
        values[:, :2].copy_(drawn, non_blocking=True)
        if values.shape[1] > 2:
            values[:, 2:].copy_(likeliest.flatten(1), non_blocking=True)
        if self._device.type == "cpu":
            return SampledTokens(values, None)
        arrived = torch.cuda.Event()
        arrived.record()
        return SampledTokens(values, arrived)

    def _size(self, count: int) -> int:
        """The batch size of a step for `count` places."""
        return min(1 << (count - 1).bit_length(), self._model.max_sequences)


def _draw(
    logits: Tensor,
    settings: SamplingTensors,
    lengths: Tensor,
    num_new: Tensor | None,
    tokens: Tensor,
    drawn: Tensor,
    likeliest: Tensor,
    needs: tuple[bool, bool],
) -> None:
    """`draw_step`, and the likeliest tokens of each row, [B, n, 2], where they are needed."""
    filtered, wants_likeliest = needs
    if wants_likeliest:
        best = logits.topk(likeliest.shape[1])
    draw_step(logits, settings, lengths, num_new, tokens, drawn, filtered=filtered)
    if wants_likeliest:
        # Relative to the drawn token, so that it has the same log-probability in both.
        log_p = (best.values - logits.gather(1, tokens[:, None])).double() + drawn[:, 1:]
        torch.stack((best.indices.double(), log_p), dim=-1, out=likeliest)
