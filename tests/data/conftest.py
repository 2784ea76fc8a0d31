"""Texts to read, servers to read them from, and a watch over threads."""

import threading

import numpy as np
import pytest

from tests.data.server import FileServer

WORDS = ["gate", "lens", "block", "far", "near", "ümlaut", "☃", "key", "value", "query", "head", "\n"]


@pytest.fixture
def texts():
    """Makes distinct texts of very different lengths, with characters of more than one byte."""

    def make(count, seed=0, longest=60):
        random = np.random.default_rng(seed)
        lengths = random.integers(0, longest, count)
        return [f"{i} " + " ".join(random.choice(WORDS, n)) for i, n in enumerate(lengths)]

    return make


@pytest.fixture(autouse=True)
def _no_threads_left():
    before = set(threading.enumerate())
    yield
    # tqdm, which datasets uses, keeps its own thread for the whole process.
    assert {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"} <= before


@pytest.fixture
def serve():
    """Starts a server of files given by name; closed after the test."""
    servers = []

    def start(files, kind=FileServer):
        servers.append(kind(files))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def write_parquet(tmp_path):
    """Writes texts as a parquet file with small row groups."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    def write(name, texts, *, field="text", rows=16):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table({"id": list(range(len(texts))), field: pyarrow.array(texts, pyarrow.string())})
        parquet.write_table(table, path, row_group_size=rows)
        return path

    return write
