"""`trifocal generate --prompts`: lines with the index of their prompt, an output that is continued, and bad files."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.cli.test_commands import refused
from tests.cli.test_generate import generated
from trifocal.cli import generate_file as command
from trifocal.cli import main
from trifocal.cli.generate_file import read_prompts, write_line
from trifocal.errors import UserError
from trifocal.inference import CachedModel, Request

PROMPTS = ["the dog", "☃ jumps over\n", "x", "seven lazy wizards jump", "quick"]
FLAGS = ("--max-new-tokens", "9", "--stop-at-document-end", "false", "--device", "cpu")


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", [{"prompt": prompt, "id": i} for i, prompt in enumerate(PROMPTS)])


def test_a_line_has_the_index_of_its_prompt(run, prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_INTERVAL_SECONDS", 0.0)
    output = tmp_path / "made" / "out.jsonl"
    arguments = ["generate", str(run), "--prompts", str(prompts), "--output", str(output), *FLAGS, "--logprobs"]
    assert main([*arguments, "--max-sequences", "2"]) == 0
    said = capsys.readouterr().err
    assert "\n0 of 5 sequences, 3 tokens, " in said and "5 of 5 sequences, 45 tokens, " in said
    lines = sorted(read(output), key=lambda line: int(line["index"]))
    assert [(line["index"], line["prompt"], line["id"]) for line in lines] == [(i, PROMPTS[i], i) for i in range(5)]
    for number, line in enumerate(lines):
        assert line.keys() == {"index", "prompt", "id", "text", "tokens", "finish_reason", "log_probabilities"}
        assert line["finish_reason"] == "length" and len(line["tokens"]) == len(line["log_probabilities"]) == 9
        # Each text is what its prompt gives without the others, with the seed of its place.
        alone = generated(capsys, str(run), "--prompt", line["prompt"], *FLAGS, "--seed", str(number))
        assert alone == line["prompt"] + line["text"] + "\n"
    # Everything is there: nothing is loaded and nothing changes.
    before = output.read_bytes()
    assert main([*arguments, "--append"]) == 0
    assert "exists; add --append to continue it, or choose another --output" in refused(capsys, *arguments)
    assert output.read_bytes() == before


def test_prompts_share_their_beginnings(run, tmp_path, monkeypatch):
    """A chunk of 256 tokens goes through the model once."""
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


@pytest.mark.parametrize(("samples", "cut"), [(1, 20), (2, 3)])
def test_an_interrupted_output_is_continued(run, prompts, tmp_path, monkeypatch, capsys, samples, cut):
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    # Equal prompts, and keys in front of the prompt.
    write(prompts, [{"id": i, "index": "mine", "prompt": PROMPTS[max(i, 1)]} for i in range(5)])
    arguments = ["generate", str(run), "--prompts", str(prompts), *FLAGS, "--samples", str(samples), "--output"]
    assert main([*arguments, str(whole)]) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5 * samples
    # The disk was full in the middle of its fourth line.
    output.write_bytes(b"".join(lines[:3]) + lines[3][:cut])
    submitted = []
    healthy = Request.__post_init__
    monkeypatch.setattr(Request, "__post_init__", lambda self: submitted.append(self.name) or healthy(self))
    assert main([*arguments, str(output), "--append"]) == 0
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    counts = Counter(json.loads(line)["index"] for line in lines[:3])
    there = sum(count == samples for count in counts.values())
    assert there == 0 or f"out.jsonl has the texts of {there} prompts" in capsys.readouterr().err
    assert len(submitted) == 5 - there


def test_broken_logits_end_a_line_and_the_command_says_so(run, prompts, tmp_path, monkeypatch, capsys):
    healthy = CachedModel.prefill_chunk

    def prefill(self, sequence, tokens, **options):
        logits = healthy(self, sequence, tokens, **options)
        return logits * torch.nan if len(tokens) == 1 else logits

    monkeypatch.setattr(CachedModel, "prefill_chunk", prefill)
    output = tmp_path / "out.jsonl"
    assert main(["generate", str(run), "--prompts", str(prompts), "--output", str(output), *FLAGS]) == 1
    assert f"{prompts} line 3: the model's output is not finite" in capsys.readouterr().err
    lines = {line["index"]: line for line in read(output)}
    assert {index for index, line in lines.items() if line["finish_reason"] == "error"} == {2} and len(lines) == 5
    assert lines[2]["tokens"] == [] and lines[2]["text"] == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not JSON: '{'"),
        (b'{"text": "x"}', 'line 2 has no "prompt" with a text'),
        (b'{"prompt": "\xff"}', "line 2 is not UTF-8 text"),
        (b'{"prompt": "a\\ud800"}', "line 2 has half of a surrogate pair"),
    ],
    ids=range(4),
)
def test_a_broken_line_is_named(tmp_path, line, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    with pytest.raises(UserError, match=re.escape(message)):
        read_prompts(prompts)


def test_other_files_are_not_touched(run, prompts, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    arguments = ("generate", str(run), "--prompts", str(prompts), "--output", str(output), *FLAGS)
    whole = b'{"index": 0, "prompt": "the dog"}\n'
    for other, message in (
        (b"a diary without an end of line", "line 1 is not JSON"),
        (whole + b'{"prompt": "x"}\n', "line 2 continues none of the prompts"),
        (whole + b'{"index": [2], "prompt": "x"}\n', "line 2 continues none of the prompts"),
        (whole + b'{"index": 2, "prompt": "another"}\n', "line 2 continues none of the prompts"),
    ):
        output.write_bytes(other)
        assert message in refused(capsys, *arguments, "--append")
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
    assert prompts.read_bytes() == before


def test_a_full_disk_is_named():
    message = "cannot write out.jsonl: No space left on device; --append continues it"
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(UserError, match=message):  # noqa: PTH123
        write_line(full, Path("out.jsonl"), {"index": 0})


def test_files_of_other_systems_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "a ☃"}\r\n{"prompt": "b"}\r\n'.encode())
    assert [line.content["prompt"] for line in read_prompts(path)] == ["a ☃", "b"]
    for content in (b"", b"\n", b"\xef\xbb\xbf\r\n"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is empty; expected a line for each prompt"):
            read_prompts(path)


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.TXT"
    path.write_bytes('\ufeffa ☃ \r\n\n{"prompt": 1}\u2028b\n \n'.encode())
    assert [(line.content["prompt"], line.name) for line in read_prompts(path)] == [
        ("a ☃ ", f"{path} line 1"),
        ('{"prompt": 1}\u2028b', f"{path} line 3"),
    ]
    for content, message in ((b"\n", "is empty; expected a prompt a line"), (b"a\n\xff", "line 2 is not UTF-8 text")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_prompts(path)
