"""`trifocal sparsify`: a dense model made sparse, taught, trained to follow the dense one, and measured."""

import gc
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
import tyro

from trifocal.cli.convert import check_source
from trifocal.cli.flags import parse_arguments
from trifocal.cli.output import printable, try_next, unwinding_signals, writing
from trifocal.data import DataConfig
from trifocal.data.loader import read_validation
from trifocal.distributed.processes import rank_and_size
from trifocal.doctor.measured import Need, need_of
from trifocal.errors import UserError
from trifocal.evaluation.layers import layers_by_harm
from trifocal.evaluation.measure import OK
from trifocal.fields import check_at_least
from trifocal.ops import Geometry
from trifocal.paths import read_json, shell_path, user_path
from trifocal.report import write_report
from trifocal.runlog import read_metrics
from trifocal.runlog.progress import duration
from trifocal.runlog.run import read_run
from trifocal.runlog.whole_files import write_whole
from trifocal.train.checkpoint.export import WEIGHTS, weights_step
from trifocal.train.checkpoint.folders import checkpoint_step, list_checkpoints
from trifocal.train.checkpoint.pretrained import find_gguf, open_pretrained
from trifocal.train.config.check import choose_device
from trifocal.train.config.load import load_config
from trifocal.train.config.toml import to_literal
from trifocal.train.run_folder import LOCK_FILE, RunLock, remove_folder

RECORD = "sparsify.json"
_STEPS = "steps"
_LONGEST_ROWS = 8192
# Steps that teach the index before its recall is looked at.
_LEG = 60
# The recall stands still where the second half of a leg is at most this much above the first.
_STILL = 0.003
_REMEDIES = ("--train.micro_batch_size ", "--train.activation_checkpointing ", "--parallel.mode ")
_CHECKPOINTS = 4


@dataclass(frozen=True, kw_only=True)
class SparsifyArguments:
    """Make a dense model sparse in one command: convert it, teach its index, train it to follow the dense model, and
    measure both. Each step is an ordinary command, which is shown; the same command again continues where it ended.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The dense model, as for `trifocal convert`: a Hugging Face folder, a run, a folder of weights, or a GGUF."""
    output: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder of the sparse model, with report.html and the folders of the steps in steps/."""
    data: tuple[str, ...]
    """Text to train and measure on, written as data.source: text:PATH, jsonl:PATH#field, hf:NAME#field … Several
    sources are mixed."""
    data_weights: tuple[float, ...] = ()
    """With several sources: each one's share of the tokens, like 3,1; empty: equal shares."""
    to: Literal["selected", "mix", "nsa"] = "selected"
    """The attention of the sparse layers, as for `trifocal convert`; an index chooses the blocks."""
    selected_blocks: int = 0
    """Blocks that a query reads, a quarter of them local; 0: as in `geometry`."""
    keep_dense: int = 0
    """Layers that stay dense: this many, those whose conversion changes the model most, which is measured first."""
    geometry: Geometry = field(default_factory=lambda: Geometry(num_selected_blocks=32, num_local_blocks=8))
    """Block sizes of the sparse attention."""
    sequence_length: int = 0
    """Tokens of a row in training and measuring; 0: those of the dense model, at most 8,192."""
    rows: int = 8
    """Rows in a step."""
    index_steps: int = 300
    """Steps that teach the index, at most: it ends sooner where the recall stands still."""
    steps: int = 300
    """Steps that train everything."""
    learning_rate: float = 5e-5
    """Peak learning rate of these."""
    text_weight: float = 0.0
    """Weight of the loss on the text beside the divergence from the dense model: above 0 it learns the text too."""
    validation_fraction: float = DataConfig.validation_fraction
    """Share of the documents that are held out, to measure on: by default that of any training and evaluation."""
    sequences: int = 24
    """Held-out rows to measure on."""
    seed: int = 0
    """Seed of the order of the text."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; "auto" takes all GPUs if there are some."""

    def __post_init__(self) -> None:
        check_at_least(self, "", selected_blocks=0, keep_dense=0, sequence_length=0, text_weight=0)
        check_at_least(self, "", rows=1, index_steps=1, steps=1, sequences=1, seed=0)
        if self.learning_rate <= 0:
            raise UserError(f"--learning-rate must be positive, got {self.learning_rate}")
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"--validation-fraction must lie in (0, 1), got {self.validation_fraction}")
        try:
            _ = self.blocks
        except ValueError as error:
            raise UserError(f"--selected-blocks {self.selected_blocks} is too few: {error}") from error
        if self.blocks.num_selected_blocks == self.blocks.num_initial_blocks + self.blocks.num_local_blocks:
            raise UserError(f"all {self.blocks.num_selected_blocks} blocks are initial or local ones: none is chosen")
        try:
            DataConfig(**self.text)
        except ValueError as error:
            raise UserError(f"--data: {error}") from error

    @property
    def text(self) -> dict[str, Any]:
        """Settings of the section [data]."""
        source = self.data if len(self.data) > 1 else self.data[0]
        weights = {"weights": self.data_weights} if self.data_weights else {}
        return {"source": source, **weights, "validation_fraction": self.validation_fraction}

    @property
    def blocks(self) -> Geometry:
        """The geometry, with `selected_blocks`."""
        if not self.selected_blocks:
            return self.geometry
        local = max(1, self.selected_blocks // 4)
        return replace(self.geometry, num_selected_blocks=self.selected_blocks, num_local_blocks=local)


class _Ended(Exception):
    """A step did not end; its argument is the exit status."""


def run(args: Sequence[str]) -> int:
    """Take the steps that are not done yet, and say what came out; what was done is kept where one fails."""
    options: SparsifyArguments = parse_arguments(SparsifyArguments, args, prog="trifocal sparsify")
    source, output = user_path(options.source, "DIR"), user_path(options.output, "OUT")
    check_source(source)
    if rank_and_size()[1] > 1:
        raise UserError("trifocal sparsify starts a process for each GPU itself: call it without a launcher")
    work = _Work(options, source, output)
    try:
        with work.lock:
            work.take_steps()
    except _Ended as ended:
        print(f"\nwhat was done is kept in {output}; the same command continues")
        return int(ended.args[0])
    print(work.summary())
    return 0


class _Work:
    """The steps of one call, and what is known of earlier ones."""

    def __init__(self, options: SparsifyArguments, source: Path, output: Path) -> None:
        self.options, self.source, self.output = options, source, output
        self.steps = output / _STEPS
        self.start, self.index, self.trained = (self.steps / name for name in ("converted", "index", "trained"))
        self.dense = self.steps / "dense" if find_gguf(source) else source.resolve()
        self.device = choose_device(options.device)
        self.record = _read_record(options, output)
        self.lock = RunLock()

    def take_steps(self) -> None:
        """Take each step that is not done."""
        if self.dense != self.source.resolve():
            self._take("unpack", "the dense model out of its quantisation", self._unpack)
        self.length = self._length()
        if self.options.keep_dense:
            self._take("layers", "which layers stay dense", self._choose_layers)
        self._take("convert", f"the dense model to {self.options.to}", self._convert)
        self._take("plan", "what it takes on this machine", self._plan)
        self._take("index", "the index is taught, with everything else frozen", self._teach)
        self._take("train", "everything learns to follow the dense model", self._train_all)
        self._take("measure", "both models on held-out rows", self._measure)
        self._take("finish", "weights and report", self._finish)

    def _take(self, name: str, title: str, work: Callable[[], dict[str, Any] | None]) -> None:
        done = self.record["steps"].get(name)
        if done is not None:
            print(f"{name}: done before, in {duration(done['seconds'])}", flush=True)
            return
        print(f"\n{name}: {title}", flush=True)
        with writing(self.steps, "; give another OUT"):
            self.steps.mkdir(parents=True, exist_ok=True)
            try:
                if not self.lock.holds(self.steps):
                    self.lock.acquire(self.steps)
            except UserError as error:
                raise UserError(f"another call works in {self.output}; wait for it, or end it first") from error
        self._save()
        began = time.perf_counter()
        found = work() or {}
        seconds = round(time.perf_counter() - began, 1)
        self.record["steps"][name] = {"seconds": seconds, **found}
        self._save()
        print(f"{name}: {duration(seconds)}", flush=True)

    def _save(self) -> None:
        write_whole(self.output / RECORD, json.dumps(self.record, indent=1) + "\n")

    def _length(self) -> int:
        """Tokens of a row; UserError if the blocks cover it, so that nothing is sparse, or the text is shorter."""
        found = open_pretrained(self.dense)
        length = self.options.sequence_length or min(_LONGEST_ROWS, found.sequence_length() or _LONGEST_ROWS)
        tokenizer, config = found.tokenizer(), found.config()
        layers = config.attention_of_layers.count("dense")
        if not layers:
            kinds = ", ".join(sorted(set(config.attention_of_layers)))
            raise UserError(f"{self.source} has no dense layer to make sparse: all are of the type {kinds}")
        if self.options.keep_dense >= layers:
            raise UserError(f"--keep-dense must be less than the {layers} dense layers, got {self.options.keep_dense}")
        covered = self.options.blocks.selected_tokens
        if length <= covered:
            raise UserError(
                f"the selected blocks cover {covered:,} tokens, and rows have {length:,}: nothing would be sparse; "
                "lower --selected-blocks, or raise --sequence-length"
            )
        if "convert" in self.record["steps"]:
            return length
        # Named now, not after the conversion.
        number = self.options.sequences
        rows = read_validation(
            DataConfig(**self.options.text),
            tokenizer=tokenizer,
            sequence_length=length,
            sequences=number,
            at_once=1,
            vocab_size=config.vocab_size,
        )
        repeats = [len(set(row.document_ids)) < len(row.document_ids) for row in rows]
        # Every row of a source; of a longer text, only those where it begins again.
        if any(all(repeats[first : first + number]) for first in range(0, len(rows), number)):
            raise UserError(
                f"the held-out text is shorter than a row of {length:,} tokens; give more text with --data, raise "
                "--validation-fraction, or lower --sequence-length"
            )
        longest = max(length if row.cu_seqlens is None else int(row.cu_seqlens.diff().max()) for row in rows)
        if longest <= covered:
            raise UserError(
                f"the selected blocks cover {covered:,} tokens, and the longest held-out document has {longest:,}: "
                "nothing would be sparse; give longer documents with --data, or lower --selected-blocks"
            )
        return length

    def _unpack(self) -> None:
        remove_folder(self.dense)
        _command("convert", str(self.source), str(self.dense), "--to", "dense")

    def _choose_layers(self) -> dict[str, Any]:
        options = self.options
        harm = layers_by_harm(self.dense, options.to, options.blocks, options.text, self.length, self.device, _say)
        _free_gpu()
        kept = sorted(sorted(harm, key=lambda layer: -harm[layer])[: options.keep_dense])
        print(f"layers that stay dense: {', '.join(map(str, kept))}")
        return {"divergence_of_layers": harm, "dense_layers": kept}

    def _convert(self) -> None:
        remove_folder(self.start)
        geometry = [
            word
            for name, value in asdict(self.options.blocks).items()
            for word in (f"--geometry.{name.replace('_', '-')}", str(value))
        ]
        kept = self.record["steps"].get("layers", {}).get("dense_layers", [])
        layers = ["--dense-layers", ",".join(map(str, kept))] if kept else []
        words = [str(self.dense), str(self.start), "--to", self.options.to, "--chooser", "index", *layers, *geometry]
        _command("convert", *words)

    def _settings(self) -> dict[str, Any]:
        """What the trainings have in common, by key."""
        options, gpu = self.options, self.device.type == "cuda"
        return {
            **{f"data.{name}": value for name, value in options.text.items()},
            "data.seed": options.seed,
            "run.device": options.device,
            "train.sequence_length": self.length,
            "train.global_batch_size": options.rows,
            "train.micro_batch_size": options.rows,
            "train.precision": "bf16" if gpu else "fp32",
            "train.compile": gpu,
            "evaluate.interval_steps": 0,
            "evaluate.sequences": options.sequences,
            "checkpoint.keep_last": 1,
            "log.interval_steps": 2,
            "log.telemetry_interval_steps": 0,
        } | self.record["steps"].get("plan", {}).get("settings", {})

    def _settings_of_all(self, first: Path) -> dict[str, Any]:
        options = self.options
        return self._settings() | {
            "model.from": str(first),
            "distill.from": str(self.dense),
            "distill.text_weight": options.text_weight,
            "train.steps": options.steps,
            "optimizer.learning_rate": options.learning_rate,
            "schedule.warmup_steps": min(20, options.steps // 5),
            "evaluate.interval_steps": options.steps,
            "checkpoint.interval_steps": max(1, options.steps // _CHECKPOINTS),
            "run.directory": str(self.trained),
        }

    def _plan(self) -> dict[str, Any]:
        """Measure two steps of the training of everything, with less memory until they fit; say what all will take."""
        settings: dict[str, Any] = {}
        while True:
            need = need_of("sparsify", load_config(None, self._settings_of_all(self.start) | settings))
            if not need.problem:
                break
            remedy = next((one for one in need.remedies if one.startswith(_REMEDIES)), "")
            if not remedy or need.data:
                raise UserError(need.problem)
            print(f"{need.problem}: {remedy}", flush=True)
            flag, _, value = remedy.partition(" ")
            settings[flag.removeprefix("--")] = int(value) if value.isdecimal() else value
        print(_forecast(need, self.options, self.output), flush=True)
        return {"settings": settings, "processes": need.processes, "step_seconds": need.step_seconds}

    def _teach(self) -> dict[str, Any]:
        settings = self._settings() | {
            "model.from": str(self.start),
            "train.only": "chooser",
            "train.choice_loss_sample": 1.0,
            "optimizer.learning_rate": 1e-3,
            "schedule.warmup_steps": 5,
            # It has no end that is known before.
            "schedule.minimum_factor": 1.0,
            "checkpoint.interval_steps": 0,
            "run.directory": str(self.index),
        }
        end = 0
        while end < self.options.index_steps:
            end = min(end + _LEG, self.options.index_steps)
            self._train(self.index, settings, end)
            before, after = recalls(self.index, end, _LEG)
            if after - before < _STILL:
                break
        return {"taught_steps": end, "recall": after}

    def _train_all(self) -> None:
        self._train(self.trained, self._settings_of_all(self.index), self.options.steps)

    def _train(self, folder: Path, settings: dict[str, Any], steps: int) -> None:
        """Train up to a step, from the newest checkpoint, if any; also where only the last weights are missing."""
        done = _steps_done(folder)
        if done < steps or weights_step(folder / WEIGHTS) != done:
            if done:
                words = ["--resume", str(folder), "--train.steps", str(max(done, steps))]
            else:
                with RunLock() as lock:
                    if folder.exists():
                        # Processes of a call that was killed may still train there.
                        lock.acquire(folder)
                    remove_folder(folder)
                given = settings | {"train.steps": steps}
                words = [word for name, value in given.items() for word in (f"--{name}", *_words(value))]
            _command("train", *words, processes=self.record["steps"]["plan"]["processes"])
        if _steps_done(folder) < steps:
            raise _Ended(1)

    def _measure(self) -> dict[str, Any]:
        sizes = ["--sequence-length", str(self.length), "--sequences", str(self.options.sequences)]
        words = [str(self.trained), "--only", "loss", "position", "choice", *sizes, "--device", self.options.device]
        _command("evaluate", *words, "--beside", str(self.dense))
        rows = read_run(self.trained).evaluations[-1]["rows"]
        # A row for each source.
        losses = [row for row in rows if row["task"] == "loss"]
        targets = sum(row["targets"] for row in losses)
        names = ("loss", "beside_loss", "divergence", "agreement")
        found = {name: sum(row[name] * row["targets"] for row in losses) / targets for name in names}
        recalls_of_layers = defaultdict(list)
        for row in rows:
            # A source of short documents has no choice.
            if row["task"] == "choice" and row["status"] == OK:
                recalls_of_layers[row["layer"]].append(row["recall"])
        return found | {"recall_of_layers": [fmean(recalls) for recalls in recalls_of_layers.values()]}

    def _finish(self) -> None:
        """The weights in OUT itself, as second names of the same files where the file system has them."""
        weights = self.trained / WEIGHTS
        for path in sorted(weights.iterdir(), key=lambda path: path.name == "config.json"):
            target = self.output / path.name
            target.unlink(missing_ok=True)
            try:
                os.link(path, target)
            except OSError:
                shutil.copyfile(path, target)
        if importlib.util.find_spec("plotly") is None:
            report = f"trifocal report {shell_path(self.trained)} --output {shell_path(self.output / 'report.html')}"
            print(f"no report without plotly: pip install 'trifocal[report]' && {report}")
        else:
            write_report([self.trained], self.output / "report.html")

    def summary(self) -> str:
        """What came out, and what to do with it."""
        steps, path = self.record["steps"], shell_path(self.output)
        found, recall = steps["measure"], steps["measure"]["recall_of_layers"]
        change = found["loss"] / found["beside_loss"] - 1
        total = duration(sum(step["seconds"] for step in steps.values()))
        lines = [
            f"\n{self.output} after {total}:",
            f"  loss {found['loss']:.4f}, dense {found['beside_loss']:.4f} ({change:+.2%})",
            f"  divergence from the dense model {found['divergence']:.4f} nats, same likeliest token "
            f"{found['agreement']:.2%}",
        ]
        if recall:
            lines.append(f"  recall of the choice {min(recall):.3f} to {max(recall):.3f} by layer")
        report = {"see both on one page": f"{path}/report.html"} if (self.output / "report.html").exists() else {}
        weights = ",".join(map(str, self.options.data_weights))
        text = shlex.join(self.options.data) + (f" --data.weights {weights}" if weights else "")
        text += f" --train.sequence_length {self.length}"
        advice = {
            "talk to it": f"trifocal serve {path}",
            **report,
            "train on": f"trifocal train --model.from {path} --data.source {text}",
        }
        return printable("\n".join([*lines, try_next(advice)]))


def _read_record(options: SparsifyArguments, output: Path) -> dict[str, Any]:
    """The record of OUT, or a new one; UserError if OUT has something else, or was begun with other options."""
    given = json.loads(json.dumps(asdict(options)))
    # It may be called from another folder.
    del given["output"]
    given["source"] = str(user_path(options.source, "DIR").resolve())
    if (output / RECORD).is_file():
        record = read_json(output / RECORD)
        before = record.get("options")
        if not isinstance(before, dict) or not isinstance(record.get("steps"), dict):
            raise UserError(f"{output / RECORD} is damaged; give a new folder")
        changed = [name for name in given if before.get(name, given[name]) != given[name]]
        if changed and record["steps"]:
            flag = "DIR" if changed[0] == "source" else f"--{changed[0].replace('_', '-')}"
            raise UserError(
                f"{output} was begun with another {flag} ({RECORD} has it); repeat that command to continue it, or "
                "give a new folder"
            )
        return {"options": given, "steps": record["steps"]}
    # The disk may have been full before there was a record.
    own = {output / _STEPS, output / _STEPS / LOCK_FILE}
    if output.exists() and (not output.is_dir() or any(path not in own for path in output.rglob("*"))):
        raise UserError(f"{output} exists already; give a new folder")
    return {"options": given, "steps": {}}


def recalls(folder: Path, end: int, leg: int) -> tuple[float, float]:
    """Recall of the choice in the two halves of the last `leg` steps up to a step of a run, mean over its layers."""
    halves: tuple[list[float], list[float]] = ([], [])
    for row in read_metrics(folder / "metrics.jsonl", "train"):
        if end - leg < row["step"] <= end:
            halves[row["step"] > end - leg / 2].extend(filter(None, row["choice_recall"]))
    before, after = (sum(half) / len(half) if half else 0.0 for half in halves)
    return before, after


def _steps_done(folder: Path) -> int:
    found = list_checkpoints(folder / "checkpoints")
    return checkpoint_step(found[-1]) if found else 0


def _words(value: Any) -> list[str]:
    """A value as words behind its flag."""
    values = value if isinstance(value, tuple) else (value,)
    return [one if isinstance(one, str) else to_literal(one) for one in values]


def _command(name: str, *words: str, processes: int = 1) -> None:
    """Show a command, and do what it does: here, or with torchrun in several processes."""
    print(printable(f"  trifocal {name} {shlex.join(words)}"), flush=True)
    if processes == 1:
        # What to do next is said once, at the end of all.
        quiet = {} if name == "evaluate" else {"advise": False}
        status = int(importlib.import_module(f"trifocal.cli.{name}").run(words, **quiet))
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
        with unwinding_signals(), subprocess.Popen([*launcher, "-m", "trifocal", name, *words]) as child:
            # The processes save, and end; Ctrl-C in a terminal reaches them too.
            try:
                child.wait()
            except KeyboardInterrupt:
                pass
            except SystemExit:
                child.terminate()
            status = child.wait()
    if status:
        raise _Ended(status)
    _free_gpu()


def _free_gpu() -> None:
    """Free what a step left: parts of a training refer to one another, and code may be compiled only a few times."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()


def _forecast(need: Need, options: SparsifyArguments, output: Path) -> str:
    """What the trainings take, from two measured steps of the slower one."""
    seconds, most = need.step_seconds or 0.0, options.steps + options.index_steps
    free = shutil.disk_usage(output).free
    lines = [
        f"device  {need.device}" + (f", {need.processes} processes" if need.processes > 1 else ""),
        f"model   {need.parameters / 1e6:,.1f} M parameters; a step takes {(need.peak_bytes or 0) / 2**30:,.1f} GiB "
        f"of {(need.memory_bytes or 0) / 2**30:,.1f}",
        f"time    {seconds:.2f} s a step of everything, {duration(options.steps * seconds)} for {options.steps} steps; "
        f"with at most {options.index_steps} faster ones of the index, up to {duration(most * seconds)}",
        f"disk    {2 * need.disk_bytes / 1e9:,.1f} GB at most, {free / 1e9:,.1f} GB are free",
    ]
    return "\n".join(f"  {line}" for line in lines)


def _say(text: str) -> None:
    print(f"  {text}", flush=True)
