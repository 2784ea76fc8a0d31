"""Does a choice that learns make sparse attention as good as dense attention? Trainings in plain PyTorch.

    python benchmarks/choice_text.py --task text --runs sparse:1337 dense:1337 exact:1337 --gpus 2 --jobs 2
    python benchmarks/choice_text.py --task recall --runs sparse:1 phi:1 index-mass-w1:1 --gpus 1 --jobs 4

`text` trains the model of the part `long` of quality.py, 800 steps of 32 rows of 2,048 bytes, then 300 of 2 rows of
32,768: chunks of the Python packages of this machine, each inside one package, none read twice; all variants see the
same rows in the same order. `recall` trains two layers of width 256 on associative recall of 64 pairs in 1,024 tokens.
A variant is a chooser, then what differs from its defaults: `-w0.1` the weight of the loss, `-s64` one sampled query in
64, `-l3` a learning rate of the index three times as high, `-h4` four index heads a KV head. Each training is a
process; its lines go to OUTPUT, one JSON object each, as they come.

`found` is the mean over sampled queries of the mass of free blocks that the choice holds over what the exact choice
holds; `held` and `best` are the two shares of the mass of all free blocks. By layer, and their mean.
"""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from choice_parts import Lesson, teach
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Geometry

CHUNK, VALIDATION = 32768, 32
SMALL_BLOCKS = Geometry(
    compression_block_size=8, compression_stride=4, selection_block_size=16, num_selected_blocks=16,
    num_initial_blocks=1, num_local_blocks=2, window_size=64,
)  # fmt: skip
# Model, chooser, weight of the loss.
VARIANTS: dict[str, tuple[dict[str, Any], str, float]] = {
    "dense": ({"attention": "dense"}, "compressed", 0.0),
    "sparse": ({}, "compressed", 0.0),
    "exact": ({}, "exact", 0.0),
    "mean": ({}, "compressed", 1.0),
    "phi": ({"compressor": "mlp"}, "compressed", 1.0),
    "phi-exact": ({"compressor": "mlp"}, "exact", 0.0),
    "phi-index-mass": ({"compressor": "mlp"}, "mass", 1.0),
    "phi-index-max": ({"compressor": "mlp"}, "maximum", 1.0),
    "index-mass": ({}, "mass", 1.0),
    "index-max": ({}, "maximum", 1.0),
    "selected": ({"attention": "selected"}, "compressed", 0.0),
    "msa-exact": ({"attention": "selected"}, "exact", 0.0),
    "msa-mass": ({"attention": "selected"}, "mass", 1.0),
    "msa-max": ({"attention": "selected"}, "maximum", 1.0),
}


def variant_of(name: str) -> tuple[dict[str, Any], Lesson, float]:
    """The model's keys and the lesson of a variant's name, and the factor on the learning rate of the index."""
    pattern = r"([a-z-]+?)(?:-w([0-9.]+))?(?:-s(\d+))?(?:-l([0-9.]+))?(?:-h(\d+))?"
    base, weight, stretch, rate, heads = re.fullmatch(pattern, name).groups()
    keys, chooser, usual = VARIANTS[base]
    lesson = Lesson(chooser, usual if weight is None else float(weight), int(stretch or 256), int(heads or 1))
    return keys, lesson, float(rate or 1)


def write_chunks(path: Path) -> None:
    """Write chunks of whole packages, [chunks, CHUNK] of bytes, those of validation first."""
    from trifocal.data.sources.builtin import BuiltinSource

    source = BuiltinSource(include_site_packages=True)
    packages: dict[str, list[bytes]] = {}
    for shard, name in enumerate(source.shards):
        parts = name.split("/")
        folder = "/".join(parts[: min(len(parts) - 1, 3)])
        packages.setdefault(folder, []).extend(document.text.encode() for document, _ in source.read(shard, None))
    found: list[list[np.ndarray]] = []
    for texts in packages.values():
        text = np.frombuffer(b"\n".join(texts), np.uint8)
        if len(text) >= CHUNK:
            found.append(list(text[: len(text) // CHUNK * CHUNK].reshape(-1, CHUNK)))
    apart = found[:: max(1, len(found) // VALIDATION)][:VALIDATION]
    kept = {id(one) for one in apart}
    rest = [chunk for one in found if id(one) not in kept for chunk in one]
    np.save(path, np.stack([one[0] for one in apart] + rest))
    print(f"{len(found)} packages, {len(apart)} chunks of validation, {len(rest)} of training", flush=True)


class Text:
    """The rows of both phases for a seed."""

    def __init__(self, path: Path, seed: int, short_steps: int, long_steps: int, batch: int) -> None:
        self.chunks, self.batch = np.load(path, mmap_mode="r"), batch
        order = VALIDATION + np.random.default_rng(seed).permutation(len(self.chunks) - VALIDATION)
        long, need = 2 * long_steps, math.ceil(short_steps * batch * 2048 / CHUNK)
        if long + need > len(order):
            raise SystemExit(f"{len(order)} chunks, {long + need} are needed")
        self.long = order[:long]
        rows = np.random.default_rng(seed + 1).permutation(need * CHUNK // 2048)
        parts = CHUNK // 2048
        self.short = np.stack([order[long + rows // parts], rows % parts], 1)

    def rows(self, phase: str, step: int) -> np.ndarray:
        if phase == "long":
            return np.stack([self.chunks[number] for number in self.long[2 * step : 2 * step + 2]])
        taken = self.short[step * self.batch : (step + 1) * self.batch]
        return np.stack([self.chunks[chunk][part * 2048 : (part + 1) * 2048] for chunk, part in taken])

    def validation(self, phase: str) -> list[np.ndarray]:
        rows = np.asarray(self.chunks[:VALIDATION])
        return (
            [rows[i : i + 2] for i in range(0, VALIDATION, 2)]
            if phase == "long"
            else list(rows.reshape(-1, VALIDATION, 2048))
        )


def targets_of(tokens: Tensor) -> Tensor:
    """The next token of each, -100 at the end of a row."""
    return torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)


class Training:
    """A model, its optimizer, and lines of results."""

    def __init__(self, name: str, seed: int, config: dict[str, Any], options: argparse.Namespace) -> None:
        keys, self.lesson, self.rate = variant_of(name)
        self.name, self.seed, self.output = name, seed, options.output
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = DecoderLM(ModelConfig(**(config | keys)))
        model.init_weights(seed)
        self.new = teach(model, self.lesson, seed)
        self.model = model.to(self.device)
        ids = {id(one) for one in self.new}
        self.old = [one for one in self.model.parameters() if id(one) not in ids]
        self.began = time.perf_counter()

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def line(self, **values: Any) -> None:
        values = {
            "variant": self.name,
            "seed": self.seed,
            **values,
            "seconds": round(time.perf_counter() - self.began, 1),
        }
        with self.output.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def optimizer(self, rate: float) -> torch.optim.AdamW:
        groups = [
            {"params": [p for p in self.old if p.ndim == 2], "weight_decay": 0.01, "factor": 1.0},
            {"params": [p for p in self.old if p.ndim != 2], "weight_decay": 0.0, "factor": 1.0},
            {"params": self.new, "weight_decay": 0.01, "factor": self.rate},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=self.device.type == "cuda")

    def step(
        self, batches: list[tuple[Tensor, Tensor]], optimizer: torch.optim.AdamW, rate: float
    ) -> tuple[Tensor, Tensor]:
        """One update; the mean loss over all targets, and the choice's loss."""
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        optimizer.zero_grad()
        self.lesson.step += 1
        total = sum((targets >= 0).sum() for _, targets in batches)
        summed, taught = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for tokens, targets in batches:
            self.lesson.losses.clear()
            with self.autocast():
                loss = self.model(tokens, targets) * (targets >= 0).sum() / total
            lesson = sum(self.lesson.losses, start=torch.zeros((), device=self.device)) / len(batches)
            (loss + self.lesson.weight * lesson).backward()
            summed, taught = summed + loss.detach(), taught + lesson.detach()
        torch.nn.utils.clip_grad_norm_(self.old, 1.0)
        if self.new:
            torch.nn.utils.clip_grad_norm_(self.new, 1.0)
        optimizer.step()
        return summed, taught

    def held(self) -> dict[str, Any]:
        """`found` and its parts from what was collected since."""
        lesson, layers = self.lesson, len(self.model.blocks)
        if not lesson.held:
            return {}
        shares = torch.stack(lesson.held).view(-1, layers, 3).mean(0)
        lesson.held.clear()
        shares = shares.tolist()
        names = dict(zip(("held", "best", "found"), (sum(c) / layers for c in zip(*shares, strict=True)), strict=True))
        return {k: round(v, 4) for k, v in names.items()} | {"found_by_layer": [round(s[2], 3) for s in shares]}

    @torch.no_grad()
    def losses(self, rows: list[np.ndarray]) -> dict[str, Any]:
        """Loss of validation rows, by position too; `found` in every fourth call of the model."""
        buckets: Tensor | float = 0.0
        for number, one in enumerate(rows):
            tokens = torch.from_numpy(one.astype(np.int64)).to(self.device)
            self.lesson.measure = number % 4 == 0
            with self.autocast():
                logits = self.model(tokens)
            length = tokens.shape[1]
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
            )
            loss = torch.nn.functional.pad(loss.view(len(tokens), -1), (1, 0))
            edges = [1, 1024, 2048, 4096, 8192, 16384, 32768]
            buckets = buckets + torch.stack(
                [loss[:, a:b].sum() for a, b in itertools.pairwise(edges) if a < length]
            ) / len(tokens)
        self.lesson.measure = False
        widths = [min(b, length) - a for a, b in itertools.pairwise(edges) if a < length]
        sums = (buckets / len(rows)).tolist()
        by = [round(s / w, 4) for s, w in zip(sums, widths, strict=True)]
        return {"loss": round(sum(sums) / sum(widths), 4), "by_position": by} | self.held()


def factor(step: int, steps: int) -> float:
    """Factor of the learning rate: a warm-up of a twentieth, a cosine down to a tenth."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * max(0.0, (step - warm) / max(1, steps - warm))))


def text(name: str, seed: int, options: argparse.Namespace) -> None:
    """Short rows, then long ones."""
    config = {
        "dim": options.dim, "num_layers": options.layers, "num_heads": options.dim // 64, "num_kv_heads": 1,
        "mlp_dim": options.dim * 8 // 3 // 64 * 64, "rope_theta": 5e5,
    }  # fmt: skip
    steps = {"short": options.short_steps, "long": options.long_steps}
    data = Text(options.data, seed, steps["short"], steps["long"], options.batch)
    training = Training(name, seed, config, options)
    for phase, rate in (("short", 1e-3), ("long", 5e-4)):
        optimizer, recent, last = training.optimizer(rate), [], time.perf_counter()
        for step in range(steps[phase]):
            tokens = torch.from_numpy(data.rows(phase, step).astype(np.int64)).to(training.device, non_blocking=True)
            recent.append(training.step([(tokens, targets_of(tokens))], optimizer, rate * factor(step, steps[phase])))
            at = {"short": (steps["short"],), "long": (50, 100, 200, steps["long"])}[phase]
            if step + 1 in at:
                train, taught = torch.stack([torch.stack(one) for one in recent]).mean(0).tolist()
                per_step = (time.perf_counter() - last) / len(recent)
                found = training.losses(data.validation(phase))
                training.line(
                    phase=phase, step=step + 1, train_loss=round(train, 4), choice_loss=round(taught, 4),
                    step_ms=round(1000 * per_step, 1), **found,
                )  # fmt: skip
                recent, last = [], time.perf_counter()


def associations(
    rows: int, length: int, pairs: int, vocab: int, *key: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows of the task of `trifocal.data.sources.synthetic.associations`, drawn on the device."""
    mixed = int(np.random.SeedSequence(key).generate_state(1)[0])
    generator = torch.Generator(device).manual_seed(mixed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    half, places = vocab // 2, (length + 1 - 2 * pairs) // 2
    tokens = half + (draw(rows, length + 1) * half).long()
    keys = draw(rows, half).argsort(-1)[:, :pairs]
    values = half + (draw(rows, pairs) * half).long()
    queries = 2 * pairs + 2 * draw(rows, places).argsort(-1)[:, :pairs]
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    tokens.scatter_(1, queries, keys).scatter_(1, queries + 1, values)
    targets = torch.full_like(tokens[:, :-1], -100).scatter_(1, queries, values)
    return tokens[:, :-1], targets


def recall(name: str, seed: int, options: argparse.Namespace) -> None:
    """Associative recall: half of the rows whole, half of them as documents of a quarter."""
    config = {
        "dim": options.dim, "num_layers": options.layers, "num_heads": options.dim // 64, "num_kv_heads": 1,
        "mlp_dim": options.dim * 8 // 3 // 64 * 64, "vocab_size": 512, "geometry": SMALL_BLOCKS,
    }  # fmt: skip
    training = Training(name, seed, config, options)
    training.lesson.stretch = min(training.lesson.stretch, 64)
    optimizer, recent, last = training.optimizer(2e-3), [], time.perf_counter()
    sizes = [(options.batch // 2, 1024, 64), (options.batch * 2, 256, 16)]
    for step in range(options.steps):
        batches = [associations(*size, 512, seed, step, device=training.device) for size in sizes]
        recent.append(training.step(batches, optimizer, 2e-3 * factor(step, options.steps)))
        if (step + 1) % options.every and step + 1 < options.steps:
            continue
        train, taught = torch.stack([torch.stack(one) for one in recent]).mean(0).tolist()
        per_step, recent = (time.perf_counter() - last) / len(recent), []
        measured: dict[str, Any] = {}
        with torch.no_grad():
            for pairs in (16, 32, 64):
                training.lesson.measure = pairs == 64
                tokens, targets = associations(64, 1024, pairs, 512, seed, 1 << 30, pairs, device=training.device)
                with training.autocast():
                    logits = training.model(tokens)
                asked = targets >= 0
                measured[f"recall_{pairs}"] = round((logits.argmax(-1) == targets)[asked].double().mean().item(), 4)
                measured["loss"] = round(
                    torch.nn.functional.cross_entropy(logits[asked].float(), targets[asked]).item(), 4
                )
            training.lesson.measure = False
        training.line(
            phase="recall", step=step + 1, train_loss=round(train, 4), choice_loss=round(taught, 4),
            step_ms=round(1000 * per_step, 1), **measured, **training.held(),
        )  # fmt: skip
        last = time.perf_counter()


def run_all(options: argparse.Namespace) -> int:
    """Each run in a process, so many at a time on each GPU, until the time is up."""
    deadline = time.monotonic() + options.seconds
    waiting: SimpleQueue[str] = SimpleQueue()
    for one in options.runs:
        waiting.put(one)
    known = sys.argv[1:]

    def work(gpu: int) -> None:
        while time.monotonic() < deadline:
            try:
                run = waiting.get_nowait()
            except Empty:
                return
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "2"}
            log = options.output.with_name(f"{run.replace(':', '_')}.log") if options.logs else Path(os.devnull)
            with log.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, __file__, *known, "--one", run],
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
            if process.returncode:
                print(
                    run, "ended with", process.returncode, log.read_text()[-1500:] if options.logs else "", flush=True
                )

    threads = [
        threading.Thread(target=work, args=(place % options.gpus,)) for place in range(options.gpus * options.jobs)
    ]
    for thread in threads:
        thread.start()
        # Not all at once: the first compiles kernels for the others.
        time.sleep(options.stagger)
    for thread in threads:
        thread.join()
    return 0


def main() -> int:
    """Train all runs, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["text", "recall"], default="text")
    parser.add_argument("--runs", nargs="+", default=[], metavar="VARIANT:SEED")
    parser.add_argument("--one", default="")
    parser.add_argument("--data", type=Path, default=Path("/tmp/chunks.npy"))
    parser.add_argument("--output", type=Path, default=Path("choice.jsonl"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--stagger", type=float, default=0.0)
    parser.add_argument("--logs", action="store_true")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--dim", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--short-steps", type=int, default=800)
    parser.add_argument("--long-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=150)
    options = parser.parse_args()
    usual = {"text": (6, 384, 32), "recall": (2, 256, 64)}[options.task]
    options.layers, options.dim, options.batch = (
        given or value for given, value in zip((options.layers, options.dim, options.batch), usual, strict=True)
    )
    if options.one:
        name, seed = options.one.split(":")
        {"text": text, "recall": recall}[options.task](name, int(seed), options)
        return 0
    if options.task == "text" and not options.data.exists():
        write_chunks(options.data)
    return run_all(options)


if __name__ == "__main__":
    sys.exit(main())
