"""The files of a run, and its behaviour when something goes wrong."""

import errno
import functools
import itertools
import json
import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tiny import WORDS, before_step, make_config, read_checkpoint
from trifocal import load_model
from trifocal.cli.train import _summary
from trifocal.data import DataConfig, Loader, make_loader, make_tokenizer, prefetch
from trifocal.data.sources.text import TextSource
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.runlog import read_metrics
from trifocal.telemetry.attention_picture import read_picture
from trifocal.train import NonFiniteError, load_config, resume, saving, train
from trifocal.train import setup as train_setup
from trifocal.train.evaluator import Evaluator
from trifocal.train.validation_loss import evaluate, read_validation_batches


def test_a_deterministic_run_is_so_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen: list[tuple[bool, str | None]] = []

    def look(step: int, arguments: dict[str, Any]) -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))

    before_step(monkeypatch, look)
    train(make_config(tmp_path, "--train.steps", "1"))
    train(make_config(tmp_path, "--train.steps", "1", "--run.deterministic", "true"), overwrite=True)
    assert seen == [(False, None), (True, ":4096:8")]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_a_run_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(
        tmp_path, "--log.sample_tokens", "8", "--train.steps", "40",
        "--log.interval_steps", "10", "--evaluate.interval_steps", "20", "--checkpoint.interval_steps", "10",
        "--checkpoint.keep_every_steps", "20", "--checkpoint.keep_last", "1", "--log.sample_interval_steps", "20",
    )  # fmt: skip
    result = train(config)
    run = tmp_path / "run"
    assert (result.finished, result.step, result.directory) == (True, 40, run)
    assert load_config(run / "config.toml") == config
    assert json.loads((run / "env.json").read_text())["packages"]["torch"] == torch.__version__

    rows = read_metrics(run / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == [1, 10, 20, 30, 40]
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.5, "forty steps on words must teach something"
    # Untrained, it knows nothing, with any initial weights.
    assert math.log(257) - 0.1 < rows[0]["loss"] < math.log(257) + 1
    assert rows[-1]["tokens_seen"] == 40 * 4 * 32
    assert rows[-1]["learning_rate"] == pytest.approx(1e-3)
    assert rows[-1]["epoch"] > 0
    for name in ("gradient_norm", "tokens_per_second", "step_seconds", "memory_allocated_bytes"):
        assert rows[-1][name] > 0
    assert 0 <= rows[-1]["data_wait_seconds_p50"] <= rows[-1]["data_wait_seconds_p95"]
    assert "executed_mfu" not in rows[-1], "no peak is known of a CPU"

    evaluations = read_metrics(run / "metrics.jsonl", "evaluation")
    assert [row["step"] for row in evaluations] == [20, 40]
    last = evaluations[-1]
    assert last["perplexity"] == pytest.approx(math.exp(last["validation_loss"]))
    assert result.evaluation is not None and result.evaluation.validation_loss == last["validation_loss"]

    assert [path.name for path in sorted((run / "samples").iterdir())] == ["step_00000020.txt", "step_00000040.txt"]
    assert result.sample is not None and result.sample.startswith("def ")
    assert (run / "samples" / "step_00000040.txt").read_text() == result.sample + "\n"
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step_00000020", "step_00000040"]

    heartbeat = [json.loads(line) for line in (run / "heartbeat" / "rank0.jsonl").read_text().splitlines()]
    assert (heartbeat[-1]["status"], heartbeat[-1]["step"]) == ("finished", 40)
    phases = {"data", "forward", "backward", "optimizer", "checkpoint", "evaluate", "telemetry", "sample"}
    assert phases <= heartbeat[-1]["total_seconds"].keys()
    assert "step 40/40" in capsys.readouterr().out


def test_the_saved_config_names_the_commit_that_the_loader_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, asked = "0123456789abcdef", []
    original = train_setup.make_loader

    def pinning(data: DataConfig, **arguments: Any) -> Loader:
        asked.append(data.revision)
        loader = original(data, **arguments)
        loader.config = replace(loader.config, revision=commit)
        return loader

    monkeypatch.setattr(train_setup, "make_loader", pinning)
    config = make_config(tmp_path)
    train(config)
    assert load_config(tmp_path / "run" / "config.toml").data == replace(config.data, revision=commit)
    resume(tmp_path / "run")
    assert asked == ["main", commit]


def test_exported_weights_load_back_as_the_checkpoint_and_give_the_reported_loss(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    result = train(config)
    model = load_model(tmp_path / "run" / "weights")
    saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000006")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[f"model.{name}"])
    tokenizer = make_tokenizer("bytes")
    batches = read_validation_batches(config, tokenizer)
    again = evaluate(
        model, batches, tokenizer=tokenizer, data=config.data, device=torch.device("cpu"), precision="fp32"
    )
    assert again == result.evaluation
    # By hand: nats of every valid target, over the bytes that the targets are.
    nats, count, text_bytes = 0.0, 0, 0
    for batch in batches:
        documents = batch.cu_seqlens
        with torch.no_grad():
            shape = (1, -1) if documents is not None else batch.tokens.shape
            log_p = model(batch.tokens.view(shape), cu_seqlens=documents).double().log_softmax(-1).flatten(0, 1)
        for row, target in zip(log_p, batch.targets.flatten().tolist(), strict=True):
            if target >= 0:
                nats -= row[target].item()
                count += 1
                text_bytes += target < 256
    assert again.validation_loss == pytest.approx(nats / count, rel=1e-5)
    assert again.bits_per_byte == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)


def poison(step: int, name: str, value: float) -> Any:
    """Make one entry of a parameter's gradient not finite in one step."""

    def action(now: int, arguments: dict[str, Any]) -> None:
        parameter = dict(arguments["loss_function"].named_parameters())[name]
        if now == step:
            handle = parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([1]), value))
            action.handle = handle  # type: ignore[attr-defined]
        elif hasattr(action, "handle"):
            action.handle.remove()

    return action


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("log_interval", ["1", "100"])
def test_a_bad_gradient_stops_the_run_before_it_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, log_interval: str
) -> None:
    """Whether or not the host would have looked at the step for its own sake (a log interval of 100)."""
    bad = "blocks.1.mlp.up_proj.weight"
    flags = ("--log.interval_steps", log_interval, "--checkpoint.interval_steps", "4", "--evaluate.interval_steps", "0")
    before_step(monkeypatch, poison(5, bad, value))
    with pytest.raises(NonFiniteError) as caught:
        train(make_config(tmp_path, *flags))
    run = tmp_path / "run"
    message = str(caught.value)
    assert message.startswith("step 5: gradient norm ")
    assert f"first parameter with a non-finite gradient: {bad} (1 in all)" in message
    summary = json.loads((run / "dumps" / "step_00000005" / "summary.json").read_text())
    assert summary["parameters_with_non_finite_gradient"] == [bad]
    assert summary["document_ids"] and summary["document_ids"][0] in message
    # The weights are still those that step 4 left behind.
    after = load_model(run / "dumps" / "step_00000005" / "weights").state_dict()
    saved = read_checkpoint(run / "checkpoints" / "step_00000004")
    for name, tensor in after.items():
        assert torch.equal(tensor, saved[f"model.{name}"]), name
    micro = torch.load(run / "dumps" / "step_00000005" / "batch.pt")
    assert [batch["sample_index"] for batch in micro] == [16, 18]
    event = read_metrics(run / "metrics.jsonl", "event")[-1]
    assert (event["name"], event["severity"], event["message"]) == ("non_finite", "error", message)
    assert json.loads((run / "heartbeat" / "rank0.jsonl").read_text().splitlines()[-1])["status"] == "failed"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000004"]


@pytest.mark.parametrize("file", ["batch.pt", "weights/.model.safetensors.partial"])
def test_a_dump_that_cannot_be_written_does_not_hide_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Both libraries raise errors of their own kind for a disk that does not take a file."""
    (tmp_path / "blocks" / file).mkdir(parents=True)

    def action(step: int, arguments: dict[str, Any]) -> None:
        poison(2, "norm.weight", math.nan)(step, arguments)
        if step == 2:
            shutil.copytree(tmp_path / "blocks", tmp_path / "run" / "dumps" / "step_00000002")

    before_step(monkeypatch, action)
    with pytest.raises(NonFiniteError, match=r"step 2: gradient norm nan .*; the dump could not be written: "):
        train(make_config(tmp_path))


def test_a_bad_gradient_in_the_last_step_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_step(monkeypatch, poison(6, "norm.weight", math.nan))
    with pytest.raises(NonFiniteError, match="step 6"):
        train(make_config(tmp_path, "--checkpoint.interval_steps", "0", "--evaluate.interval_steps", "0"))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "weights").exists()


@pytest.mark.parametrize(("step", "interval"), [(6, "0"), (4, "2")], ids=["last", "checkpoint"])
def test_an_update_that_makes_weights_infinite_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, interval: str
) -> None:
    """Loss and gradient of the step are finite; no evaluation and no later step sees the weights."""

    def action(now: int, arguments: dict[str, Any]) -> None:
        if now == step:
            arguments["optimizer"].param_groups[0]["lr"] = math.inf

    before_step(monkeypatch, action)
    with pytest.raises(NonFiniteError, match=rf"step {step}: the update, with a .* made weights that are not finite; "):
        train(make_config(tmp_path, "--checkpoint.interval_steps", interval, "--evaluate.interval_steps", "0"))
    run = tmp_path / "run"
    saved = sorted(path.name for path in run.glob("checkpoints/*"))
    assert saved == ([] if step == 6 else ["step_00000002"])
    assert not (run / "weights").exists()
    summary = json.loads((run / "dumps" / f"step_{step:08}" / "summary.json").read_text())
    assert "blocks.0.mlp.up_proj.weight" in summary["parameters_with_non_finite_value"]
    event = read_metrics(run / "metrics.jsonl", "event")[-1]
    assert (event["name"], event["severity"]) == ("non_finite", "error")


def test_a_bad_loss_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DecoderLM.forward
    calls = []

    def broken(self: DecoderLM, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        loss = forward(self, *args, **kwargs)
        # Two micro-batches a step: the second of step 2.
        return loss + math.inf if len(calls) == 4 else loss

    monkeypatch.setattr(DecoderLM, "forward", broken)
    with pytest.raises(NonFiniteError, match="step 2: loss inf is not finite; all gradients are finite"):
        train(make_config(tmp_path))


def failing_save(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    original = saving.write_checkpoint

    def save(root: Path, step: int, **kwargs: Any) -> Path:
        if step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(root, step, **kwargs)

    monkeypatch.setattr(saving, "write_checkpoint", save)


def test_a_full_disk_at_a_checkpoint_is_loud_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_save(monkeypatch, {4})
    assert train(make_config(tmp_path)).finished
    assert "ERROR: the checkpoint of step 4 could not be written: [Errno 28] No space left" in capsys.readouterr().out
    events = {row["name"]: row for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "event")}
    assert events["checkpoint_failed"]["severity"] == "error"
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step_00000002",
        "step_00000006",
    ]


def test_a_full_disk_at_the_last_checkpoint_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_save(monkeypatch, {4, 6})
    with pytest.raises(UserError, match=r"checkpoint of step 6 could not be written: .*No space left"):
        train(make_config(tmp_path))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
    monkeypatch.undo()
    assert resume(tmp_path / "run").finished


def test_a_full_disk_under_samples_and_pictures_costs_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def block(step: int, *_: Any) -> None:
        for name in ("samples", "attention"):
            (run / name).touch()

    before_step(monkeypatch, block)
    settings = ("--evaluate.interval_steps", "3", "--log.sample_interval_steps", "3", "--log.sample_tokens", "4")
    assert train(make_config(tmp_path, *settings)).finished
    printed = capsys.readouterr().out
    events = [row for row in read_metrics(run / "metrics.jsonl", "event") if row["name"] == "write_failed"]
    for what in ("attention picture", "sample"):
        assert f"WARNING: the {what} of step 3 could not be written" in printed
        assert [f"the {what} of" in row["message"] for row in events].count(True) == 2


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a network file system, one that somebody reads."""

    def busy(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(saving, "prune_checkpoints", busy)
    assert train(make_config(tmp_path)).finished
    assert "WARNING: an old checkpoint could not be deleted: [Errno 16]" in capsys.readouterr().out
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 3


def test_a_first_step_that_fails_empties_a_folder_that_is_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "run").symlink_to("volume")

    def refuse(step: int, _: Any) -> None:
        raise UserError("bad data")

    with monkeypatch.context() as patch:
        before_step(patch, refuse)
        with pytest.raises(UserError, match="bad data"):
            train(make_config(tmp_path))
    assert not list((tmp_path / "volume").iterdir())
    assert train(make_config(tmp_path)).finished


def test_every_evaluation_stores_the_same_sequence_as_the_model_sees_it(tmp_path: Path) -> None:
    assert train(make_config(tmp_path, "--evaluate.interval_steps", "3")).finished
    paths = sorted((tmp_path / "run" / "attention").iterdir())
    assert [path.name for path in paths] == ["step_00000003.npz", "step_00000006.npz"]
    first, last = (read_picture(path) for path in paths)
    assert (first.step, last.step) == (3, 6) and first.texts == last.texts
    assert len(first.texts) == 32 and set("".join(first.texts)) <= {*"".join(WORDS), " ", "\n", ".", "∎"}
    # A new document begins after each separator.
    begins = [index for index in range(1, 32) if first.positions[index] == 0]
    assert begins == [index for index in range(1, 32) if first.texts[index - 1] == "∎"]
    assert train(make_config(tmp_path, "--log.telemetry_interval_steps", "0"), overwrite=True).finished
    assert not (tmp_path / "run" / "attention").exists()


def test_an_existing_run_is_safe(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train(config)
    weights = (tmp_path / "run" / "weights" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"holds a run already.*--resume \S+/run.*--overwrite"):
        train(config)
    assert (tmp_path / "run" / "weights" / "model.safetensors").read_bytes() == weights


# PyTorch's tracer warns about its own calls.
@pytest.mark.filterwarnings("ignore")
def test_compiled_checkpointed_and_plain_runs_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile with the eager backend: the wiring is ours, the code generator is not. Any attention will do."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    losses = {}
    for name, flags in {
        "plain": (),
        "compiled": ("--train.compile", "true"),
        "checkpointed": ("--train.activation_checkpointing", "all"),
        "a range": ("--train.activation_checkpointing", "0:1"),
    }.items():
        small = ("--train.steps", "2", "--model.num_layers", "1", "--model.attention", "dense")
        train(make_config(tmp_path, *flags, *small, name=name))
        losses[name] = [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl", "train")]
    assert losses["checkpointed"] == losses["plain"] == losses["a range"]
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-5)
    heartbeat = (tmp_path / "compiled" / "heartbeat" / "rank0.jsonl").read_text().splitlines()[-1]
    assert "compile" in json.loads(heartbeat)["total_seconds"]
    events = {row["name"]: row["message"] for row in read_metrics(tmp_path / "compiled" / "metrics.jsonl", "event")}
    assert "compiles the model for" in events["compiling"] and "packed documents" in events["compiling"]
    assert "compiled in" in events["compiled"]


def test_random_tokens_train_without_text(tmp_path: Path) -> None:
    result = train(make_config(tmp_path, "--data.source", "synthetic", "--train.steps", "3"))
    assert result.evaluation is not None
    assert result.evaluation.bits_per_byte is None
    assert result.evaluation.validation_loss > math.log(257) - 0.05, "random tokens cannot be foreseen"


def test_a_source_that_gives_nothing_for_a_while_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, reads = TextSource.read, itertools.count()

    def slow_read(self: TextSource, shard: Any, cursor: Any) -> Any:
        time.sleep(0.6 if next(reads) == 0 else 0.0)
        return original(self, shard, cursor)

    monkeypatch.setattr(TextSource, "read", slow_read)
    monkeypatch.setattr(prefetch, "STALL_SECONDS", 0.2)
    flags = ("--train.steps", "1", "--evaluate.interval_steps", "0")
    run = train(make_config(tmp_path, *flags)).directory
    events = read_metrics(run / "metrics.jsonl", "event")
    stalls = [row for row in events if row["name"] == "data_stall"]
    (came,) = [row["message"] for row in events if row["name"] == "first_batch"]
    assert came.startswith("the first batch came after ") and float(came.split()[-2]) >= 0.6
    assert stalls and stalls[0]["severity"] == "warning" and stalls[0]["stall_seconds"] >= 0.2
    assert "data stall: no batch for 0 s; the data thread is" in stalls[0]["message"]
    assert "WARNING: data stall" in capsys.readouterr().out


def test_data_without_held_out_text_are_refused_before_any_work(tmp_path: Path) -> None:
    config = make_config(tmp_path, "--data.validation_fraction", "1e-9", "--evaluate.interval_steps", "6")
    with pytest.raises(UserError, match="the validation split is empty"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_skipped_documents_are_counted_and_said(tmp_path: Path) -> None:
    lines = [json.dumps({"text": None if number in (3, 4) else " ".join(WORDS)}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    flags = ("--data.source", f"jsonl:{tmp_path / 'a.jsonl'}", "--evaluate.interval_steps", "0", "--train.steps", "3")
    flags += ("--data.validation_fraction", "0")
    with pytest.raises(UserError, match=r"a\.jsonl:4: field 'text' is null; data\.on_bad_document \"skip\""):
        train(make_config(tmp_path, *flags))
    result = train(make_config(tmp_path, *flags, "--data.on_bad_document", "skip"), overwrite=True)
    assert result.skipped_documents == 2
    assert "skipped 2 bad documents (data.on_bad_document)" in _summary(result)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["skipped_documents"] for row in rows if row["kind"] == "train"][-1] == 2
    (event,) = [row for row in rows if row.get("name") == "documents_skipped"]
    assert "a.jsonl:4: field 'text' is null" in event["message"] and event["severity"] == "warning"


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_steps_are_saved_before_a_run_ends_by_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: str
) -> None:
    flags = ("--checkpoint.interval_steps", "2", "--checkpoint.asynchronous", asynchronous)
    config = make_config(tmp_path, *flags, "--evaluate.interval_steps", "0")
    original, calls = Loader.__next__, []

    def fail(loader: Loader) -> Any:
        calls.append(loader)
        if len(calls) == 11:
            raise UserError("the network is gone")
        return original(loader)

    # Two micro-batches a step.
    monkeypatch.setattr(Loader, "__next__", fail)
    with pytest.raises(UserError, match="the network is gone; step 5 is saved"):
        train(config)
    assert (tmp_path / "run/checkpoints/step_00000005").is_dir()
    monkeypatch.setattr(Loader, "__next__", original)
    assert resume(tmp_path / "run").step == 6
    steps = [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl", "train")]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("look", ["evaluate", "sample"])
def test_steps_are_saved_before_a_look_at_the_model_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """As when a GPU has memory for a step, and none for more."""

    def too_much(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Evaluator, look, too_much)
    flags = ("--evaluate.interval_steps", "3", "--log.sample_interval_steps", "3", "--checkpoint.interval_steps", "2")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(make_config(tmp_path, *flags))
    assert caught.value.__notes__ == ["step 3 is saved"]
    monkeypatch.undo()
    assert resume(tmp_path / "run").finished
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl", "train")] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_was_not_sound_is_not_saved_when_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(step: int, arguments: dict[str, Any]) -> None:
        if step == 3:
            next(arguments["loss_function"].parameters()).data.fill_(float("inf"))

    before_step(monkeypatch, explode)
    flags = ("--log.interval_steps", "5", "--evaluate.interval_steps", "3")
    with pytest.raises(NonFiniteError):
        train(make_config(tmp_path, *flags))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]


def test_validation_reads_the_validation_split(tmp_path: Path) -> None:
    """Every document has a letter of its own, and no letter is in both splits."""
    config = make_config(tmp_path, "--checkpoint.interval_steps", "0")
    for index, path in enumerate(sorted((tmp_path / "text").iterdir())):
        path.write_text(chr(ord("A") + index) * 40)
    tokenizer = make_tokenizer("bytes")
    held_out = {
        token for batch in read_validation_batches(config, tokenizer) for token in batch.tokens.unique().tolist()
    }
    sizes = {"sequence_length": 32, "batch_size": 2, "vocab_size": 257}
    with make_loader(config.data, tokenizer=tokenizer, **sizes) as loader:
        trained = {token for batch in itertools.islice(loader, 40) for token in batch.tokens.unique().tolist()}
    assert len(held_out - {256}) >= 3 and held_out & trained == {256}
