"""Texts to read, servers to read them from, and a watch over threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data.server import FaultyServer

WORDS = ["gate", "lens", "block", "far", "near", "ümlaut", "☃", "key", "value", "query", "head", "\n"]


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Distinct texts of very different lengths, with characters of more than one byte."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, count)
    return [f"{i} " + " ".join(random.choice(WORDS, n)) for i, n in enumerate(lengths)]


@pytest.fixture
def texts() -> Callable[..., list[str]]:
    return make_texts


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    # tqdm, which datasets uses, keeps its own thread for the whole process.
    assert {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"} <= before


@pytest.fixture
def serve() -> Iterator[Callable[..., FaultyServer]]:
    """Starts a server of files given by name; closed after the test."""
    servers: list[FaultyServer] = []

    def start(files: dict[str, bytes], kind: type[FaultyServer] = FaultyServer) -> FaultyServer:
        servers.append(kind(files))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., Path]:
    """Writes texts as a parquet file with small row groups."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    def write(name: str, texts: list[str | None], *, field: str = "text", rows: int = 16) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table({"id": list(range(len(texts))), field: pyarrow.array(texts, pyarrow.string())})
        parquet.write_table(table, path, row_group_size=rows)
        return path

    return write
