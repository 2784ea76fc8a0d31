"""`trifocal serve` as a process."""

import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests import warm
from tests.children import environment
from trifocal.cli import main
from trifocal.data import make_tokenizer
from trifocal.models import DecoderLM
from trifocal.serve import run as server
from trifocal.train.checkpoint import pretrained
from trifocal.train.checkpoint.export import export_folder

SERVE = "import sys; from trifocal.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def folder(decoder: DecoderLM, tmp_path: Path) -> Path:
    export_folder(decoder, make_tokenizer("bytes"), tmp_path / "tiny", sequence_length=96)
    return tmp_path / "tiny"


def test_a_folder_is_served_until_a_signal(folder: Path, tmp_path: Path) -> None:
    output, errors = tmp_path / "output", tmp_path / "errors"
    arguments = ["serve", str(folder), "--port", "0", "--device", "cpu", "--max-length", "3000", "--weights", "int8"]
    with output.open("w") as out, errors.open("w") as err:
        process = warm.popen(
            [sys.executable, "-c", SERVE, *arguments], stdout=out, stderr=err,
            env=environment(OMP_NUM_THREADS=1, TRIFOCAL_API_KEY="sesame"),
        )  # fmt: skip
    try:
        while not (found := re.search(r"^tiny is served on (http://127\.0\.0\.1:\d+)\n", output.read_text())):
            assert process.poll() is None, errors.read_text()
            time.sleep(0.05)
        # Whoever serves has no data.tokenizer to set.
        assert "completions alone, no chats: tokenizer bytes has no chat template\n" in errors.read_text()
        client = OpenAI(base_url=f"{found[1]}/v1", api_key="sesame")
        [model] = client.models.list()
        assert model.id == "tiny" and model.max_model_len == 3000  # type: ignore[attr-defined]
        options: Any = {"prompt": "x", "max_tokens": 80, "stream": True, "extra_body": {"ignore_eos": True}}
        events = iter(client.completions.create(model="tiny", **options))
        next(events)
        process.send_signal(signal.SIGTERM)
        assert [event.choices[0].finish_reason for event in events][-1] == "length"
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert "Traceback" not in errors.read_text()


def test_the_model_of_the_package_has_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "DEMO_FOLDER", folder)
    monkeypatch.setattr(server, "run_server", lambda app, listener, drain_seconds: None)
    for options, name in (([], "demo"), (["--name", "tiny"], "tiny")):
        assert main(["serve", "demo", "--port", "0", "--device", "cpu", *options]) == 0
        assert capsys.readouterr().out.startswith(f"{name} is served on http://127.0.0.1:")


def test_what_cannot_be_served_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, message in (
            (["--port", str(taken.getsockname()[1])], "choose another --host or --port"),
            (["--weights", "int9"], "--weights"),
            (["--max-waiting", "-1"], "--max-waiting must be at least 0, got -1"),
            (["--port", "0", "--max-length", "1000000000000"], "--max-length"),
        ):
            assert main(["serve", str(folder), *arguments]) == 2
            assert message in capsys.readouterr().err
