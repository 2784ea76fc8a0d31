"""Damaged data files of every kind: batches, or one line that names the fault; never a traceback."""

from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path

import pytest

from trifocal.data import DataConfig, make_loader, make_tokenizer
from trifocal.errors import UserError

SECONDS = 3.0
"""For each kind of file; the damage is drawn from a fixed seed, so a slow machine sees less of the same."""


def texts() -> list[str]:
    return [f"{number} gate lens ☃ " * (number % 7) for number in range(60)]


def write(path: Path) -> None:
    if ".parquet" in path.name:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"id": list(range(60)), "text": texts()})
        parquet.write_table(table, path, row_group_size=25)
        return
    lines = [json.dumps({"text": text}) if ".jsonl" in path.name else text for text in texts()]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def damage(content: bytes, generator: random.Random) -> bytes:
    """Bits flipped (in the tail most often: the footer of parquet), bytes left out, doubled, overwritten or odd."""
    broken = bytearray(content)
    kind = generator.choice(["flip", "flip", "tail", "tail", "cut", "double", "zeros", "insert"])
    at = generator.randrange(len(broken))
    length = generator.randrange(1, 200)
    if kind == "tail":
        at = len(broken) - 1 - generator.randrange(min(len(broken), 1000))
    if kind in ("flip", "tail"):
        broken[at] ^= 1 << generator.randrange(8)
    elif kind == "cut":
        del broken[at : at + length]
    elif kind == "double":
        broken[at:at] = broken[at : at + length]
    elif kind == "zeros":
        broken[at : at + length] = bytes(len(broken[at : at + length]))
    else:
        odd = (b"\0", b"\xff\xfe", b"9" * 5000, b"[" * 5000, b'{"a":' * 2000, b"\\ud800", b"null", b"\x1b[2J")
        broken[at:at] = generator.choice(odd)
    return bytes(broken)


@pytest.mark.parametrize("name", ["a.text", "a.text.gz", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_damaged_files_give_batches_or_one_line(tmp_path: Path, name: str) -> None:
    path, kind = tmp_path / name, name.split(".")[1]
    write(path)
    content = path.read_bytes()
    generator = random.Random(1337)
    end = time.monotonic() + SECONDS
    tried, refused = 0, 0
    while tried < 400 and (time.monotonic() < end or tried < 20):
        path.write_bytes(damage(content, generator))
        config = DataConfig(
            source=f"{kind}:{path}",
            validation_fraction=0.05,
            shuffle_sequences=4,
            shuffle_documents=16,
            on_bad_document=generator.choice(["stop", "skip"]),
        )
        tried += 1
        try:
            with make_loader(
                config, tokenizer=make_tokenizer("bytes"), sequence_length=64, batch_size=4, vocab_size=257
            ) as loader:
                for _ in range(25):
                    assert next(loader).tokens.shape == (4, 64)
        except UserError as error:
            refused += 1
            message = str(error)
            assert message.isprintable() and str(path) in message and len(message) < 1000
    assert refused > 0 and tried >= 20
