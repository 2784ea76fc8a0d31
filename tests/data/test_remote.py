"""Parquet from a server that fails in every way it can: the same tokens, or a clear stop in bounded time."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.train.tiny import make_config

from trifocal.cli import main
from trifocal.data import DataConfig, DataError, Loader, make_loader, make_tokenizer
from trifocal.data.activity import Activity
from trifocal.data.remote import HttpClient, HttpFile
from trifocal.errors import UserError
from trifocal.train import load_config, resume, run_logger, train

pytest.importorskip("pyarrow")

ROWS_READ = 40
QUICK = DataConfig(retry_attempts=2, retry_base_seconds=0.01, request_timeout_seconds=5.0)


@pytest.fixture
def files(write_parquet: Callable[..., Path], texts: Callable[..., list[str]]) -> dict[str, bytes]:
    return {
        f"{number}.parquet": write_parquet(f"{number}.parquet", texts(60, seed=number)).read_bytes()
        for number in range(3)
    }


def open_loader(server: Any, files: dict[str, bytes], **settings: Any) -> Loader:
    settings = {
        "retry_base_seconds": 0.01,
        "retry_max_seconds": 0.5,
        "retry_attempts": 4,
        "request_timeout_seconds": 5.0,
        "shuffle_documents": 16,
        "shuffle_sequences": 8,
        "stall_limit_seconds": 60.0,
    } | settings
    source = "parquet:" + ",".join(f"{server.url}/{name}" for name in files)
    return make_loader(
        DataConfig(source=source, **settings),
        tokenizer=make_tokenizer("bytes"),
        sequence_length=256,
        batch_size=2,
        vocab_size=257,
    )


def read(loader: Loader, count: int = ROWS_READ) -> list[tuple[list[list[int]], tuple[str, ...]]]:
    batches = []
    for _ in range(count):
        batch = next(loader)
        names = tuple(name.rpartition("/")[2] for name in batch.document_ids)
        batches.append((batch.tokens.tolist(), names))
    return batches


@pytest.fixture
def unharmed(serve: Callable[..., Any], files: dict[str, bytes]) -> tuple[list[Any], int]:
    """The right batches, and how many requests they take."""
    server = serve(files)
    with open_loader(server, files, prefetch_batches=1) as loader:
        batches = read(loader)
        return batches, len(server.requests)


def test_served_files_equal_local_ones(unharmed: tuple[list[Any], int], tmp_path: Path) -> None:
    config = DataConfig(source=f"parquet:{tmp_path}", shuffle_documents=16, shuffle_sequences=8)
    with make_loader(
        config, tokenizer=make_tokenizer("bytes"), sequence_length=256, batch_size=2, vocab_size=257
    ) as loader:
        assert read(loader) == unharmed[0]


@pytest.mark.parametrize("fault", [429, 500, 503, "cut", "drop"])
def test_a_failure_at_any_request_changes_nothing(
    serve: Callable[..., Any], files: dict[str, bytes], unharmed: tuple[list[Any], int], fault: int | str
) -> None:
    batches, requests = unharmed
    assert requests > 15
    for at in range(0, requests - 3, 3):
        server = serve(files)
        # Two in a row, then one that comes with the retry's own requests.
        server.faults = {at: fault, at + 1: fault, at + 3: fault}
        with open_loader(server, files) as loader:
            assert read(loader) == batches
        assert len(server.requests) > at + 3


def test_silence_is_a_failure_like_the_others(
    serve: Callable[..., Any], files: dict[str, bytes], unharmed: tuple[list[Any], int]
) -> None:
    server = serve(files)
    server.faults = {0: "silence", 4: "silence"}
    begin = time.monotonic()
    with open_loader(server, files, request_timeout_seconds=0.3) as loader:
        assert read(loader) == unharmed[0]
    assert 0.6 < time.monotonic() - begin < 15


def test_retry_after_is_respected(
    serve: Callable[..., Any], files: dict[str, bytes], unharmed: tuple[list[Any], int]
) -> None:
    server = serve(files)
    server.faults = {5: 429}
    server.retry_after = "1"
    with open_loader(server, files, retry_max_seconds=30.0) as loader:
        assert read(loader) == unharmed[0]
    pause = server.requests[6][1] - server.requests[5][1]
    assert 0.95 < pause < 6


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (429, "HTTP 429 Too Many Requests"),
        (500, "HTTP 500 Internal Server Error"),
        ("cut", "RemoteProtocolError: peer closed connection without sending complete message body"),
        ("drop", "RemoteProtocolError: Server disconnected"),
        ("silence", "silent for longer than data.request_timeout_seconds"),
    ],
)
def test_giving_up_is_clear_and_in_time(
    serve: Callable[..., Any], files: dict[str, bytes], fault: int | str, message: str
) -> None:
    server = serve(files)
    server.always = fault
    begin = time.monotonic()
    with (
        open_loader(server, files, request_timeout_seconds=0.3) as loader,
        pytest.raises(DataError, match=r"gave up after 4 attempts; the last error: ") as info,
    ):
        next(loader)
    # Four silences of 0.3 s and three pauses of at most 0.04 s, on a busy machine.
    assert time.monotonic() - begin < 10
    text = str(info.value)
    assert message in text and f"{server.url}/" in text and "\n" not in text
    assert len(server.requests) == 4


def test_giving_up_after_good_batches(serve: Callable[..., Any], files: dict[str, bytes]) -> None:
    server = serve(files)
    server.faults = dict.fromkeys(range(6, 60), 500)
    with open_loader(server, files) as loader, pytest.raises(DataError, match="gave up after 4 attempts"):
        read(loader)
    assert len(server.requests) == 10


@pytest.mark.parametrize(
    ("fault", "message"), [(404, "HTTP 404 .*check the address"), (401, "needs a login"), (403, "refused")]
)
def test_what_will_not_pass_stops_at_once(
    serve: Callable[..., Any], files: dict[str, bytes], fault: int, message: str
) -> None:
    server = serve(files)
    server.always = fault
    with open_loader(server, files) as loader, pytest.raises(UserError, match=message):
        next(loader)
    assert len(server.requests) == 1


def test_a_server_that_is_not_there(serve: Callable[..., Any], files: dict[str, bytes]) -> None:
    server = serve(files)
    server.close()
    with open_loader(server, files) as loader, pytest.raises(DataError, match=r"ConnectError: .*Connection refused"):
        next(loader)


def test_a_server_without_ranges(serve: Callable[..., Any], files: dict[str, bytes]) -> None:
    server = serve(files)
    server.ranges = False
    with open_loader(server, files) as loader, pytest.raises(UserError, match="does not serve parts of files"):
        next(loader)


def test_a_missing_field_on_a_server(serve: Callable[..., Any], files: dict[str, bytes]) -> None:
    server = serve(files)
    config = DataConfig(source=f"parquet:{server.url}/0.parquet#body")
    with (
        make_loader(
            config, tokenizer=make_tokenizer("bytes"), sequence_length=16, batch_size=1, vocab_size=257
        ) as loader,
        pytest.raises(UserError, match=r"0\.parquet has no field 'body'; its fields are id, text"),
    ):
        next(loader)


def test_a_file_that_is_no_parquet_on_a_server(serve: Callable[..., Any]) -> None:
    server = serve({"a.parquet": b"<html>" * 100})
    with open_loader(server, server.files) as loader, pytest.raises(UserError, match="is not a readable parquet file"):
        next(loader)


def test_resume_from_a_server_reads_little(
    serve: Callable[..., Any], write_parquet: Callable[..., Path], texts: Callable[..., list[str]]
) -> None:
    files = {"a.parquet": write_parquet("a.parquet", texts(800)).read_bytes()}
    server = serve(files)
    with open_loader(server, files, prefetch_batches=1) as loader:
        read(loader, 160)
        state = loader.state_dict()
        following = read(loader, 2)
    # Size and footer, and 160 batches out of some forty row groups.
    assert len(server.requests) > 30
    assert state["position"]["start"]["epoch"] == 0
    server.requests.clear()
    with open_loader(server, files, prefetch_batches=1) as loader:
        loader.load_state_dict(state)
        assert read(loader, 2) == following
    # Size and footer, and the row groups of these batches and of those made ahead.
    assert len(server.requests) <= 8


def test_a_silent_server_is_reported_and_closing_does_not_wait_for_it(
    serve: Callable[..., Any], files: dict[str, bytes]
) -> None:
    server = serve(files)
    server.always = "silence"
    source = f"parquet:{server.url}/0.parquet"
    reports: list[str] = []
    loader = make_loader(
        DataConfig(
            source=source,
            request_timeout_seconds=15.0,
            retry_attempts=1,
            stall_seconds=0.1,
            stall_limit_seconds=0.35,
        ),
        tokenizer=make_tokenizer("bytes"),
        sequence_length=16,
        batch_size=1,
        vocab_size=257,
        on_stall=lambda age, activity: reports.append(activity),
    )
    begin = time.monotonic()
    with pytest.raises(DataError, match=rf"data stall: .*waiting for {server.url}/0\.parquet"):
        next(loader)
    loader.close()
    assert time.monotonic() - begin < 5
    assert reports == [f"waiting for {server.url}/0.parquet"] * 3
    # The thread that was left behind makes nothing more: it ends with its attempts.
    server.close()
    for thread in threading.enumerate():
        if thread.name == "trifocal-data":
            thread.join(10)
            assert not thread.is_alive()
    assert len(server.requests) == 1


def test_a_changed_file_is_noticed(serve: Callable[..., Any]) -> None:
    server = serve({"a": b"0123456789"})
    file = HttpFile(HttpClient(QUICK, Activity()), f"{server.url}/a")
    assert file.read(4) == b"0123"
    server.files["a"] = b"0123456789abc"
    with pytest.raises(DataError, match=r"changed while it was read: 10 bytes before, 13 now"):
        file.read(4)


def test_reading_anywhere(serve: Callable[..., Any]) -> None:
    content = bytes(range(256)) * 40
    server = serve({"a": content})
    file = HttpFile(HttpClient(QUICK, Activity()), f"{server.url}/a")
    assert file.size == len(content)
    assert (file.seek(-10, 2), file.read()) == (len(content) - 10, content[-10:])
    assert file.read(5) == b""
    assert (file.seek(300), file.read(1000), file.tell()) == (300, content[300:1300], 1300)
    assert (file.seek(-100, 1), file.read(3)) == (1200, content[1200:1203])
    with pytest.raises(DataError, match="gave up after 2 attempts"):
        server.always = 503
        file.read(1)


def test_the_login_is_not_sent_on_to_another_server(serve: Callable[..., Any]) -> None:
    store = serve({"data": b"0123456789"})
    hub = serve({})
    hub.redirects["/a"] = f"{store.url}/data"
    client = HttpClient(QUICK, Activity(), {"Authorization": "Bearer example"})
    assert client.get(f"{hub.url}/a", 2, 5) == (b"234", 10)
    assert hub.authorizations == ["Bearer example"]
    assert store.authorizations == [None]


def test_a_password_of_the_data_is_in_no_file_and_given_again_to_go_on(
    tmp_path: Path,
    serve: Callable[..., Any],
    files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sent: list[object] = []
    monkeypatch.setattr(run_logger, "make_sinks", lambda *_, config, **__: sent.append(config) or [])
    server, run = serve(files), tmp_path / "run"
    server.faults = {3: 500}
    host = server.url.removeprefix("http://")
    source = ",".join(f"http://me:hunter2@{host}/{name}?X-Amz-Signature=hunter2" for name in files)
    flags = (
        "--data.source",
        f"parquet:{source}",
        "--data.retry_base_seconds",
        "0.01",
        "--evaluate.interval_steps",
        "0",
    )
    assert train(make_config(tmp_path, *flags, "--train.steps", "2")).finished
    assert set(server.authorizations) == {"Basic " + base64.b64encode(b"me:hunter2").decode()}
    with pytest.raises(UserError, match=r"has \*\*\* in place of a secret, .* with --data\.source"):
        resume(run, config=load_config(run / "config.toml", ("--train.steps", "3")))
    again = ["train", "--resume", str(run), "--train.steps", "3", *flags[:2]]
    assert main(again) == 0
    # Whose password is wrong now is told so without it.
    server.always = 401
    assert main([*again, "--train.steps", "4"]) == 2
    captured = capfd.readouterr()
    assert "HTTP 401" in captured.err
    written = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert len(written) > 10 and b"X-Amz-Signature=***" in (run / "config.toml").read_bytes()
    assert not any(b"hunter2" in content for content in [*written, repr(sent).encode()])
    assert "hunter2" not in captured.out + captured.err
