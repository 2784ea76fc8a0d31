"""The acceptance run that the reports asked for, in one command, and one table against their criteria.

    python benchmarks/acceptance.py --directory runs/acceptance            # on all GPUs of this machine
    python benchmarks/acceptance.py --directory runs/tiny --tiny           # two small models on a CPU, in a few minutes

Each run trains the production model: 200 steps on synthetic tokens and 300 on text, with DDP and with FSDP, with
activation checkpointing and without. The text is in parquet files with the columns of FineWeb-Edu, which the script
writes from the docstrings of this Python. Flags of `trifocal train` are passed on to every run.

| criterion | bar | source |
|---|---|---|
| steps | all of them, no crash | "complete 500 steps" |
| peak memory of a GPU | under 30 GiB | the report on FSDP, with checkpointing |
| tokens a second | above 50 | the report on FSDP |
| first batch of a warm loader | under 5 s | the first FineWeb-Edu batch |
| loss | synthetic: not below ln(vocabulary); text: falls | a future leak brought it to 0.0001 |
| diagnostics | heartbeat of every process, environment, telemetry, a complete checkpoint | "all diagnostic systems" |
"""

import argparse
import ast
import json
import math
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from lib.processes import train
from lib.results import ResultFile, cpu_name
from trifocal.cli.output import unwinding_signals
from trifocal.data import Loader, make_tokenizer
from trifocal.data.sources.builtin import BuiltinSource
from trifocal.runlog import read_metrics
from trifocal.train import RunConfig, load_config
from trifocal.train.checkpoint.folders import list_checkpoints

CONFIG = Path(__file__).parents[1] / "configs" / "m7c_125m.toml"
GIB = 2**30
MAX_GIB, LEAST_TOKENS_PER_SECOND, MAX_FIRST_BATCH_SECONDS = 30.0, 50.0, 5.0
# Noise of the loss of a batch of uniformly random tokens.
FLOOR_TOLERANCE = 0.05
TINY = {
    "run.device": "cpu", "model.num_layers": 2, "model.dim": 64, "model.num_heads": 4, "model.num_kv_heads": 2,
    "model.head_dim": 16, "model.value_dim": 16, "model.mlp_dim": 128, "train.sequence_length": 128,
    "train.precision": "fp32", "train.compile": "false", "train.cuda_graphs": "false", "data.shuffle_sequences": 8,
}  # fmt: skip


def docstrings() -> list[str]:
    """The docstrings of this Python's library: prose, a document for each module."""
    source = BuiltinSource(include_site_packages=False)
    documents = []
    for shard in range(len(source.shards)):
        for document, _ in source.read(shard, None):
            try:
                tree = ast.parse(document.text)
            except (SyntaxError, ValueError):
                continue
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
            text = "\n\n".join(found for node in nodes if (found := ast.get_docstring(node)))
            if len(text) > 200:
                documents.append(text)
    return documents


def write_parquet(folder: Path, files: int = 2) -> int:
    """Write files with the columns of FineWeb-Edu; returns the number of characters in them."""
    documents = docstrings()
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        own = documents[number::files]
        columns = {
            "text": own,
            "id": [f"<urn:uuid:{number}-{index}>" for index in range(len(own))],
            "dump": ["docstrings"] * len(own),
            "language": ["en"] * len(own),
            "language_score": [1.0] * len(own),
            "token_count": [len(text.encode()) for text in own],
            "score": [3.0] * len(own),
            "int_score": [3] * len(own),
        }
        pq.write_table(pa.table(columns), folder / f"{number:03}_00000.parquet", row_group_size=1000)
    return sum(map(len, documents))


def flags_of(data: str, mode: str, checkpointing: str, steps: int, processes: int, corpus: Path) -> dict[str, Any]:
    """What a run overrides in the production configuration."""
    return {
        "data.source": "synthetic" if data == "synthetic" else f"parquet:{corpus}#text",
        "parallel.mode": mode,
        "train.activation_checkpointing": checkpointing,
        "train.steps": steps,
        "train.global_batch_size": max(4, 2 * processes),
        "train.micro_batch_size": 2,
        "schedule.warmup_steps": min(20, steps),
        "checkpoint.interval_steps": steps,
        "evaluate.interval_steps": 0,
        "log.interval_steps": max(1, steps // 20),
        "log.telemetry_interval_steps": max(1, steps // 4),
        "log.sample_interval_steps": 0,
        "log.heartbeat_seconds": 1.0,
    }


def first_batch_seconds(config: RunConfig) -> float:
    """Time to the first batch of a run's loader, the second time: files are in the cache of the system."""
    sizes = {
        "sequence_length": config.train.sequence_length,
        "batch_size": config.train.micro_batch_size,
        "vocab_size": config.model.vocab_size,
    }
    for _ in range(2):
        begin = time.perf_counter()
        with Loader(config.data, tokenizer=make_tokenizer(config.data.tokenizer), **sizes) as loader:
            next(loader)
        seconds = time.perf_counter() - begin
    return seconds


def figures(run: Path) -> dict[str, Any]:
    """The figures of a run from its files; of a run that trained nothing, none."""
    rows = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    trained = [row for row in rows if row["kind"] == "train"]
    if not trained:
        return {"steps": 0, "diagnostics": "no row of metrics"}
    beats = [json.loads(path.read_text().splitlines()[-1]) for path in sorted(run.glob("heartbeat/rank*.jsonl"))]
    # The memory of a process on a CPU is the resident one.
    peaks = [row.get("memory_peak_bytes") or row["memory_allocated_bytes"] for row in trained]
    missing = [
        name
        for name, there in {
            "a heartbeat that says finished": beats and all(beat["status"] == "finished" for beat in beats),
            "env.json": (run / "env.json").exists(),
            "telemetry": any(row["kind"] == "telemetry" for row in rows),
            "a checkpoint of the last step": any(
                path.name == f"step_{trained[-1]['step']:08}" for path in list_checkpoints(run / "checkpoints")
            ),
        }.items()
        if not there
    ]
    return {
        "steps": trained[-1]["step"],
        "peak_gib": max(peaks) / GIB,
        "tokens_per_second": median(row["tokens_per_second"] for row in trained[len(trained) // 2 :]),
        "first_loss": trained[0]["loss"],
        "last_loss": mean(row["loss"] for row in trained[-3:]),
        "diagnostics": f"without {', '.join(missing)}" if missing else "complete",
    }


def missed(row: dict[str, Any], vocab_size: int) -> list[str]:
    """The criteria that a run does not meet, each with its figure."""
    if row["steps"] < row["wanted_steps"]:
        return [f"{row['steps']} of {row['wanted_steps']} steps"]
    found = []
    if row["peak_gib"] >= MAX_GIB:
        found.append(f"peak memory {row['peak_gib']:.1f} GiB, bar {MAX_GIB:g}")
    if row["tokens_per_second"] <= LEAST_TOKENS_PER_SECOND:
        found.append(f"{row['tokens_per_second']:.0f} tokens/s, bar {LEAST_TOKENS_PER_SECOND:g}")
    if row["first_batch_seconds"] >= MAX_FIRST_BATCH_SECONDS:
        found.append(f"first batch after {row['first_batch_seconds']:.1f} s, bar {MAX_FIRST_BATCH_SECONDS:g}")
    if row["data"] == "synthetic" and row["last_loss"] < math.log(vocab_size) - FLOOR_TOLERANCE:
        found.append(f"loss {row['last_loss']:.3f} below the entropy {math.log(vocab_size):.3f}")
    if row["data"] == "text" and not row["last_loss"] < row["first_loss"]:
        found.append(f"loss from {row['first_loss']:.3f} to {row['last_loss']:.3f}")
    if row["diagnostics"] != "complete":
        found.append(f"diagnostics {row['diagnostics']}")
    return found


@unwinding_signals()
def main(arguments: Sequence[str] | None = None) -> int:
    """Train every run and write the table; the exit status is 1 if a criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="for the runs and the text; must not exist")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, in two processes")
    parser.add_argument("--processes", type=int, default=0, help="one for each GPU; all GPUs unless given")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=[200, 300], help="on synthetic tokens, and on text; 0: none"
    )
    parser.add_argument("--modes", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"])
    parser.add_argument("--checkpointing", nargs="+", choices=("all", "none"), default=["all", "none"])
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of a run")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options, extra = parser.parse_known_args(arguments)
    if len(extra) % 2 or not all(flag.startswith("--") for flag in extra[::2]):
        parser.error(f"further flags are --section.field value, got {' '.join(extra)}")
    if options.directory.exists():
        parser.error(f"--directory {options.directory} exists; name a new folder")
    given = {flag.removeprefix("--"): value for flag, value in zip(extra[::2], extra[1::2], strict=True)}
    processes = options.processes or (2 if options.tiny else torch.cuda.device_count())
    if not processes:
        parser.error("there is no GPU here; use --tiny")

    corpus = options.directory / "docstrings"
    characters = write_parquet(corpus)
    file = ResultFile(
        "acceptance", "The acceptance run", folder=options.output, commit=options.commit,
        device=cpu_name() if options.tiny else "",
    )  # fmt: skip
    notes = [
        f"{'A small model' if options.tiny else CONFIG.name} in {processes} processes; text: {characters / 1e6:.1f} M "
        "characters of docstrings in parquet files with the columns of FineWeb-Edu.",
        f"Bars: all steps, under {MAX_GIB:g} GiB a GPU, above {LEAST_TOKENS_PER_SECOND:g} tokens/s, under "
        f"{MAX_FIRST_BATCH_SECONDS:g} s to the first batch, a loss that falls on text and stays above the entropy on "
        "random tokens, complete diagnostics.",
        "tokens a second: median of the second half; last loss: mean of the last three rows.",
    ]
    rows: list[dict[str, Any]] = []
    pairs = [pair for pair in zip(("synthetic", "text"), options.steps, strict=True) if pair[1]]
    for (data, steps), mode, checkpointing in product(pairs, options.modes, options.checkpointing):
        run = options.directory / f"{data}_{mode}_{checkpointing}"
        flags = flags_of(data, mode, checkpointing, steps, processes, corpus)
        flags |= (TINY if options.tiny else {}) | given
        config = load_config(CONFIG, [f"--{name}={value}" for name, value in flags.items()])
        begin = time.monotonic()
        output = train(CONFIG, run, flags, processes, options.seconds)
        wall_seconds = time.monotonic() - begin
        row = {
            "data": data,
            "mode": mode,
            "checkpointing": checkpointing,
            "processes": processes,
            "wanted_steps": steps,
            **figures(run),
            "first_batch_seconds": first_batch_seconds(config),
            "wall_seconds": wall_seconds,
        }
        faults = missed(row, config.model.vocab_size)
        rows.append(row | {"result": "passed" if not faults else f"missed: {'; '.join(faults)}"})
        print(f"{run.name}: {rows[-1]['result']}", flush=True)
        if row["steps"] < steps:
            print(output[-4000:], flush=True)
        file.write(rows, notes=notes)
    print(file.page.read_text())
    return int(any(row["result"] != "passed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
