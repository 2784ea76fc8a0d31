"""`trifocal generate`: what it reads, from where, and what it writes while it does."""

import ast
import io
import json
import os
import pty
import shutil
import sys
from pathlib import Path

import pytest
import torch

import trifocal
from tests.chat_data import write_tokenizer
from tests.cli.test_commands import refused
from tests.data.test_tokenizers import TEXT, tokenizer_file
from trifocal import load_model
from trifocal.cli import main
from trifocal.cli.generate_model import GenerateArguments, LoadedModel
from trifocal.cli.output import printable
from trifocal.data import make_tokenizer
from trifocal.errors import UserError
from trifocal.inference import CachedModel, Engine, Request, Sampling
from trifocal.inference.text_stream import TextStream
from trifocal.testing.small_models import make_model, small_config
from trifocal.train.checkpoint.export import export_folder

__all__ = ["tokenizer_file"]
OPTIONS = ["--prompt", "the dog", "--max-new-tokens", "12", "--stop-at-document-end", "false", "--temperature", "0"]


def generated(capsys, *arguments):
    capsys.readouterr()
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def test_a_run_a_checkpoint_and_weights_give_the_same(run, tmp_path, capsys, monkeypatch):
    newest = run / "checkpoints" / "step_00000006"
    text = generated(capsys, str(run), *OPTIONS)
    assert generated(capsys, str(newest), *OPTIONS) == text
    assert generated(capsys, str(run / "weights"), *OPTIONS) == text
    monkeypatch.chdir(newest)
    assert generated(capsys, ".", *OPTIONS) == text
    shutil.copytree(run / "weights", tmp_path / "weights")
    make_tokenizer("bytes").save(tmp_path / "weights")
    assert generated(capsys, str(tmp_path / "weights"), *OPTIONS) == text
    # A run whose checkpoints were left out.
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    assert generated(capsys, str(tmp_path / "run"), *OPTIONS) == text
    shutil.copytree(newest, tmp_path / "best")
    assert "checkpoint without its run" in refused(capsys, "generate", str(tmp_path / "best"), *OPTIONS)
    other = refused(capsys, "generate", str(run / "weights"), *OPTIONS, "--checkpoint", "step_00000004")
    assert "holds weights and no checkpoints" in other
    expected = load_model(run / "weights").state_dict()
    before = torch.get_rng_state()
    for folder in (run, newest, tmp_path / "best", str(run)):
        found = load_model(folder).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_prompt_is_read_from_standard_input(run, capsys, monkeypatch):
    def with_input(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return ["generate", str(run), "--prompt", "-", "--max-new-tokens", "3"]

    assert main(with_input("two\nlines, ☃".encode())) == 0
    assert capsys.readouterr().out.startswith("two\nlines, ☃")
    assert "standard input is not UTF-8 text" in refused(capsys, *with_input(b"\xff"))
    assert "standard input is empty" in refused(capsys, *with_input(b""))


def test_a_message_of_a_chat_is_answered(tmp_path, capsys):
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path / "from")))
    decoder = make_model(small_config(vocab_size=tokenizer.vocab_size), torch.device("cpu"))
    export_folder(decoder, tokenizer, tmp_path / "model")
    answer = generated(capsys, str(tmp_path / "model"), "--chat", "--device", "cpu", *OPTIONS)
    prompt = tokenizer.encode_prompt([{"role": "user", "content": "the dog"}])
    model = CachedModel(decoder, max_sequences=1, max_length=len(prompt) + 12)
    request = Request(prompt=prompt, max_new_tokens=12, sampling=Sampling(temperature=0))
    assert answer == Engine(model, tokenizer).complete([request])[0].text + "\n"
    assert "bytes has no chat template" in refused(capsys, "generate", "demo", "--chat", "--prompt", "x")
    assert "neither may be empty" in refused(capsys, "generate", "demo", "--prompt", "")


def test_text_is_written_while_it_is_made(run, monkeypatch):
    written, seen = io.StringIO(), []
    step, prefill = CachedModel.step, CachedModel.prefill_chunk

    def letters(logits):
        """Only letters: each token is a character."""
        return torch.nn.functional.one_hot(torch.full(logits.shape[:-1], ord("a")), 257).float() * 100

    def watched(*arguments):
        seen.append(written.getvalue())
        return letters(step(*arguments))

    monkeypatch.setattr(CachedModel, "step", watched)
    monkeypatch.setattr(CachedModel, "prefill_chunk", lambda *given, **options: letters(prefill(*given, **options)))
    monkeypatch.setattr(sys, "stdout", written)
    assert main(["generate", str(run), "--prompt", "x", "--max-new-tokens", "4", "--samples", "2"]) == 0
    head = "--- 1 of 2\nx"
    # The first token is there before the second is begun.
    assert seen == [head + "a", head + "aa", head + "aaa"]
    assert written.getvalue() == f"{head}aaaa\n--- 2 of 2\nxaaaa\n"


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_streamed_text_is_that_of_all_tokens(kind, tokenizer_file):
    tokenizer = make_tokenizer("bytes" if kind == "bytes" else str(tokenizer_file))
    text = tokenizer.encode(TEXT).tolist()
    cases = [text, [*text, tokenizer.separator, tokenizer.separator]]
    if kind == "bytes" or "ByteFallback" not in tokenizer_file.read_text():
        # With byte fallback one bad byte takes back the characters before it, which are out already.
        cases.append(torch.randint(tokenizer.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist())
        cases.append([*tokenizer.encode("a ☃").tolist()[:-1], tokenizer.separator])
    for ids in cases:
        before = tokenizer.encode("Hello w").tolist()
        stream = TextStream(tokenizer, before)
        parts = [stream.add(token) for token in ids]
        whole = tokenizer.decode([*before, *ids])
        assert tokenizer.decode(before) + "".join(parts) + stream.end() == whole
        assert sum(map(bool, parts)) > len(parts) / 3


def test_without_a_standard_output_nothing_fails(run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", str(run), "--prompt", "x", "--max-new-tokens", "1"]) == 0
    sys.stdout.close()


def test_a_terminal_gets_no_control_characters(run, monkeypatch):
    parent, child = pty.openpty()
    prompt = "a\x1b[2J\x07b"
    with os.fdopen(child, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert main(["generate", str(run), "--prompt", prompt, "--max-new-tokens", "1"]) == 0
    shown = os.read(parent, 10000)
    os.close(parent)
    assert shown.startswith(b"a[2Jb") and b"\x1b" not in shown
    assert printable("tab\tand\nline") == "tab\tand\nline"
    assert printable("turned \u061c\u200e\u202e\u2066") == "turned "


def test_what_cannot_be_read_is_one_line(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    manifest = copy / "checkpoints" / "step_00000006" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    assert "manifest.json is no regular file" in refused(capsys, "generate", str(manifest.parent), "--prompt", "x")
    config = json.loads((run / "weights" / "config.json").read_text())
    config["model"]["dim"] = config["hidden_size"] = -1
    (copy / "weights" / "config.json").write_text(json.dumps(config))
    assert "model.dim must be" in refused(capsys, "generate", str(copy / "weights"), "--prompt", "x")
    assert refused(capsys, "generate", str(tmp_path), "--prompt", "x").startswith("trifocal: there is no run at")


def test_python_gives_the_text_of_the_command(run, capsys):
    sampled = {"max_new_tokens": 12, "temperature": 0.7, "top_k": 9, "seed": 3, "stop_at_document_end": False}
    flags = [text for name, value in sampled.items() for text in (f"--{name.replace('_', '-')}", str(value).lower())]
    text = generated(capsys, str(run), "--prompt", "the dog", *flags, "--device", "cpu")
    assert "the dog" + trifocal.generate(run, "the dog", device="cpu", **sampled) + "\n" == text
    assert "the dog" + trifocal.generate(load_model(run), "the dog", **sampled) + "\n" == text
    with pytest.raises(UserError, match="checkpoint goes with the path of a run"):
        trifocal.generate(load_model(run), "x", checkpoint="step_00000006")
    with pytest.raises(UserError, match="a DecoderLM, without wrappers around it, got DataParallel"):
        trifocal.generate(torch.nn.DataParallel(load_model(run)), "x")
    with pytest.raises(UserError, match="prompt must be a text, got 5"):
        trifocal.generate(run, 5)
    with pytest.raises(UserError, match="tokenizer must be one from load_tokenizer, got str"):
        trifocal.generate(load_model(run), "x", tokenizer="bytes")
    with pytest.raises(UserError, match="temperature must be at least 0, got -1"):
        trifocal.generate(str(run), "x", temperature=-1)
    with pytest.raises(UserError, match="seed must be an integer, got None"):
        trifocal.generate(str(run), "x", seed=None)

    for folder in (run, run / "checkpoints" / "step_00000006", str(run / "weights")):
        assert trifocal.load_tokenizer(folder).name == "bytes"
        assert isinstance(trifocal.load_model(folder), trifocal.DecoderLM)


def test_log_probabilities_follow_the_text(run, capsys):
    text = generated(capsys, str(run), *OPTIONS)
    lines = generated(capsys, str(run), *OPTIONS, "--logprobs").removeprefix(text).splitlines()
    assert len(lines) == 12
    pieces = [line.split(maxsplit=1) for line in lines]
    assert all(-10 < float(log_p) < 0 for log_p, _ in pieces)
    assert text.startswith("the dog" + ast.literal_eval(pieces[0][1]))


@pytest.mark.parametrize("stop", [True, False])
def test_the_document_end_stops_where_asked_for(stop):
    tokenizer = make_tokenizer("bytes")
    loaded = LoadedModel(Path(), None, tokenizer, [[1, 2]])
    options = GenerateArguments(path="", prompt="x", stop_at_document_end=stop, stop=("never", "end"))
    request = loaded.request(options, 0, "")
    assert request.stop_tokens == (tokenizer.ends if stop else ()) and request.stop == ("never", "end")
