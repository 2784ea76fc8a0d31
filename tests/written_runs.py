"""A run directory to read, written by the real writers, and a real browser to look at pages with."""

import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from trifocal.ops import Geometry
from trifocal.runlog.environment import write_environment
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.jsonl import JsonLinesWriter
from trifocal.runlog.metrics import MetricsWriter
from trifocal.runlog.proc import process_start
from trifocal.telemetry.attention_picture import AttentionPicture

CONFIG = """\
[run]
directory = "{directory}"
seed = 1337

[model]
vocab_size = 257
dim = 128
num_layers = {layers}
attention = "nsa"

[model.geometry]
window_size = 64

[data]
source = "builtin"

[train]
steps = {steps}

[optimizer]
learning_rate = {learning_rate}
"""


def beat(**fields):
    """A heartbeat row as a healthy rank in the middle of training writes it, with some fields replaced."""
    row = Heartbeat(Path(os.devnull)).snapshot()
    row |= {
        "step": 100,
        "phase": "forward",
        "phase_seconds": 0.1,
        "expected_phase_seconds": 0.2,
        "stall_limit_seconds": 120.0,
        "total_seconds": {"start": 3.0, "data": 9.0, "forward": 200.0, "backward": 410.0, "optimizer": 55.0},
        "where": "forward (attention.py:190)",
    }
    if "pid" in fields:
        row["process_start"] = process_start(fields["pid"])
    return row | fields


def wait_for(condition, seconds=60.0):
    """Wait until something has happened, however slow the machine is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


class Clock:
    """A clock that moves when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pass_seconds(self, seconds):
        """Let time pass."""
        self.now += seconds


def write_run(directory, *, steps=2000, learning_rate=3e-4, layers=4, gpu=False, telemetry=True, ranks=1):
    """Write a run whose figures look like those of a real one."""
    rng = random.Random(0)
    directory.mkdir(parents=True)
    text = CONFIG.format(directory=directory.name, layers=layers, steps=steps, learning_rate=learning_rate)
    (directory / "config.toml").write_text(text)
    write_environment(directory / "env.json", text)
    began = time.time() - 700
    with MetricsWriter(directory / "metrics.jsonl") as metrics:
        for step in range(10, steps + 1, 10):
            done = step / steps
            loss = 1.6 + 3.95 * math.exp(-6 * done)
            rate = (41_000 if not gpu else 410_000) * (1 + rng.gauss(0, 0.02))
            metrics.write(
                "train",
                step,
                loss=loss + rng.gauss(0, 0.06),
                learning_rate=learning_rate * min(1, done / 0.05) * (0.55 + 0.45 * math.cos(math.pi * done)),
                gradient_norm=math.exp(rng.gauss(-0.5 - done, 0.25)),
                tokens_per_second=rate,
                step_seconds=1024 / rate,
                data_wait_seconds_p50=2e-4,
                data_wait_seconds_p95=9e-4 * (1 + rng.random()),
                tokens_seen=step * 1024,
                epoch=0,
                memory_allocated_bytes=int(0.7e9 + 2e6 * rng.random()),
                memory_reserved_bytes=int(1.1e9) if gpu else None,
                executed_mfu=0.41 + rng.gauss(0, 0.01) if gpu else None,
                dense_equivalent_mfu=0.55 + rng.gauss(0, 0.01) if gpu else None,
            )
            if step % 100 == 0:
                metrics.write(
                    "evaluation",
                    step,
                    validation_loss=loss + 0.08,
                    perplexity=math.exp(loss + 0.08),
                    bits_per_byte=(loss + 0.08) / math.log(2),
                )
                for layer in range(layers if telemetry else 0):
                    metrics.write("telemetry", step, layer=layer, **telemetry_fields(done, layer, layers))
        metrics.event(steps // 2, "checkpoint_saved", f"saved checkpoints/step_{steps // 2}")
        metrics.event(steps, "checkpoint_saved", f"saved checkpoints/step_{steps}")
    for rank in range(ranks):
        with JsonLinesWriter(directory / "heartbeat" / f"rank{rank}.jsonl") as writer:
            totals = {"start": 2.0, "data": 6.0, "forward": 210.0, "backward": 390.0}
            totals |= {"optimizer": 52.0, "evaluate": 24.0, "checkpoint": 3.0, "other": 4.0}
            middle = {name: seconds / 2 for name, seconds in totals.items()}
            writer.append(beat(rank=rank, step=steps // 2, total_seconds=middle, unix_time_seconds=began + 350))
            writer.append(beat(rank=rank, step=steps, status="finished", total_seconds=totals))
    if telemetry:
        for step in (steps // 2, steps):
            write_picture(directory, step, layers)
    (directory / "samples").mkdir()
    for index in range(4):
        step = steps * (index + 1) // 4
        sample = 'def forward(self, x):\n    """Return <b>x</b> & more."""\n    return x\n' * (index + 1)
        (directory / "samples" / f"step_{step:08}.txt").write_text(sample)
    return directory


def telemetry_fields(done, layer, layers):
    """One layer's telemetry: compressed gates close with depth, selection learns to look further."""
    depth = layer / max(1, layers - 1)
    fields = {}
    shown = {"cmp": 0.4, "slc": 0.3, "win": 0.3}
    for branch, level in (("cmp", 0.5 - 0.3 * done * depth), ("slc", 0.5 + 0.2 * done), ("win", 0.5 + 0.3 * done)):
        fields[f"gate_mean_{branch}"] = level
        fields[f"gate_share_{branch}"] = shown[branch]
        fields[f"gate_entropy_{branch}"] = -level * math.log(level) - (1 - level) * math.log(1 - level)
    shares = [0.3, 0.2, 0.2, 0.15, 0.1 + 0.03 * done * depth]
    return fields | {
        "selected_distance_shares": [*shares, 1 - sum(shares)],
        "selected_forced_share": 0.375,
        "choice_recall": 0.4 + 0.3 * done,
        "recall_by_chance": 0.35,
        "exact_mass_by_distance": [0.0, 0.0, 0.4, 0.3, 0.2, 0.1],
        "held_mass_by_distance": [0.0, 0.0, *((0.4 + 0.3 * done) * share for share in (0.5, 0.3, 0.15, 0.05))],
        "free_local_share": 0.1,
        "neighbour_overlap": 0.7 + 0.1 * depth,
        "blocks_of_neighbours": [1.2, 1.4 - 0.1 * depth, None],
        "selected_count_shares": [0.0, 0.05, 0.1, 0.1, 0.75],
        "fewer_than_n_share": 0.25,
    }


GEOMETRY = Geometry(8, 4, 8, 4, num_initial_blocks=1, num_local_blocks=1, window_size=12)
TEXT = "def add(a, b):\n    return a + b\n∎# <script>: a second document that is longer than the first one &c.\n"


def write_picture(directory, step, layers):
    """A picture of two documents: every query chooses the latest blocks, and full attention likes the first."""
    texts = list(TEXT)
    second = texts.index("∎") + 1
    documents = np.array([int(t >= second) for t in range(len(texts))], dtype=np.int32)
    positions = np.array([t - second if t >= second else t for t in range(len(texts))], dtype=np.int32)
    queries = np.arange(len(texts), dtype=np.int32)
    blocks = GEOMETRY.num_selection_blocks(len(texts))
    shape = (layers, len(texts), 2)
    selected = np.full((*shape, 4), -1, dtype=np.int16)
    importance, dense = np.zeros((*shape, blocks), dtype=np.uint8), np.zeros((*shape, blocks), dtype=np.uint8)
    for t in range(len(texts)):
        own = positions[t] // 8
        chosen = sorted({0, *range(max(0, own - 2), own + 1)})
        selected[:, t, :, : len(chosen)] = chosen
        importance[:, t, :, : own + 1] = round(255 * (1 / (own + 1)) ** 0.5)
        dense[:, t, :, 0] = 255
    gates = np.full((*shape, 3), 128, dtype=np.uint8)
    gates[1:2] = 0, 255, 0  # a layer of selected attention alone
    # Behind them a window and a dense layer, in front of the last.
    layers = [*range(len(gates) - 1), len(gates) + 1]
    others = [[len(gates) - 1, 20], [len(gates), 0]]
    picture = AttentionPicture(
        step, GEOMETRY, texts, layers, positions, documents, queries, selected, importance, dense, gates, others
    )
    picture.save(directory / "attention" / f"step_{step:08}.npz")


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def make_run(tmp_path):
    """Writes a run directory of this name under the test's own folder."""

    def make(name="showcase", **settings):
        return write_run(tmp_path / name, **settings)

    return make


def set_last_beat(run, rank=0, **fields):
    """Append a heartbeat row with these fields."""
    with JsonLinesWriter(run / "heartbeat" / f"rank{rank}.jsonl") as writer:
        writer.append(json.loads(json.dumps(beat(rank=rank, **fields))))
