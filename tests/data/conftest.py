"""A server of files that misbehaves on order, texts to read, and a watch over threads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

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
    # tqdm, which datasets uses, keeps one thread of its own for the whole process.
    assert {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"} <= before


class FaultyServer:
    """Serves files by ranges from this machine; `faults[i]` is what happens to request `i`.

    A fault is a status code, `cut` (half of the bytes, then the connection ends), `drop` (ends without a word) or
    `silence` (nothing until the server is closed, or the client gives up).
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.faults: dict[int, int | str] = {}
        self.always: int | str | None = None
        self.retry_after: str | None = None
        self.ranges = True
        self.requests: list[tuple[str, float]] = []
        self.authorizations: list[str | None] = []
        self.redirects: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Quiet."""

            def do_GET(self) -> None:
                owner.answer(self)

        class Server(ThreadingHTTPServer):
            daemon_threads = False
            block_on_close = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        with self._lock:
            number = len(self.requests)
            self.requests.append((handler.path, time.monotonic()))
            self.authorizations.append(handler.headers.get("Authorization"))
        fault = self.faults.get(number, self.always)
        if fault == "silence":
            self._closing.wait(20)
        if fault in ("silence", "drop"):
            handler.close_connection = True
            return
        if handler.path in self.redirects:
            handler.send_response(302)
            handler.send_header("Location", self.redirects[handler.path])
            handler.end_headers()
            return
        if isinstance(fault, int):
            handler.send_response(fault)
            if self.retry_after is not None:
                handler.send_header("Retry-After", self.retry_after)
            handler.end_headers()
            return
        body = self.files.get(handler.path.lstrip("/"))
        if body is None:
            handler.send_error(404)
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        part = body
        if self.ranges and match is not None:
            first, last = int(match[1]), min(int(match[2]), len(body) - 1)
            part = body[first : last + 1]
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(part)))
        handler.end_headers()
        handler.wfile.write(part[: len(part) // 2] if fault == "cut" else part)

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, bytes]], FaultyServer]]:
    """Starts a server of files given by name; closed after the test."""
    servers: list[FaultyServer] = []

    def start(files: dict[str, bytes]) -> FaultyServer:
        servers.append(FaultyServer(files))
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
