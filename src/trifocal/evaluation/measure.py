"""All tasks of an evaluation, one after another."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from trifocal.data import Batch, DataConfig
from trifocal.data.data_config import SourceName
from trifocal.data.loader import read_validation
from trifocal.data.sources.synthetic import check_recall, needle_vocabulary, task_size
from trifocal.errors import UserError
from trifocal.evaluation.grade import measure_grade
from trifocal.evaluation.needles import measure_needles
from trifocal.evaluation.position_loss import measure_loss
from trifocal.evaluation.recall import measure_recall
from trifocal.evaluation.ruler import RulerName, mean_of_tasks, measure_ruler
from trifocal.evaluation.subject import Subject, TooShort
from trifocal.models import ModelConfig
from trifocal.runlog.progress import duration
from trifocal.telemetry.attention_telemetry import AttentionTelemetry
from trifocal.train.step.micro_batch import autocast

Task = Literal["loss", "position", "choice", "needle", "recall", "ruler", "grade"]
TASKS: tuple[Task, ...] = get_args(Task)
USUAL_TASKS: tuple[Task, ...] = tuple(task for task in TASKS if task not in ("ruler", "grade"))
"""Those that are measured unless others are named."""
OK = "ok"
_SHORTEST_NEEDLE = 64
_CHOICE_SEQUENCES = 16
# Without a run, whose evaluations have a number.
_SEQUENCES = 16


ReportProgress = Callable[..., None]
"""Shows a line; one with a second text, a detail, repeats a line that was shown without."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of tasks; also flags of `trifocal evaluate`."""

    sequence_length: int = 0
    """Tokens of a sequence of loss, position and recall, also longer than in training; 0: as in training."""
    sequences: int = 0
    """Sequences of loss and position; 0: as many tokens as in the run's own evaluations, 16 sequences without a run."""
    lengths: tuple[int, ...] = ()
    """Tokens of the haystacks, like 4096,16384; by default an eighth, a quarter, a half and all of sequence_length."""
    depths: int = 5
    """Places of the needle, evenly from the beginning to the end."""
    samples: int = 8
    """Haystacks for each length and depth, rows for each number of pairs, prompts for each task of RULER, which takes
    500."""
    ruler_tasks: tuple[RulerName, ...] = ()
    """Tasks of RULER, like niah_single_1,vt; by default all generated ones whose packages are installed."""
    chat: bool = False
    """Give the prompts of RULER as messages of a chat, by the tokenizer's template."""
    pairs: tuple[int, ...] = ()
    """Pairs in a row of recall; by default those of the source, a half and a quarter."""


@dataclass(frozen=True, kw_only=True)
class Plan(Sizes):
    """Possible tasks of an evaluation, with their sizes; and the documents of the grade by part."""

    tasks: tuple[str, ...]
    grade: Mapping[str, list[str]] = field(default_factory=dict)

    def needle_lengths(self) -> list[int]:
        """Lengths of haystacks, the shortest first."""
        whole = self.sequence_length
        parts = [whole // 8, whole // 4, whole // 2]
        return sorted(set(self.lengths)) or [*(part for part in parts if part >= _SHORTEST_NEEDLE), whole]

    def needle_depths(self) -> list[float]:
        """Depths of needles."""
        return [index / max(self.depths - 1, 1) for index in range(self.depths)]

    def recall_pairs(self, source: SourceName) -> list[int]:
        """Numbers of pairs, the smallest first."""
        own = task_size(source, self.sequence_length)
        return sorted(set(self.pairs) or {max(own // 4, 1), max(own // 2, 1), own})


def not_possible(task: str, data: DataConfig | None, config: ModelConfig) -> str:
    """Why a task makes no sense with these data, None if they are not known, and this model; empty if it does."""
    if task == "choice" and (config.selection == "random" or not config.chooses_blocks):
        return "no layer chooses blocks"
    if task == "ruler":
        return config.undecodable
    if task == "grade":
        return "" if data is None or data.has_text else f'data.source "{data.name}" is no text'
    if data is None:
        return "the data of its training are not known; name some with --source"
    kind = data.parts[0].parsed.kind
    if task == "recall" and kind != "recall":
        return f'data.source "{data.name}" has no keys and values to recall'
    if task == "needle" and not data.has_text and kind != "needle":
        return f'data.source "{data.name}" has neither text nor needles'
    return ""


def evaluate_model(subject: Subject, plan: Plan, say: ReportProgress) -> Iterator[dict[str, Any]]:
    """Measure all that was planned: rows of figures with `task`, `length` and `status`, "ok" or why it was not
    measured. FloatingPointError if the model's output is not finite.
    """
    left = TimeLeft(planned_tokens(subject, plan))
    for length in plan.needle_lengths() if "ruler" in plan.tasks else ():
        found: list[dict[str, Any]] = []
        for name in plan.ruler_tasks:
            say(f"ruler: {name}, {plan.samples} prompts of {length:,} tokens{left.words()}")
            measure = measure_ruler(subject, name, length, plan.samples, chat=plan.chat)
            for row in _guarded(subject, "ruler", length, measure):
                found.append(row)
                yield row
            left.add(plan.samples * length)
        yield from mean_of_tasks(found)
    if "grade" in plan.tasks:
        yield from _guarded(subject, "grade", plan.sequence_length, _grade_rows(subject, plan, say))
    for data in () if subject.data is None else subject.data.parts:
        yield from _evaluate_source(replace(subject, data=data), data.parsed, plan, say, left)


def _evaluate_source(
    subject: Subject, source: SourceName, plan: Plan, say: ReportProgress, left: "TimeLeft"
) -> Iterator[dict[str, Any]]:
    """The rows of the tasks that need text, for a subject whose data are one source."""
    # Before the hours of the others.
    vocab_size = subject.model.config.vocab_size
    if "recall" in plan.tasks:
        check_recall(plan.recall_pairs(source)[-1], vocab_size=vocab_size, sequence_length=plan.sequence_length)
    if "needle" in plan.tasks and source.kind == "needle":
        needles = task_size(source, 0)
        needed = needle_vocabulary(needles)
        if needed > vocab_size:
            raise UserError(
                f"data.source needle: {needles} needles need a model.vocab_size of {needed}, got {vocab_size}"
            )
    if {"loss", "position"} & set(plan.tasks):
        yield from _guarded(subject, "loss", plan.sequence_length, _loss_rows(subject, plan, say, left))
    if "choice" in plan.tasks:
        say("choice: its recall, by layer and by distance")
        batches = _batches(subject, plan, at_once=1)[:_CHOICE_SEQUENCES]
        yield from _guarded(subject, "choice", plan.sequence_length, _choice_rows(subject, batches))
    if "needle" in plan.tasks:
        for length in plan.needle_lengths():
            text = f"needle: {plan.depths * plan.samples} haystacks of {length:,} tokens"
            say(text + left.words())
            measure = measure_needles(subject, length, plan.needle_depths(), plan.samples)
            for done, row in enumerate(_guarded(subject, "needle", length, measure), start=1):
                left.add(plan.samples * length)
                say(text, f", evaluating {done}/{plan.depths}{left.words()}")
                yield row
    if "recall" in plan.tasks:
        for pairs in plan.recall_pairs(source):
            say(f"recall: {plan.samples} rows of {plan.sequence_length:,} tokens with {pairs:,} pairs{left.words()}")
            measure = measure_recall(subject, plan.sequence_length, pairs, plan.samples)
            yield from _guarded(subject, "recall", plan.sequence_length, measure)
            left.add(plan.samples * plan.sequence_length)


class TimeLeft:
    """The time left of all tokens, by those so far; longer sequences, which take longer a token, come last."""

    def __init__(self, tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokens, self._done = tokens, 0
        self._clock, self._began = clock, clock()

    def add(self, tokens: int) -> None:
        """Note tokens that are done."""
        self._done += tokens

    def words(self) -> str:
        """`, about 0:42 left`; empty before the first tokens are done."""
        if not self._done:
            return ""
        seconds = (self._clock() - self._began) * max(0, self._tokens - self._done) / self._done
        return f", about {duration(seconds)} left"


def planned_tokens(subject: Subject, plan: Plan) -> int:
    """Tokens of everything that is planned."""
    length = plan.sequence_length
    of_ruler = len(plan.ruler_tasks) * plan.samples * sum(plan.needle_lengths()) if "ruler" in plan.tasks else 0
    if subject.data is None:
        return of_ruler
    parts = subject.data.parts
    of_loss = _sequences(subject, plan) * length * len(parts)
    of_needles = plan.depths * plan.samples * sum(plan.needle_lengths()) * len(parts)
    pairs = plan.recall_pairs(parts[0].parsed) if "recall" in plan.tasks else []
    of_loss *= bool({"loss", "position"} & set(plan.tasks))
    return of_ruler + of_loss + of_needles * ("needle" in plan.tasks) + plan.samples * length * len(pairs)


def _sequences(subject: Subject, plan: Plan) -> int:
    """Sequences for loss and position."""
    run = subject.run
    own = _SEQUENCES if run is None else run.evaluate.sequences * run.train.sequence_length // plan.sequence_length
    return plan.sequences or max(1, own)


def _loss_rows(subject: Subject, plan: Plan, say: ReportProgress, left: TimeLeft) -> Iterator[dict[str, Any]]:
    assert subject.data is not None
    run, held_out = subject.run, ""
    # As many tokens at once as in training.
    at_once = 1 if run is None else run.train.evaluated_at_once * run.train.sequence_length // plan.sequence_length
    batches = _batches(subject, plan, at_once=at_once)
    if subject.data.has_text and not subject.data.validation_split:
        held_out = f", {subject.data.validation_fraction:.3g} of it held out"
    if passes := batches[-1].epochs[0]:
        held_out += f", read {passes + 1:,} times"
    number = _sequences(subject, plan)
    name = rows_name(batches)
    text = f"loss: {number} sequences of {plan.sequence_length:,} tokens of {subject.data.name}{held_out}, rows {name}"
    say(text)

    def on_batch(done: int) -> None:
        left.add(batches[0].tokens.numel())
        say(text, f", evaluating {done}/{len(batches)}{left.words()}")

    rows = measure_loss(subject, batches, on_batch)
    yield from ({**row, "rows": name} if row["task"] == "loss" else row for row in rows if row["task"] in plan.tasks)


def _grade_rows(subject: Subject, plan: Plan, say: ReportProgress) -> Iterator[dict[str, Any]]:
    text = f"grade: {', '.join(plan.grade)}, windows of {plan.sequence_length:,} tokens"
    say(text)
    yield from measure_grade(
        subject, plan.grade, plan.sequence_length, lambda share: say(text, f", {share:.0%} of it done")
    )


def rows_name(batches: Sequence[Batch]) -> str:
    """A name of the rows of batches, however they are cut: equal names, equal tokens and targets."""
    digest = hashlib.sha256()
    for batch in batches:
        for row in torch.stack((batch.tokens, batch.targets), dim=1):
            digest.update(row.numpy().tobytes())
    return digest.hexdigest()[:8]


def _choice_rows(subject: Subject, batches: Sequence[Batch]) -> Iterator[dict[str, Any]]:
    """Recall of the choice, mean over the first sequences of batches: a row `choice` for each layer, then one
    `choice_distance` for each distance, `first` <= tokens back < `end`, at which the exact choice finds something.
    """
    telemetry = AttentionTelemetry(subject.model)
    measured = []
    with autocast(subject.device, subject.precision):
        for batch in batches:
            figures = telemetry.figures(batch.tokens[:1].to(subject.device), cu_seqlens=batch.cu_seqlens)
            if not figures["choice_recall"].isnan().any():
                measured.append(figures)
    length = batches[0].tokens.shape[1]
    if not measured:
        raise TooShort(f"no query of {length:,} tokens has more free blocks than it chooses")

    def mean(name: str) -> torch.Tensor:
        return torch.stack([figures[name] for figures in measured]).mean(0)

    recalls = mean("choice_recall").tolist(), mean("recall_by_chance").tolist()
    for layer, recall, chance in zip(telemetry.layers, *recalls, strict=True):
        yield {"task": "choice", "length": length, "layer": layer, "recall": recall, "recall_by_chance": chance}
    exact, held = (mean(f"{name}_mass_by_distance").mean(0).tolist() for name in ("exact", "held"))
    block = subject.model.config.geometry.selection_block_size
    for number, (exact_mass, held_mass) in enumerate(zip(exact, held, strict=True)):
        if exact_mass > 0:
            first, end = block * (2**number // 2), block * 2**number
            figures = {"first": first, "end": end, "exact_mass": exact_mass, "recall": held_mass / exact_mass}
            yield {"task": "choice_distance", "length": length, **figures}


def _batches(subject: Subject, plan: Plan, *, at_once: int) -> list[Batch]:
    assert subject.data is not None
    return read_validation(
        subject.data,
        tokenizer=subject.tokenizer,
        sequence_length=plan.sequence_length,
        sequences=_sequences(subject, plan),
        at_once=max(1, at_once),
        vocab_size=subject.model.config.vocab_size,
    )


def _guarded(subject: Subject, task: str, length: int, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a task, which are measured as they are asked for; one with a reason where a length is too short, or
    does not fit in memory.
    """
    source = "" if subject.data is None or task in ("ruler", "grade") else subject.data.name
    reason = subject.lacks_memory(length)
    try:
        if not reason:
            for row in rows:
                if not all(math.isfinite(row.get(name) or 0.0) for name in ("loss", "answer_loss", "bits_per_byte")):
                    raise FloatingPointError("the model's output is not finite: its weights are broken")
                yield {**row, "source": source, "status": OK}
    except TooShort as error:
        reason = str(error)
    except torch.OutOfMemoryError:
        reason = f"{subject.device} has no memory for it"
    if reason:
        yield {"task": task, "length": length, "source": source, "status": f"not run: {reason}"}
