"""`trifocal serve` as a process."""

import contextlib
import errno
import gc
import re
import shutil
import signal
import socket
import sys
import time
import urllib.request
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from openai import APIError, OpenAI
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests import warm
from tests.children import environment, wait_for_end
from tests.written_runs import wait_for
from trifocal.cli import main
from trifocal.cli import serve as server
from trifocal.cli.serve import ServeArguments
from trifocal.data import make_tokenizer
from trifocal.errors import UserError
from trifocal.inference.paged_cache import cache_bytes
from trifocal.train.checkpoint import pretrained
from trifocal.train.checkpoint.export import export_folder

SERVE = "import sys; from trifocal.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def folder(decoder, tmp_path):
    export_folder(decoder, make_tokenizer("bytes"), tmp_path / "tiny", sequence_length=96)
    return tmp_path / "tiny"


@contextlib.contextmanager
def serve(folder, *flags):
    """A server as a process, its address, and what it writes to standard error."""
    output, errors = folder.parent / "output", folder.parent / "errors"
    with output.open("w") as out, errors.open("w") as err:
        process = warm.popen(
            [sys.executable, "-c", SERVE, "serve", str(folder), "--port", "0", "--device", "cpu", *flags],
            stdout=out, stderr=err, env=environment(OMP_NUM_THREADS=1, TRIFOCAL_API_KEY="sesame"),
        )  # fmt: skip
    try:
        while not (found := re.search(r"^tiny is served on (http://127\.0\.0\.1:\d+)\n", output.read_text())):
            assert process.poll() is None, errors.read_text()
            time.sleep(0.05)
        yield process, found[1], errors
    finally:
        process.kill()
    assert "Traceback" not in errors.read_text()


def test_a_folder_is_served_until_a_signal(folder):
    with (
        serve(folder, "--max-length", "3000") as (process, url, errors),
        OpenAI(base_url=f"{url}/v1", api_key="sesame") as client,
    ):
        # Whoever serves has no data.tokenizer to set.
        assert "only completions, no chats: tokenizer bytes has no chat template\n" in errors.read_text()
        [model] = client.models.list()
        assert model.id == "tiny" and model.max_model_len == 3000
        options = {"prompt": "x", "max_tokens": 80, "stream": True, "extra_body": {"ignore_eos": True}}
        events = iter(client.completions.create(model="tiny", **options))
        next(events)
        process.send_signal(signal.SIGTERM)
        assert [event.choices[0].finish_reason for event in events][-1] == "length"
        assert wait_for_end(process, 30) == 0


def test_who_has_no_time_to_end_is_told(folder):
    """A stream, a whole answer and half a request, when the time after SIGTERM is over; `serve` looks at the log."""
    with (
        serve(folder, "--max-length", "30000", "--drain-seconds", "1") as (process, url, _),
        OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0) as client,
        ThreadPoolExecutor(2) as pool,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as begun,
    ):
        options = {"model": "tiny", "prompt": "x", "max_tokens": 29_000, "extra_body": {"ignore_eos": True}}
        events = iter(client.completions.create(stream=True, **options))
        next(events)
        begun.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer sesame\r\nContent-Length: 9\r\n\r\n{"
        )
        ends = [pool.submit(list, events), pool.submit(client.completions.create, **options)]

        def running():
            return "trifocal_requests_running 2" in urllib.request.urlopen(f"{url}/metrics").read().decode()

        wait_for(running)
        process.send_signal(signal.SIGTERM)
        for end in ends:
            with pytest.raises(APIError, match="the server was stopped before the answer had ended"):
                end.result(60)
        assert begun.recv(100).startswith(b"HTTP/1.1 503 ")
        assert wait_for_end(process, 30) == 0


def test_caches_on_a_cpu_take_no_more_than_they_may(folder, monkeypatch):
    found = pretrained.open_pretrained(folder)
    options = ServeArguments(path=str(folder), device="cpu", max_length=1000, precision="fp32")
    per_sequence = cache_bytes(found.config(), torch.float32, 1000).of_sequence(1000)
    monkeypatch.setattr("trifocal.cli.serve._CPU_CACHE_BYTES", 3 * per_sequence)

    def bytes_of(cache):
        return sum(tensor.nbytes for tensor in (*cache._pages, *cache._rings))

    served = server._load(found, options)
    assert served.max_sequences > 1 and per_sequence < bytes_of(served.cache) <= 4 * per_sequence
    asked = server._load(found, replace(options, max_sequences=6))
    assert asked.max_sequences == 6 and bytes_of(asked.cache) > 5 * per_sequence


def test_a_second_interrupt_ends_a_server_that_is_at_work(folder):
    with (
        serve(folder, "--max-length", "30000") as (process, url, errors),
        OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0) as client,
    ):
        options = {"prompt": "x", "max_tokens": 29_000, "stream": True, "extra_body": {"ignore_eos": True}}
        events = iter(client.completions.create(model="tiny", **options))
        next(events)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            # The first one is in effect when nobody new is taken.
            while True:
                socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
        next(events)
        process.send_signal(signal.SIGINT)
        assert wait_for_end(process, 30) == 130 and errors.read_text().count("\n") == 1


def test_the_model_of_the_package_has_its_name_and_pictures(folder, tmp_path, monkeypatch, capsys):
    """A server without them keeps no model but that of its engine, and one with them loads it when it is asked to."""
    monkeypatch.chdir(tmp_path)
    package = shutil.copytree(folder, tmp_path / "package")
    for module in (pretrained, server):
        monkeypatch.setattr(module, "DEMO_FOLDER", package)
    seconds = []
    pictures = []
    made = []
    healthy = pretrained.Pretrained.model

    def load(self):
        model = healthy(self)
        made.append(weakref.ref(model))
        return model

    def run_server(app, listeners, **options):
        seconds.append(options)
        gc.collect()
        assert [model() for model in made] == [None]
        with TestClient(app) as client:
            pictures.append(client.get("/v1/models").json()["data"][0]["pictures"])
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).json()
            assert client.get(f"/attention/{answer['id']}").status_code == (200 if pictures[-1] else 404)
        assert len(made) == 1 + pictures[-1]
        made.clear()

    monkeypatch.setattr(pretrained.Pretrained, "model", load)
    monkeypatch.setattr(server, "run_server", run_server)
    for path, options, name in (
        ("demo", [], "demo"), ("demo", ["--name", "other"], "other"), (str(folder), [], "tiny"),
        (str(folder), ["--pictures"], "tiny"),
    ):  # fmt: skip
        assert main(["serve", path, "--port", "0", "--device", "cpu", *options]) == 0
        assert capsys.readouterr().out.startswith(f"{name} is served on http://127.0.0.1:")
    assert pictures == [True, True, False, True]
    # Proxies keep idle connections for 60 seconds, and must not send into one that is being closed.
    assert seconds == [{"drain_seconds": 60, "keep_alive_seconds": 75}] * 4
    assert server.make_server(Starlette(), **seconds[0]).config.timeout_keep_alive == 75


@pytest.mark.parametrize(
    ("host", "reached"), [("localhost", "127.0.0.1 ::1"), ("::", "127.0.0.1 ::1"), ("0.0.0.0", "127.0.0.1")]
)
def test_both_families_reach_the_port(host, reached):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    listeners = server.listen(host, 0)
    with contextlib.ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        port = listeners[0].getsockname()[1]
        for address in reached.split():
            socket.create_connection((address, port), timeout=10).close()


def test_a_machine_without_ipv6_has_a_localhost(monkeypatch):
    healthy = socket.create_server

    def create_server(address, **options):
        if ":" in address[0]:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return healthy(address, **options)

    monkeypatch.setattr(socket, "create_server", create_server)
    [listener] = server.listen("localhost", 0)
    listener.close()
    for host in ("::1", "x" * 300):
        with pytest.raises(UserError, match="choose another --host or --port"):
            server.listen(host, 0)


def test_what_cannot_be_served_is_refused(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, message in (
            (["--port", str(taken.getsockname()[1])], "choose another --host or --port"),
            (["--port", "65536"], "--port may be at most 65535, got 65536"),
            (["--precision", "int9"], "--precision"),
            (["--max-waiting", "-1"], "--max-waiting must be at least 0, got -1"),
            (["--port", "0", "--max-length", "1000000000000"], "do: lower --max-length"),
        ):
            assert main(["serve", str(folder), *arguments]) == 2
            assert message in capsys.readouterr().err
