"""Damaged data files of every kind: batches, or one line that names the fault; never a traceback."""

import gzip
import json
import random

import pytest

from tests.data.loaders import open_loader
from trifocal.errors import UserError

TRIES = 60


def texts():
    return [f"{number} gate lens ☃ " * (number % 7) for number in range(60)]


def write(path):
    if ".parquet" in path.name:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"id": list(range(60)), "text": texts()})
        parquet.write_table(table, path, row_group_size=25)
        return
    lines = [json.dumps({"text": text}) if ".jsonl" in path.name else text for text in texts()]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def damage(content, generator):
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
def test_damaged_files_give_batches_or_one_line(tmp_path, name):
    path, kind = tmp_path / name, name.split(".")[1]
    write(path)
    content = path.read_bytes()
    generator, refused = random.Random(1337), 0
    for _ in range(TRIES):
        path.write_bytes(damage(content, generator))
        settings = {"shuffle_sequences": 4, "shuffle_documents": 16}
        settings["on_bad_document"] = generator.choice(["stop", "skip"])
        try:
            with open_loader(f"{kind}:{path}", 64, 4, **settings) as loader:
                for _ in range(12):
                    assert next(loader).tokens.shape == (4, 64)
        except UserError as error:
            refused += 1
            message = str(error)
            assert message.isprintable() and str(path) in message and len(message) < 1000
    assert 0 < refused < TRIES
