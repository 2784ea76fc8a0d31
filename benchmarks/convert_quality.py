"""The validation loss of a dense model that is made sparse and trained on for a tenth of its tokens.

    trifocal train configs/m7c_125m.toml --model.attention dense --run.directory runs/dense \\
        --data.source builtin --data.include_site_packages true --train.sequence_length 8192 \\
        --train.global_batch_size 4 --train.micro_batch_size 4 --train.activation_checkpointing none \\
        --train.steps 2000 --schedule.warmup_steps 200 --optimizer.learning_rate 6e-4 \\
        --checkpoint.interval_steps 500 --log.sample_interval_steps 0
    python benchmarks/convert_quality.py runs/dense --directory runs/converted
    python benchmarks/convert_quality.py runs/dense --directory runs/converted --to selected --label hybrid \\
        --keep-dense 3 --geometry.num_selected_blocks 32 --geometry.num_local_blocks 8
    python benchmarks/convert_quality.py runs/dense --directory runs/converted --to selected --label index \\
        --index-steps 100 --geometry.num_selected_blocks 32 --geometry.num_local_blocks 8

For each target: `trifocal convert`, then `trifocal train --model.from`, by the configuration of the dense run, on text
in another order. The dense model is trained on in the same way: without it, more training would look like a gain of
the conversion. The validation loss of all of them, and of the converted model before training, is measured on the same
text at each length.

With `--index-steps`, an index chooses the blocks. It is taught alone for so many steps, on all queries, with everything
else frozen; then it goes on learning with the rest.

`--dense-layers 0,4,8` keeps these layers dense, `--keep-dense 3` those three whose conversion alone costs the most at
the longest of the lengths.

Flags with `geometry.` go to `trifocal convert`, other flags of a section to `trifocal train`. With other flags, give a
`--label`: it is part of the names of models and of the result. Started again, the script continues: converted models,
trainings and figures are kept in the directory.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lib.results import ResultFile
from trifocal import load_model
from trifocal.data import Batch, read_validation
from trifocal.evaluation import Subject
from trifocal.evaluation.position_loss import measure_loss
from trifocal.models import DecoderLM
from trifocal.models.conversion import Target, convert_tensors, converted_config
from trifocal.ops import Geometry
from trifocal.train.checkpoint.folders import checkpoint_step, list_checkpoints
from trifocal.train.checkpoint.pretrained import open_pretrained
from trifocal.train.config.sections import RunConfig
from trifocal.train.run_folder import load_run

DENSE, DENSE_ON = "dense", "dense, trained on"
Flags = dict[str, str]
TAUGHT = {"train.choice_loss_weight": "1", "optimizer.index_lr_factor": "3"}
ALONE = {
    "train.only": "chooser", "train.choice_loss_weight": "1", "train.choice_loss_sample": "1",
    "optimizer.learning_rate": "1e-3", "optimizer.index_lr_factor": "1",
}  # fmt: skip


def command(*arguments: str) -> None:
    """Run a command of trifocal; raises if it fails."""
    print("trifocal", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "trifocal", *arguments], check=True)


def last_step(run: Path) -> int:
    """The last step that a run has saved."""
    return max((checkpoint_step(path) for path in list_checkpoints(run / "checkpoints")), default=0)


def train_on(source: Path, run: Path, dense: Path, config: RunConfig, steps: int, extra: Flags) -> None:
    """Train on from weights for some steps by the configuration of the dense run, or go on with that."""
    done = last_step(run)
    if done:
        if done < steps:
            command("train", "--resume", str(run))
        return
    flags = {
        "model.from": str(source),
        "run.directory": str(run),
        "train.steps": str(steps),
        "schedule.warmup_steps": str(max(1, steps // 10)),
        # The peak of the dense run would undo the progress of its end.
        "optimizer.learning_rate": str(config.optimizer.learning_rate / 3),
        # Another order; which documents are held out does not depend on it.
        "data.seed": str(config.data.seed + 1),
        "checkpoint.interval_steps": str(max(1, steps // 4)),
        "checkpoint.keep_last": "1",
        "checkpoint.keep_every_steps": "0",
        "evaluate.interval_steps": str(max(1, steps // 4)),
        "log.sample_interval_steps": "0",
        **extra,
    }
    overwrite = ["--overwrite"] if (run / "config.toml").exists() else []
    command("train", str(dense / "config.toml"), *(f"--{name}={value}" for name, value in flags.items()), *overwrite)


class Text:
    """The validation text of the dense run, and the loss of models on it."""

    def __init__(self, dense: Path) -> None:
        with open_pretrained(dense) as found:
            config, tokenizer = load_run(dense), found.tokenizer()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dense = load_model(dense)
        self._subject = Subject(self.dense, tokenizer, config.data, config, device, config.train.precision)
        self._config = config
        self._batches: dict[int, list[Batch]] = {}

    def measure(self, model: DecoderLM, length: int) -> dict[str, Any]:
        """The row of `trifocal evaluate` for all targets of sequences of this length."""
        config = self._config
        if length not in self._batches:
            ratio = config.train.sequence_length / length
            self._batches[length] = read_validation(
                config.data, tokenizer=self._subject.tokenizer, sequence_length=length,
                sequences=max(1, int(4 * config.evaluate.sequences * ratio)),
                at_once=max(1, int(config.train.evaluated_at_once * ratio)), vocab_size=config.model.vocab_size,
            )  # fmt: skip
        subject = replace(self._subject, model=model.to(self._subject.device).eval())
        [whole, *_] = measure_loss(subject, self._batches[length], lambda done: None)
        return whole


def losses(models: dict[str, Path], text: Text, lengths: list[int], cache: Path) -> list[dict[str, Any]]:
    """The validation loss of each model at each length, on the same text; figures in the cache are not made again."""
    rows = json.loads(cache.read_text()) if cache.exists() else []
    for length in lengths:
        for name, path in models.items():
            if any((row["model"], row["length"]) == (name, length) for row in rows):
                continue
            whole = text.measure(load_model(path), length)
            row = {"model": name, "length": length, "loss": whole["loss"], "bits_per_byte": whole["bits_per_byte"]}
            print(row, flush=True)
            rows.append(row | {"targets": whole["targets"]})
            cache.write_text(json.dumps(rows))
    return [row for row in rows if row["model"] in models and row["length"] in lengths]


def costs_of_layers(text: Text, to: Target, geometry: Geometry, length: int, cache: Path) -> list[dict[str, Any]]:
    """What the loss rises by where one layer alone is converted, a row for each layer; or what the cache has."""
    if cache.exists():
        return list(json.loads(cache.read_text()))
    config, tensors = text.dense.config, text.dense.state_dict()
    loss = text.measure(text.dense, length)["loss"]
    rows = []
    for layer in range(config.num_layers):
        others = [index for index in range(config.num_layers) if index != layer]
        wanted = converted_config(config, to, geometry, dense_layers=others)
        with torch.device("meta"):
            model = DecoderLM(wanted)
        model.load_state_dict(convert_tensors(tensors, wanted), assign=True)
        above = text.measure(model, length)["loss"] - loss
        rows.append({"target": to, "layer": layer, "length": length, "above_dense": above})
        print(rows[-1], flush=True)
    cache.write_text(json.dumps(rows))
    return rows


def most_costly(rows: list[dict[str, Any]], number: int) -> str:
    """The layers with the highest costs, as `--dense-layers` takes them."""
    most = sorted(rows, key=lambda row: row["above_dense"])[-number:]
    return ",".join(str(layer) for layer in sorted(row["layer"] for row in most))


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of models, with the loss above that of the dense one, as it is and trained on, in percent."""
    of = {(row["model"], row["length"]): row["loss"] for row in rows}

    def above(row: dict[str, Any], other: str) -> float:
        return 100 * (row["loss"] / of[other, row["length"]] - 1)

    return [
        row | {"above_dense_percent": above(row, DENSE), "above_dense_trained_on_percent": above(row, DENSE_ON)}
        for row in sorted(rows, key=lambda row: row["length"])
    ]


def main() -> int:
    """Convert, train on, measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=Path, help="a finished run of a dense model")
    parser.add_argument("--directory", type=Path, default=Path("runs/converted"))
    parser.add_argument("--to", nargs="+", choices=("selected", "nsa"), default=["selected", "nsa"])
    kept_layers = parser.add_mutually_exclusive_group()
    kept_layers.add_argument("--dense-layers", default="")
    kept_layers.add_argument("--keep-dense", type=int, default=0, metavar="LAYERS")
    parser.add_argument("--label", default="", help="name of these flags, in the names of models and of the result")
    parser.add_argument("--index-steps", type=int, default=0, help="steps that teach an index alone; 0: no index")
    parser.add_argument("--share", type=float, default=0.1, help="share of the dense run's steps")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options, others = parser.parse_known_args()
    if len(others) % 2 or not all(flag.startswith("--") for flag in others[::2]):
        parser.error(f"further flags are --section.field value, got {' '.join(others)}")
    flags = {name.removeprefix("--"): value for name, value in zip(others[::2], others[1::2], strict=True)}
    geometry = {name: value for name, value in flags.items() if name.startswith("geometry.")}
    extra = {name: value for name, value in flags.items() if name not in geometry}

    directory, config = options.directory, load_run(options.dense)
    steps = max(1, int(config.train.steps * options.share))
    directory.mkdir(parents=True, exist_ok=True)
    models = {DENSE: options.dense, DENSE_ON: directory / "dense"}
    train_on(options.dense, models[DENSE_ON], options.dense, config, steps, extra)
    label = f"-{options.label}" if options.label else ""
    sizes = Geometry(**{name.removeprefix("geometry."): int(value) for name, value in geometry.items()})
    text, costs, kept = Text(options.dense), [], {}
    for target in options.to:
        converted, run = directory / f"{target}{label}-start", directory / f"{target}{label}"
        dense_layers = options.dense_layers
        if options.keep_dense:
            cache = directory / f"costs-{target}{label}.json"
            found = costs_of_layers(text, target, sizes, max(options.lengths), cache)
            dense_layers = most_costly(found, options.keep_dense)
            costs += found
        if not converted.exists():
            choices = [*(f"--{name}={value}" for name, value in geometry.items()), f"--dense-layers={dense_layers}"]
            choices += ["--chooser=index"] if options.index_steps else []
            command("convert", str(options.dense), str(converted), "--to", target, *choices)
        start, taught = converted, extra
        if options.index_steps:
            start, taught = directory / f"{target}{label}-taught", TAUGHT | extra
            train_on(converted, start, options.dense, config, options.index_steps, ALONE | extra)
        train_on(start, run, options.dense, config, steps, taught)
        models |= {f"{target}, converted": converted, f"{target}, trained on": run}
        kept[target] = dense_layers or "none"
    rows = compared(losses(models, text, options.lengths, directory / f"losses{label}.json"))
    tokens = config.train.sequence_length * config.train.global_batch_size
    notes = [
        f"Dense run: {config.train.steps:,} steps of {tokens:,} tokens, {config.train.sequence_length:,} a sequence.",
        f"Trained on: {steps:,} steps more, after {options.index_steps:,} that taught an index alone.",
        f"Layers that stay dense: {', '.join(f'{layers} ({target})' for target, layers in kept.items())}. Geometry: "
        f"{load_model(directory / f'{options.to[0]}{label}-start').config.geometry}.",
        f"Further flags: {' '.join(f'{name}={value}' for name, value in extra.items()) or 'none'}.",
    ]
    name = f"convert_quality{label.replace('-', '_')}"
    file = ResultFile(name, "Dense models made sparse, and trained on", folder=options.output, commit=options.commit)
    print(file.write(rows, notes=notes, one_layer_converted=costs).read_text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
