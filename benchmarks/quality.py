"""The quality of the sparse model: trainings that differ only in the attention, side by side, then their evaluation.

    python benchmarks/quality.py --part long --directory runs/quality --gpus 2 --seconds 450 --resume
    python benchmarks/quality.py --part recall --variants sparse dense index --directory runs/quality
    python benchmarks/quality.py --part production seeds long recall needle --plan

| part | trains | measures |
|---|---|---|
| `production` | the production model on 2,048 tokens | loss, and by position |
| `production_8192` | the same on 8,192 tokens inside one package | loss by position, recall of the choice |
| `production_32768` | that model on 32,768 tokens | the same |
| `seeds` | a small model on 2,048 tokens, three seeds | the same, and how far seeds are apart |
| `long` | the small model on 2,048, then on 32,768 tokens inside one package | loss by position, recall of the choice |
| `recall` | two layers on multi-query associative recall | values found, by pairs and by distance |
| `needle` | two layers on needles in haystacks up to 65,536 tokens | needles found, by length and depth |

All variants see the same tokens in the same order. `window` sees as many keys a query as the sparse model reads:
those of its window and of all selected blocks. In `hybrid`, every fourth layer is dense. `random` is the sparse model
with blocks drawn at random: it lacks the choice. In `learned`, the compressor is the paper's learnable one; in
`shared`, the branches share their keys and values. In `exact`, blocks are chosen by exact mass: a ceiling, which
costs more than dense attention. In `index`, index heads choose, which a loss teaches, beside the learned compressor
and at three times the learning rate; with `-l1` at the same rate, with `-s256` on one query in 256 instead of 64,
with `-mean` without the learned compressor. `selected-index` has only the selected branch. In `mix`, every fourth
layer is such a branch and the others have a window; in `mix-dense`, every fourth layer is dense.
Each training is its own process and folder, `DIRECTORY/PART/VARIANT-SEED`. Trainings of `long` and `needle`
start from the weights of trainings on shorter rows, in folders with the length behind their names, and those of
`production_32768` from the weights of `production_8192`. When the time is up they stop as a scheduler would stop them;
`--resume` continues those that have steps left, begins the others, and when all are over evaluates them. Flags of
`trifocal train` are passed on, also to the trainings that others start from.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import median

from lib.quality_parts import HELD_OUT, LAYERS, LONG_SHARE, PARTS, VARIANTS
from lib.quality_tables import Row, above_dense_by_step, means, pivot
from lib.results import ResultFile
from trifocal.cli.output import unwinding_signals
from trifocal.data.sources.builtin import BuiltinSource
from trifocal.data.stream import in_validation
from trifocal.runlog import read_metrics
from trifocal.runlog.run import read_run
from trifocal.telemetry.statistics import NEIGHBOURS
from trifocal.train import load_config

PRESET = Path(__file__).parent.parent / "configs/m7c_125m.toml"
LAYER_TYPES = "model.layer_types"
_STOP_SECONDS = 60.0
_NOT_BEGUN = -1
_ROW = 32768


@dataclass
class Training:
    """One training and its evaluation."""

    part: str
    variant: str
    seed: int
    folder: Path
    flags: dict[str, str]
    short: "Training | None" = None
    """The training on shorter rows whose weights this one starts from."""

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return int(self.flags["train.steps"])

    @property
    def tokens_of_step(self) -> int:
        """Tokens of an optimizer step."""
        return int(self.flags["train.global_batch_size"]) * int(self.flags["train.sequence_length"])

    @property
    def stages(self) -> "list[Training]":
        """The trainings on shorter rows, one from the other, then this one."""
        return [*([] if self.short is None else self.short.stages), self]

    def arguments(self, *, resume: bool) -> list[str]:
        """Arguments of `trifocal train`."""
        if resume and (self.folder / "config.toml").is_file():
            return ["--resume", str(self.folder)]
        start = {} if self.short is None else {"model.from": str(self.short.folder)}
        flags = []
        for name, value in (self.flags | start).items():
            flags += [f"--{name}", *(value.split() if name == LAYER_TYPES else [value])]
        return [str(PRESET), "--run.directory", str(self.folder), *flags]

    def done(self) -> int:
        """Steps that are in the metrics."""
        file = self.folder / "metrics.jsonl"
        return max((row["step"] for row in read_metrics(file)), default=0) if file.is_file() else 0


def trainings(
    name: str,
    directory: Path,
    seeds: Sequence[int],
    variants: Sequence[str],
    extra: dict[str, str],
    one_seed: Sequence[str] = (),
) -> list[Training]:
    """The trainings of a part; those of one seed are neighbours.

    Flags in `extra` win; variants in `one_seed` have only the first seed.
    """
    part = PARTS[name]

    def training(variant: str, seed: int, folder: Path, own: dict[str, str], last: dict[str, str]) -> Training:
        steps, geometry = int((own | last | extra)["train.steps"]), part.geometry
        flags = {
            "run.seed": str(seed),
            "data.seed": str(seed),
            "schedule.warmup_steps": str(max(1, steps // 20)),
            "checkpoint.interval_steps": str(max(1, steps // 4)),
            "checkpoint.keep_last": "1",
            "checkpoint.keep_every_steps": "0",
            "evaluate.interval_steps": str(max(1, steps // 10)),
            "log.sample_interval_steps": "0",
            "log.telemetry_interval_steps": str(max(1, steps // 2)),
            **{f"model.geometry.{key}": str(value) for key, value in asdict(geometry).items()},
            **own,
        }
        if part.packages:
            flags["data.source"] = f"parquet:{directory / ('short' if last else part.packages)}.parquet#text"
        if variant == "window":
            keys = geometry.window_size + geometry.selected_tokens
            flags["model.sliding_window"] = str(keys)
        if pattern := LAYERS.get(variant):
            layers = int((flags | extra).get("model.num_layers", load_config(PRESET).model.num_layers))
            if layers < len(pattern):
                raise SystemExit(f"{variant} repeats {len(pattern)} layers: --model.num_layers {len(pattern)}")
            flags[LAYER_TYPES] = " ".join(pattern[layer % len(pattern)] for layer in range(layers))
            if "window" in pattern:
                flags["model.sliding_window"] = str(geometry.window_size)
        return Training(name, variant, seed, folder, flags | VARIANTS[variant] | last | extra)

    found = []
    seeds = seeds or part.seeds
    for seed in seeds:
        for variant in variants or part.variants:
            if variant in one_seed and seed != seeds[0]:
                continue
            folder = directory / name / f"{variant}-{seed}"
            one = training(variant, seed, folder, part.flags, {})
            if part.start:
                (one.short,) = trainings(part.start, directory, [seed], [variant], extra)
            for stage in part.short:
                place = folder.with_name(f"{folder.name}-{stage['train.sequence_length']}")
                one.short = replace(training(variant, seed, place, part.flags, stage), short=one.short)
            found.append(one)
    return found


def write_packages(directory: Path) -> None:
    """Write the Python files of this machine as long documents to `short.parquet` and `long.parquet` of a folder.

    A document has all files of a package's folder, one after another. Some packages are for long rows and the others
    for short ones, so that nothing is read twice; the same are held out of both. A document and its separator fill
    whole rows of 32,768 bytes, so that each row lies inside one package.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = BuiltinSource(include_site_packages=True)
    packages: dict[str, list[str]] = {}
    for shard, name in enumerate(source.shards):
        parts = name.split("/")
        folder = "/".join(parts[: min(len(parts) - 1, 3)])
        packages.setdefault(folder, []).extend(document.text for document, _ in source.read(shard, None))
    texts = []
    for files in packages.values():
        whole = "\n".join(files).encode()
        length = len(whole) // _ROW * _ROW - 1
        # A character that is cut in the middle becomes spaces.
        texts.append(whole[: max(length, 0)].decode(errors="ignore").encode().ljust(max(length, 0)).decode())
    texts = [text for text in texts if text]
    random.Random(0).shuffle(texts)
    held_out = [text for text in texts if in_validation(text, HELD_OUT)]
    trained = [text for text in texts if not in_validation(text, HELD_OUT)]
    total, cut = sum(map(len, trained)), 0
    while sum(map(len, trained[:cut])) < LONG_SHARE * total:
        cut += 1
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("long", trained[:cut]), ("short", trained[cut:])):
        pq.write_table(pa.table({"text": held_out + part}), directory / f"{name}.parquet", row_group_size=16)
        sizes = f"{sum(map(len, part)) / 1e6:.1f} M characters, {len(held_out)} documents held out"
        print(f"{name}.parquet: {len(part)} documents of {sizes}", flush=True)


def run_all(commands: Sequence[tuple[list[str], Path]], *, gpus: int, jobs: int, deadline: float) -> list[int]:
    """Run commands side by side, each on one GPU, and stop those that still run when the time is up; exit statuses.

    A command is arguments of `trifocal`, and the file for the output. 0 GPUs leave the choice of a device to it.
    """
    # Those that this process may see, as PyTorch counts them.
    devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")
    places: SimpleQueue[int] = SimpleQueue()
    running: set[subprocess.Popen[bytes]] = set()
    interrupted = threading.Event()
    for place in range(max(gpus, 1) * jobs):
        places.put(place % max(gpus, 1))

    def run(arguments: list[str], log: Path) -> int:
        gpu = places.get()
        try:
            if interrupted.is_set() or time.monotonic() >= deadline:
                return _NOT_BEGUN
            threads = str(max(1, (os.cpu_count() or 1) // (max(gpus, 1) * jobs)))
            environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": threads}
            environment |= {"CUDA_VISIBLE_DEVICES": devices[gpu]} if gpus else {"OMP_NUM_THREADS": threads}
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "trifocal", *arguments], stdout=output, stderr=output, env=environment
                )
                running.add(process)
                if interrupted.is_set():
                    process.send_signal(signal.SIGTERM)
                try:
                    return process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGTERM)
                try:
                    return process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return process.wait()
        finally:
            places.put(gpu)

    with ThreadPoolExecutor(len(commands) or 1) as pool:
        try:
            return list(pool.map(lambda command: run(*command), commands))
        except BaseException:
            # A signal: trainings save and end, and so do the threads that wait for them.
            interrupted.set()
            for process in list(running):
                process.send_signal(signal.SIGTERM)
            raise


def read_training(training: Training, common: int, jobs: int) -> tuple[Row, list[Row]]:
    """The figures of a training, its loss at a step that all have reached, and the rows of its evaluation."""
    run = read_run(training.folder)
    losses = dict(zip(*run.series("evaluation", "validation_loss"), strict=True))
    bits = dict(zip(*run.series("evaluation", "bits_per_byte"), strict=True))
    rates = run.series("train", "tokens_per_second")[1]
    row: Row = {
        "variant": training.variant,
        "seed": training.seed,
        "steps": training.done(),
        "learning_rate": run.setting("optimizer", "learning_rate"),
        "tokens": common * training.tokens_of_step,
        "validation_loss": losses.get(common),
        "bits_per_byte": bits.get(common),
        "tokens_per_second": median(rates[len(rates) // 2 :]) if rates else None,
        "trainings_at_a_time": jobs,
        "curve": [[step, round(loss, 4)] for step, loss in losses.items()],
    }
    if training.short is not None:
        row["short_loss"] = (read_run(training.short.folder).series("evaluation", "validation_loss")[1] or [None])[-1]
    evaluated = run.evaluations[-1]["rows"] if run.evaluations else []
    head = {"variant": training.variant, "seed": training.seed, "steps": training.done()}
    return row, [head | found for found in evaluated]


def blocks_of_neighbours(training: Training) -> list[Row]:
    """How many blocks 4, 8 and 16 neighbours choose together, over n, in each layer at the last look of telemetry."""
    return [
        {"variant": training.variant, "seed": training.seed, "step": row["step"], "layer": row["layer"]}
        | {f"{number} queries": blocks for number, blocks in zip(NEIGHBOURS, row["blocks_of_neighbours"], strict=True)}
        for row in read_run(training.folder).last_telemetry()
    ]


def write_result(name: str, done: Sequence[Training], options: argparse.Namespace, statuses: Sequence[int]) -> Path:
    """Write the figures of a part into a result file."""
    begun = [training for training in done if training.done()]
    evaluated = [
        {row["step"] for row in read_metrics(training.folder / "metrics.jsonl", "evaluation")} for training in begun
    ]
    common = max(set.intersection(*evaluated), default=0) if evaluated else 0
    part, jobs = PARTS[name], options.jobs or PARTS[name].jobs
    found = [(training, *read_training(training, common, jobs)) for training in begun]
    rows = [row for _, row, _ in found]
    # Models of different steps do not compare.
    most = max((training.done() for training in begun), default=0)
    everything = [row for _, _, own in found for row in own]
    evaluations = [row for row in everything if row["steps"] == most]
    recall = [
        {key: row.get(key) for key in ("variant", "seed", "length", "pairs", "accuracy", "answer_loss")}
        for row in evaluations if row["task"] == "recall" and "accuracy" in row
    ]  # fmt: skip
    notes = [
        "The validation loss is that of the last step that all have reached; means over seeds have only the trainings "
        "with the most steps.",
        "What the variants are: the table of benchmarks/quality.py.",
        "One training at a time on a GPU."
        if jobs == 1
        else f"{jobs} trainings at a time on a GPU: tokens/s are those of a shared one, and do not compare.",
        f"Flags on top of configs/m7c_125m.toml: {' '.join(f'{k}={v}' for k, v in done[0].flags.items())}",
    ]
    for stage in reversed(done[0].stages[:-1]):
        own = " ".join(f"{k}={v}" for k, v in stage.flags.items() if v != done[0].flags.get(k))
        notes.append(f"The weights before are those of a training on shorter rows, with the same flags but: {own}")
    if failed := [f"{one.variant}-{one.seed}" for one, status in zip(done, statuses, strict=True) if status > 0]:
        notes.append(f"Failed: {', '.join(failed)}.")
    file = ResultFile(f"quality_{name}", part.question, folder=options.output, commit=options.commit)
    columns = ("variant", "seed", "steps", "learning_rate", "tokens", "validation_loss", "bits_per_byte")
    columns += ("tokens_per_second", *(("short_loss",) if done[0].short is not None else ()))
    return file.write(
        rows,
        notes=notes,
        columns=columns,
        means=means(rows),
        means_on_short_rows=means(rows, "short_loss") if done[0].short is not None else [],
        recall=recall,
        above_dense_by_step=above_dense_by_step(rows),
        loss_by_position=pivot(evaluations, "position", "loss", "first", seeds=True),
        needles_found_by_depth=pivot(evaluations, "needle", "accuracy", "depth"),
        needles_found_by_seed=pivot(everything, "needle", "accuracy", "depth", seeds=True),
        choice_recall_by_layer=pivot(evaluations, "choice", "recall", "layer", seeds=True),
        blocks_of_neighbours=[row for training, _, _ in found for row in blocks_of_neighbours(training)],
        choice_recall_by_distance=pivot(evaluations, "choice_distance", "recall", "first"),
        recall_by_distance=pivot(evaluations, "recall_distance", "accuracy", "first"),
    )


def _train(
    what: str, found: Sequence[Training], *, jobs: int, options: argparse.Namespace, deadline: float
) -> dict[str, int]:
    """Train those that have steps left; the exit status of each by its folder, 0 of those that have none left."""
    left = [one for one in found if one.done() < one.steps]
    commands = [(["train", *one.arguments(resume=options.resume)], one.folder.with_suffix(".log")) for one in left]
    print(f"{what}: {len(left)} trainings, {jobs} at a time on each GPU", flush=True)
    trained = run_all(commands, gpus=options.gpus, jobs=jobs, deadline=deadline)
    return dict.fromkeys((str(one.folder) for one in found), 0) | {
        str(one.folder): code for one, code in zip(left, trained, strict=True)
    }


def run_part(name: str, options: argparse.Namespace, extra: dict[str, str], deadline: float) -> int:
    """Train, evaluate and write a part; the number of trainings that failed."""
    part, jobs = PARTS[name], options.jobs or PARTS[name].jobs
    found = trainings(name, options.directory, options.seeds, options.variants, extra, options.one_seed)
    if part.packages and "data.source" not in extra and not (options.directory / "long.parquet").exists():
        write_packages(options.directory)
    begin = partial(_train, jobs=jobs, options=options, deadline=deadline)
    status = {str(one.folder): 0 if one.done() >= one.steps else _NOT_BEGUN for one in found}
    for stages in zip(*(one.stages for one in found if one.done() < one.steps), strict=True):
        ready = [one for one in stages if one.short is None or one.short.done() >= one.short.steps]
        status |= begin(f"{name}, rows of {stages[0].flags['train.sequence_length']}", ready)
    # Models of different steps do not compare, so a call that was cut short evaluates nothing.
    ready = [one for one in found if one.done() == one.steps and time.monotonic() < deadline]
    print(f"{name}: evaluating {len(ready)}", flush=True)
    # Evaluations are short and have a time limit of their own.
    evaluated_by = time.monotonic() + options.evaluate_seconds
    for flags in part.evaluate:
        commands = [(["evaluate", str(one.folder), *flags], one.folder.with_suffix(".log")) for one in ready]
        judged = run_all(commands, gpus=options.gpus, jobs=jobs, deadline=evaluated_by)
        status |= {str(one.folder): code for one, code in zip(ready, judged, strict=True) if code}
    if any(one.done() for one in found):
        print(write_result(name, found, options, [status[str(one.folder)] for one in found]).read_text(), flush=True)
    for folder, code in status.items():
        if code:
            lines = (
                Path(folder).with_suffix(".log").read_text().splitlines()
                if code != _NOT_BEGUN
                else ["not begun in time"]
            )
            print(f"{folder}: exit status {code}: {' | '.join(lines[-3:])}", flush=True)
    return sum(code > 0 for code in status.values())


def plan(name: str, options: argparse.Namespace, extra: dict[str, str]) -> None:
    """Print the trainings of a part as commands."""
    found = trainings(name, options.directory, options.seeds, options.variants, extra, options.one_seed)
    stages = [stage for one in found for stage in one.stages]
    for one in stages:
        print(f"  trifocal train {' '.join(one.arguments(resume=False))}")
    tokens = sum(one.steps * one.tokens_of_step for one in stages)
    print(f"{name}: {len(stages)} trainings, {tokens / 1e6:,.0f} M tokens\n")


@unwinding_signals()
def main() -> int:
    """Run the parts; the exit status is 1 if a training or an evaluation failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), required=True)
    parser.add_argument("--directory", type=Path, default=Path("runs/quality"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="for the trainings of all parts together")
    parser.add_argument("--evaluate-seconds", type=float, default=120.0, help="for the evaluations of a part")
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--variants", nargs="+", default=[], choices=VARIANTS)
    parser.add_argument("--one-seed", nargs="+", default=[], choices=VARIANTS, help="trained with only the first seed")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plan", action="store_true", help="print the commands and train nothing")
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=None)
    options, flags = parser.parse_known_args()
    if len(flags) % 2 or not all(flag.startswith("--") for flag in flags[::2]):
        parser.error(f"flags of trifocal train are --section.field value, got {' '.join(flags)}")
    extra = {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    if options.plan:
        for name in options.part:
            plan(name, options, extra)
        return 0
    deadline = time.monotonic() + options.seconds
    return int(sum(run_part(name, options, extra, deadline) for name in options.part) > 0)


if __name__ == "__main__":
    sys.exit(main())
