"""`trifocal evaluate`: what a trained model can do."""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from trifocal._version import __version__
from trifocal.cli.console import SafeConsole
from trifocal.cli.flags import ModelArguments, parse_arguments
from trifocal.cli.output import check_output, printable, write_file, writing
from trifocal.cli.threads import Threads
from trifocal.data import DataConfig, Tokenizer
from trifocal.errors import UserError
from trifocal.evaluation.grade import read_grade_set
from trifocal.evaluation.measure import OK, USUAL_TASKS, Plan, ReportProgress, Sizes, Task, evaluate_model, not_possible
from trifocal.evaluation.record import to_json, write_evaluation
from trifocal.evaluation.ruler import RULER_INSTALL, RULER_TASKS, possible_tasks
from trifocal.evaluation.subject import Subject
from trifocal.fields import check_at_least
from trifocal.models import DecoderLM, parameter_count
from trifocal.models.io import CONFIG_FILE as MODEL_CONFIG_FILE
from trifocal.paths import shell_path
from trifocal.train.checkpoint.pretrained import Pretrained, open_pretrained, pretrained_path
from trifocal.train.config.check import choose_device

_NO_COLUMNS = ("task", "length", "status", "source")
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_LINE_SECONDS = 5.0
_WIDE = 10_000
_TITLES = {
    "loss": "Loss on validation data, nats per token",
    "position": "Loss by position in the document, nats per token",
    "choice": "Recall of the choice: its mass of full attention on free blocks, as a share of the exact choice's",
    "choice_distance": "The same by distance, in tokens back; above 1 where the exact choice takes less",
    "needle": "Needles found, by depth",
    "recall": "Recall of values by their key",
    "recall_distance": "Recall by distance of the key, in tokens",
    "grade": "Grade: bits for each byte of texts that anybody can make from packages",
    "ruler": "RULER: share of the references found, with its standard error",
}


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments(Sizes, ModelArguments):
    """Measure a trained model: loss, loss by position, recall of the choice, needles, associative recall.

    A table is shown, and the figures go into evaluation/ of the run's folder, where trifocal report finds them.
    """

    only: tuple[Task, ...] = ()
    """Some of loss, position, choice, needle, recall, ruler, grade; by default those that make sense for the model,
    without the last two."""
    source: str = ""
    """Other data than it was trained on, written as data.source: builtin, text:PATH, needle:4, recall:64 …"""
    grade_set: str = "grade"
    """The folder with the packages of the grade's texts; the error without it says how to get them."""
    beside: str = ""
    """A model of the same tokenizer to compare the loss with, such as the dense one before a conversion: its loss, the
    divergence (KL) from it, and how often both have the same likeliest token."""
    validation_fraction: float = 0.0
    """Share of the text's documents that are held out; 0: as in training, or data.validation_fraction's default."""
    output: str = ""
    """Another file for the figures, as JSON; needed for weights without a run."""

    def __post_init__(self) -> None:
        check_at_least(self, "", sequence_length=0, sequences=0, depths=1, samples=1)
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"--validation-fraction must lie in [0, 1), got {self.validation_fraction}")
        for name in ("lengths", "pairs"):
            if any(value < 1 for value in getattr(self, name)):
                raise UserError(f"--{name} must be above 0, got {min(getattr(self, name))}")


def run(args: Sequence[str]) -> int:
    """Measure, show a table, and write the figures; those that were measured too where the rest fails."""
    options: EvaluateArguments = parse_arguments(EvaluateArguments, args, prog="trifocal evaluate")
    check_output(options.output)
    path = pretrained_path(options.path, "RUN_DIR")
    threads = Threads(choose_device(options.device))
    found = open_pretrained(path, options.checkpoint)
    subject = _subject(found, options)
    step = found.step()
    for block in subject.model.blocks:
        block.register_forward_pre_hook(lambda *_: threads.say())
    plan = _plan(subject, options)
    if found.run is None and not options.output:
        print("note: the figures are not kept: these weights belong to no run; --output FILE.json keeps them")
    console = SafeConsole(file=sys.stdout, soft_wrap=not sys.stdout.isatty())
    rows: list[dict[str, Any]] = []
    try:
        for row in evaluate_model(subject, plan, _progress()):
            rows.append(row)
            if row["status"] != OK:
                console.print(f"{row['task']}, {row['length']:,} tokens: {row['status']}")
    except FloatingPointError as error:
        raise UserError(f"{found.path}: {error}; choose an earlier checkpoint") from error
    finally:
        if any(row["status"] == OK for row in rows):
            for table in _tables(rows, console):
                console.print("", table)
            _write(found, options, _head(subject, step, options.beside), rows)
    if all(row["status"] != OK for row in rows):
        raise UserError("nothing was measured, for the reasons above; give other --lengths or --sequence-length")
    return 0


def _head(subject: Subject, step: int | None, beside: str) -> dict[str, Any]:
    """What the file says of the model and the machine."""
    return {
        "step": step,
        "attention": ", ".join(dict.fromkeys(subject.model.config.attention_of_layers)),
        "parameters": parameter_count(subject.model.config),
        "source": "" if subject.data is None else subject.data.name,
        "trained_length": subject.trained_length,
        "precision": subject.precision,
        "device": torch.cuda.get_device_name() if subject.device.type == "cuda" else "CPU",
        "version": __version__,
        "beside": beside,
    }


def _subject(found: Pretrained, options: EvaluateArguments) -> Subject:
    device = choose_device(options.device)
    data = None if found.run is None else found.run.data
    if options.source:
        data = (data or DataConfig()).only(options.source)
    if options.validation_fraction and data is not None:
        data = replace(data, validation_fraction=options.validation_fraction)
    model = found.model().to(device).eval()
    # Weights of another type than fp32 decide the type of the products, whatever their run had.
    dtype = model.embedding.weight.dtype
    precision = _PRECISIONS[found.dtype(device) if dtype == torch.float32 else dtype]
    tokenizer = found.tokenizer()
    beside = _beside(options.beside, tokenizer, device) if options.beside else None
    return Subject(model, tokenizer, data, found.run, device, precision, found.sequence_length(), beside)


def _beside(folder: str, tokenizer: Tokenizer, device: torch.device) -> DecoderLM:
    """The model of --beside; UserError if its tokens are others."""
    found = open_pretrained(pretrained_path(folder, "--beside"))
    if found.tokenizer().fingerprint != tokenizer.fingerprint:
        raise UserError(f"--beside {folder} has another tokenizer: its tokens cannot be compared")
    return found.model().to(device).eval()


def _plan(subject: Subject, options: EvaluateArguments) -> Plan:
    """The tasks that make sense; says which do not. UserError if none does, or a length is not known."""
    reasons = {task: not_possible(task, subject.data, subject.model.config) for task in options.only or USUAL_TASKS}
    tasks = tuple(task for task, reason in reasons.items() if not reason)
    if not tasks:
        raise UserError(f"nothing to measure: {'; '.join(dict.fromkeys(reasons.values()))}")
    for task, reason in reasons.items():
        if reason:
            print(printable(f"{task} is left out: {reason}"))
    ruler_tasks = possible_tasks(options.ruler_tasks) if "ruler" in tasks else []
    left_out = [name for name in RULER_TASKS if ruler_tasks and not options.ruler_tasks and name not in ruler_tasks]
    if left_out:
        print(f"left out of RULER: {', '.join(left_out)}; they need {RULER_INSTALL}")
    length = options.sequence_length or subject.trained_length or max(options.lengths, default=None)
    if length is None:
        raise UserError("the length of its training sequences is not known; give --sequence-length")
    sizes = {size.name: getattr(options, size.name) for size in fields(Sizes)}
    sizes |= {"sequence_length": length, "ruler_tasks": tuple(ruler_tasks)}
    return Plan(tasks=tasks, grade=read_grade_set(options.grade_set) if "grade" in tasks else {}, **sizes)


def _progress() -> ReportProgress:
    """A line for each task and length, and every few seconds how far it is."""
    last = time.monotonic()

    def say(text: str, detail: str = "") -> None:
        nonlocal last
        if not detail or time.monotonic() - last >= _LINE_SECONDS:
            last = time.monotonic()
            print(f"{text}{detail}", flush=True)

    return say


def _tables(rows: Sequence[dict[str, Any]], console: Console) -> Iterator[Table]:
    """A table of each task's figures, turned where the console is too narrow and that helps; of needles, a column for
    each depth.
    """
    for task, title in _TITLES.items():
        own = [row for row in rows if row["task"] == task and row["status"] == OK]
        if task == "needle":
            # The rows of a length come one after the other.
            own = [
                {"length": length, "source": source, **{f"{row['depth']:.0%}": row["accuracy"] for row in found}}
                for (length, source), found in itertools.groupby(own, lambda row: (row["length"], row["source"]))
            ]
        if own:
            several = len({row["source"] for row in own}) > 1
            names = [name for name in own[0] if name not in _NO_COLUMNS or (several and name == "source")]
            heads = ["tokens", *(name.replace("_", " ") for name in names)]
            cells = [[f"{row['length']:,}", *(_cell(row.get(name)) for name in names)] for row in own]
            [first, *rest] = zip(heads, *cells, strict=True)
            table, turned = _table(title, heads, cells), _table(title, first, rest)
            wide = console.options.update(max_width=_WIDE)
            least = console.measure(table, options=wide).minimum
            turns = least > console.width and least > console.measure(turned, options=wide).minimum
            yield turned if turns else table


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    # Only heads of several words are narrowed, or rich would cut a word where another head could take a second line.
    columns = (Column(head, no_wrap=" " not in head) for head in heads)
    table = Table(*columns, title=title, title_justify="left", show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


def _write(found: Pretrained, options: EvaluateArguments, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if options.output:
        write_file(options.output, to_json(head, rows))
        print(printable(f"\nwritten: {options.output}"))
    elif found.run is not None:
        # A checkpoint lies in RUN/checkpoints, weights in RUN/weights.
        folder = found.path.parent if (found.path / MODEL_CONFIG_FILE).is_file() else found.path.parent.parent
        with writing(folder / "evaluation", "; name another file with --output FILE.json"):
            path = write_evaluation(folder, head, rows)
        print(printable(f"\nwritten: {path}"))
        print(f"the curves, on the page of the run: trifocal report {shell_path(folder)}")
