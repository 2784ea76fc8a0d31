"""`trifocal generate --prompts`: the order of the prompts, going on after an interruption, and bad files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_commands import Capture, refused, run
from tests.cli.test_generate import generated
from trifocal.cli import generate_file as command
from trifocal.cli import main
from trifocal.errors import UserError
from trifocal.inference import CachedModel, Completion, Request
from trifocal.inference.prompt_file import OrderedWriter, count_written, open_output, read_prompts

__all__ = ["run"]
PROMPTS = ["the dog", "☃ jumps over\n", "x", "seven lazy wizards jump", "quick"]
FLAGS = ("--max-new-tokens", "9", "--stop-at-document-end", "false", "--device", "cpu")


def write(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", [{"prompt": prompt, "id": i} for i, prompt in enumerate(PROMPTS)])


def test_lines_come_in_the_order_of_the_prompts(run: Path, prompts: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "made" / "out.jsonl"
    arguments = ["generate", str(run), "--prompts", str(prompts), "--output", str(output), *FLAGS, "--logprobs"]
    assert main([*arguments, "--max-sequences", "2"]) == 0
    assert "5 of 5 sequences, 45 tokens, " in capsys.readouterr().err
    lines = read(output)
    assert [line["prompt"] for line in lines] == PROMPTS and [line["id"] for line in lines] == list(range(5))
    for number, line in enumerate(lines):
        assert line.keys() == {"prompt", "id", "text", "tokens", "finish_reason", "log_probabilities"}
        assert line["finish_reason"] == "length" and len(line["tokens"]) == len(line["log_probabilities"]) == 9
        # As each gives alone, with the seed of its place.
        alone = generated(capsys, str(run), "--prompt", line["prompt"], *FLAGS, "--seed", str(number))
        assert alone == line["prompt"] + line["text"] + "\n"
    # Everything is there: nothing is loaded and nothing changes.
    before = output.read_bytes()
    assert main([*arguments, "--append"]) == 0
    assert "exists; add --append to go on with it, or choose another --output" in refused(capsys, *arguments)
    assert output.read_bytes() == before


def test_prompts_share_their_beginnings(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A chunk of 256 tokens goes through the model once, and no text changes."""
    texts = ["x" * 256 + end for end in ("one", "two", "three")]
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": text} for text in texts])
    pieces = []
    healthy = CachedModel.prefill_chunk
    monkeypatch.setattr(
        CachedModel, "prefill_chunk", lambda model, s, x, **o: pieces.append(len(x)) or healthy(model, s, x, **o)
    )
    flags = [*FLAGS, "--prefill-chunk-size", "256", "--max-sequences", "1"]
    assert main(["generate", str(run), "--prompts", str(prompts), "--output", str(tmp_path / "out"), *flags]) == 0
    assert pieces == [256, 3, 3, 5]
    for number, line in enumerate(read(tmp_path / "out")):
        alone = generated(capsys, str(run), "--prompt", line["prompt"], *flags, "--seed", str(number))
        assert alone == line["prompt"] + line["text"] + "\n"


@pytest.mark.parametrize("samples", [1, 2])
def test_an_interrupted_output_goes_on_where_it_stopped(
    run: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, samples: int
) -> None:
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    arguments = ["generate", str(run), "--prompts", str(prompts), *FLAGS, "--samples", str(samples), "--output"]
    assert main([*arguments, str(whole)]) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5 * samples
    # Killed in the middle of its fourth line.
    output.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    submitted = []
    healthy = Request.__post_init__
    monkeypatch.setattr(Request, "__post_init__", lambda self: submitted.append(self.name) or healthy(self))
    assert main([*arguments, str(output), "--append"]) == 0
    assert f"out.jsonl has the texts of {3 // samples} prompts" in capsys.readouterr().err
    assert output.read_bytes() == whole.read_bytes()
    assert len(submitted) == 5 - 3 // samples


def test_broken_logits_end_a_line_and_the_command_says_so(
    run: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    healthy = CachedModel.prefill_chunk

    def prefill(self: CachedModel, sequence: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        logits = healthy(self, sequence, tokens, **options)
        return logits * torch.nan if len(tokens) == 1 else logits

    monkeypatch.setattr(CachedModel, "prefill_chunk", prefill)
    output = tmp_path / "out.jsonl"
    assert main(["generate", str(run), "--prompts", str(prompts), "--output", str(output), *FLAGS]) == 1
    assert f"{prompts} line 3: the model's output is not finite" in capsys.readouterr().err
    lines = read(output)
    assert [line["finish_reason"] for line in lines] == ["length", "length", "error", "length", "length"]
    assert lines[2]["tokens"] == [] and lines[2]["text"] == ""


def test_progress_is_said_now_and_then(
    run: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(command, "_INTERVAL_SECONDS", 0.0)
    output = tmp_path / "out.jsonl"
    assert main(["generate", str(run), "--prompts", str(prompts), "--output", str(output), *FLAGS]) == 0
    said = capsys.readouterr().err.splitlines()
    assert any(line.startswith("0 of 5 sequences, 1 tokens, ") for line in said)
    assert any(line.startswith("5 of 5 sequences, 45 tokens, ") for line in said)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not JSON: '{'"),
        (b"", "line 2 is not JSON: ''"),
        (b"[1]", "line 2 must hold a JSON object, got '[1]'"),
        (b'{"text": "x"}', 'line 2 has no "prompt" with a text'),
        (b'{"prompt": ""}', 'line 2 has no "prompt" with a text'),
        (b'{"prompt": 5}', 'line 2 has no "prompt" with a text'),
        (b'{"prompt": "\xff"}', "line 2 is not UTF-8 text"),
        (b'{"prompt": "a\\ud800"}', "line 2 has half of a surrogate pair"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000, "line 2 is not JSON"),
    ],
    ids=range(9),
)
def test_a_broken_line_is_named(run: Path, tmp_path: Path, capsys: Capture, line: bytes, message: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    output = tmp_path / "out.jsonl"
    assert message in refused(capsys, "generate", str(run), "--prompts", str(prompts), "--output", str(output))
    assert not output.exists()


def test_other_files_are_not_touched(run: Path, prompts: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out.jsonl"
    arguments = ("generate", str(run), "--prompts", str(prompts), "--output", str(output), *FLAGS)
    for other in (b"not JSON\n", b"a diary without an end of line", b'{"prompt": "a"}\n[]\n'):
        output.write_bytes(other)
        assert " is not JSON" in (said := refused(capsys, *arguments, "--append")) or "must hold a JSON" in said
        assert output.read_bytes() == other
    output.unlink()
    # Nothing is left where the start fails.
    refused(capsys, "generate", str(tmp_path / "nowhere"), *arguments[2:])
    assert not output.exists()
    output.mkdir()
    assert "out.jsonl is no regular file" in refused(capsys, *arguments)
    before = prompts.read_bytes()
    for name in (str(prompts), f"{prompts.parent}/./{prompts.name}"):
        assert "is the file of the prompts" in refused(capsys, *arguments, "--output", name)
    assert "/dev/null is no regular file" in refused(capsys, *arguments, "--output", "/dev/null")
    assert "/dev/zero is no regular file" in refused(capsys, *arguments, "--prompts", "/dev/zero")
    assert prompts.read_bytes() == before


@pytest.mark.parametrize("flags", [[], ["--append"]])
def test_an_output_has_one_writer(run: Path, prompts: Path, tmp_path: Path, capsys: Capture, flags: list[str]) -> None:
    output = tmp_path / "out.jsonl"
    with open_output(output, append=False):
        message = refused(capsys, "generate", str(run), "--prompts", str(prompts), "--output", str(output), *flags)
    assert ("is being written by another process" if flags else "exists; add --append") in message


def test_a_full_disk_is_named(
    run: Path, prompts: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    healthy = OrderedWriter.__init__
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        monkeypatch.setattr(OrderedWriter, "__init__", lambda self, _, *args, **kw: healthy(self, full, *args, **kw))
        message = refused(capsys, "generate", str(run), "--prompts", str(prompts), "--output", str(output), *FLAGS)
    assert f"cannot write {output}: No space left on device; --append goes on with it" in message


def test_files_of_other_systems_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "a ☃"}\r\n{"prompt": "b"}\r\n'.encode())
    assert [line.prompt for line in read_prompts(path)] == ["a ☃", "b"]
    for content in (b"", b"\n", b"\xef\xbb\xbf\r\n"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is empty; a line for each prompt is expected"):
            read_prompts(path)


def test_lines_wait_for_those_before_them(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", [{"prompt": str(i)} for i in range(4)])
    prompts, output = read_prompts(path), tmp_path / "out.jsonl"
    request = Request(prompt=[1], max_new_tokens=1)
    with open_output(output, append=False) as file:
        writer = OrderedWriter(file, output, prompts, 1, [0, 0, 0, 0], log_probabilities=False)
        lengths = []
        for number in (2, 1, 0, 3):
            writer.add(number, Completion(request, 0, [number], [0.0], "", "stop"))
            lengths.append(len(read(output)))
    assert lengths == [0, 0, 3, 4]
    assert [line["tokens"] for line in read(output)] == [[0], [1], [2], [3]]


def test_equal_prompts_and_samples_are_counted(tmp_path: Path) -> None:
    lines = [{"prompt": prompt} for prompt in ("a", "a", "b", "c")]
    prompts, output = read_prompts(write(tmp_path / "prompts.jsonl", lines)), tmp_path / "out.jsonl"
    write(output, [{"prompt": prompt, "text": ""} for prompt in ("a", "a", "a", "another", "c")])
    assert count_written(output, prompts, 2) == [2, 1, 0, 1]
    # An end that was torn goes; one that lacks its line end alone too.
    whole = output.read_bytes()
    output.write_bytes(whole + b'{"prompt": "b", "te')
    assert count_written(output, prompts, 2) == [2, 1, 0, 1] and output.read_bytes() == whole
