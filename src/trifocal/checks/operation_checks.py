"""Checks of the machinery around training: the heartbeat, the flags, the data sources."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from trifocal.checks.measurement import Measurement
from trifocal.data import Batch, DataConfig, Loader, make_tokenizer
from trifocal.errors import UserError
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.jsonl import Row, read_lines
from trifocal.train.config.load import load_config

BUSY_SECONDS = 0.8
INTERVAL_SECONDS = 0.05
TRIES = 5

BAD_OVERRIDES = (
    ("--override", "train.steps=5"),
    ("--precision", "bf16"),
    ("--train.stepz", "5"),
    ("--train.steps", "many"),
    ("--train.steps", "-1"),
    ("--train.precision", "fp8"),
    ("--train.steps",),
)
GOOD_TABLE = "[model]\nnum_layers = 1\n"
BAD_TABLES = ("[train]\nstepz = 5\n", "[trian]\nsteps = 5\n", '[train]\nsteps = "5"\n', "steps = 5\n", "[train\n")


def heartbeat(_device: torch.device) -> Measurement:
    """The heartbeat continues while the training thread is inside one long operation, and names its phase and age.

    The figure is the longest silence, as a share of the operation; of up to five operations the best, because a busy
    machine can keep any thread waiting. Bound: a half; a heartbeat that only the training thread writes is silent for
    all of every operation.
    """
    size, tries = 400, list[Measurement]()
    while len(tries) < TRIES and not any(found.passed for found in tries):
        matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
        with tempfile.TemporaryDirectory(prefix="trifocal-check-") as folder:
            with Heartbeat(Path(folder), 0, INTERVAL_SECONDS) as beat, beat.phase("backward"):
                begin = time.time()
                torch.linalg.svdvals(matrix)
                end = time.time()
            rows = [row for path in Path(folder).glob("*.jsonl") for row in read_lines(path)]
        if end - begin < BUSY_SECONDS / 2:
            # Cubic work: a little over twice as long.
            size = size * 4 // 3
        else:
            tries.append(_longest_silence(rows, begin, end))
    return min(tries, key=lambda found: found.figure)


def _longest_silence(rows: list[Row], begin: float, end: float) -> Measurement:
    busy = [row for row in rows if row["phase"] == "backward" and begin <= row["unix_time_seconds"] <= end]
    ages = [row["phase_seconds"] for row in busy]
    if ages != sorted(set(ages)):
        return Measurement(float("inf"), 0.5, "of its time", ("the age of the phase does not grow",))
    moments = [begin, *(row["unix_time_seconds"] for row in busy), end]
    silence = max(b - a for a, b in pairwise(moments))
    detail = f"{len(busy)} beats in an operation of {end - begin:.2f} s, longest silence {silence:.2f} s"
    return Measurement(silence / (end - begin), 0.5, "of its time", (detail,))


def unknown_flags(_device: torch.device) -> Measurement:
    """A flag or key that does not exist, or a value that does not fit, is refused in one line that names it.

    The figure counts those that were accepted or refused without a name. Bound: none.
    """
    accepted = []
    with tempfile.TemporaryDirectory(prefix="trifocal-check-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(GOOD_TABLE, encoding="utf-8")
        load_config(path, ["--train.steps", "7"])
        for overrides in BAD_OVERRIDES:
            if not _refused(partial(load_config, path, list(overrides)), overrides[0].lstrip("-")):
                accepted.append(" ".join(overrides))
        for table in BAD_TABLES:
            path.write_text(f"{table}\n{GOOD_TABLE}", encoding="utf-8")
            if not _refused(partial(load_config, path, []), ""):
                accepted.append(table.strip().replace("\n", " "))
    total = len(BAD_OVERRIDES) + len(BAD_TABLES)
    return Measurement(len(accepted), 0, "accepted", (f"{total} tried", *accepted[:4]))


def _refused(load: Callable[[], object], name: str) -> bool:
    try:
        load()
    except UserError as error:
        return name in str(error) and "\n" not in str(error)
    return False


def first_batch(config: DataConfig) -> Batch:
    """The first training batch of a source, through the real loader."""
    tokenizer = make_tokenizer(config.tokenizer)
    with Loader(config, tokenizer=tokenizer, sequence_length=16, batch_size=1, vocab_size=257) as loader:
        return next(loader)


def failing_source(_device: torch.device) -> Measurement:
    """A data source that fails raises; there is no fallback to other data.

    The figure counts failing sources that gave a batch all the same. Bound: none.
    """
    gave = []
    with tempfile.TemporaryDirectory(prefix="trifocal-check-") as name:
        folder = Path(name)
        (folder / "empty").mkdir()
        (folder / "empty.txt").touch()
        (folder / "latin1.txt").write_bytes("für".encode("latin-1") * 100)
        (folder / "broken.jsonl").write_text('{"text": "a"\n', encoding="utf-8")
        (folder / "field.jsonl").write_text('{"body": "a"}\n' * 50, encoding="utf-8")
        (folder / "good.txt").write_text("A text that can be read.\n" * 50, encoding="utf-8")
        first_batch(DataConfig(source=f"text:{folder / 'good.txt'}", validation_fraction=0.0))
        sources = (
            f"text:{folder / 'missing.txt'}",
            f"text:{folder / 'empty'}",
            f"text:{folder / 'empty.txt'}",
            f"text:{folder / 'latin1.txt'}",
            f"jsonl:{folder / 'broken.jsonl'}#text",
            f"jsonl:{folder / 'field.jsonl'}#text",
            f"fineweb-edu:{folder / 'missing'}",
        )
        for source in sources:
            try:
                first_batch(DataConfig(source=source, validation_fraction=0.0))
            except (UserError, OSError):
                continue
            gave.append(source.replace(name, "…"))
    return Measurement(len(gave), 0, "sources", (f"{len(sources)} tried", *gave[:4]))
