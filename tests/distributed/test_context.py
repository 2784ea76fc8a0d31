"""Context parallelism: processes that share each sequence compute what one process does."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed import context_worker
from tests.distributed.workers import Workers, train
from tests.train.tiny import write_config, write_model
from trifocal.runlog import read_metrics
from trifocal.testing.small_models import small_config

# Sums in another order, in fp64, through two layers.
BOUND = 1e-11


def test_every_layer_is_one_process(tmp_path):
    """Loss, every gradient, the choice and its loss: two processes a sequence, and four, all in one start."""
    path = tmp_path / "found.json"
    ended = Workers([[str(Path(context_worker.__file__)), str(path)]] * 4, tmp_path).join(120)
    assert [end.status for end in ended] == [0] * 4, "".join(end.error for end in ended)
    found = json.loads(path.read_text())
    assert len(found) == 2 * len(context_worker.cases())
    for row in found:
        assert max(row["loss"], row["gradients"], row["figures"]) < BOUND, row
        assert not row["choices differ"], row
        # One process alone has not the whole loss.
        assert row["share"] > 0.1, row
    assert sum(row["choices"] for row in found) > 35
    windows_exchange_their_neighbours_keys({row["name"]: row["received"] for row in found})


def windows_exchange_their_neighbours_keys(received):
    """Bytes of the layers: a window of 14 gets 13 tokens in front of each chunk but the first; a dense layer all."""
    rows, length, config = context_worker.ROWS, context_worker.LENGTH, small_config()
    token = config.num_kv_heads * (config.head_dim + config.value_dim) * torch.float64.itemsize
    for size in (2, 4):
        # Rank 0 measures every other case; of a pack all rows are one.
        for name, tokens in (("window, dense", 13 * rows), ("window, dense, packed", 13)):
            window, dense = received[f"{name}, {size} processes"]
            assert window in (tokens * token, 2 * tokens * token) and dense == rows * length * token, name
    near, _ = received["window, selected, index, 2 processes"]
    far, _ = received["window, selected, index, 4 processes"]
    assert near <= 2 * 19 * rows * token < far == rows * length * token


LENGTH = 36
FLAGS = (
    *("--train.sequence_length", str(LENGTH), "--data.streams", "2", "--train.micro_batch_size", "1"),
    *("--evaluate.sequences", "6", "--model.chooser", "index", "--train.choice_loss_weight", "0.5"),
    *("--train.choice_loss_sample", "0.2", "--checkpoint.keep_last", "4", "--log.sample_interval_steps", "3"),
    *("--log.sample_tokens", "4", "--log.telemetry_interval_steps", "6"),
    # At 1e-2 a rounding grows tenfold in each step.
    *("--optimizer.learning_rate", "2e-3"),
    # Muon's matrices, of which three of four shards may have fewer rows, are divided among the processes.
    *("--optimizer.kind", "muon", "--model.mlp_dim", "30"),
)

# The same rows, two at a time. Two groups share three batches of an evaluation: one takes the last one again.
TWO_ROWS = ("--train.micro_batch_size", "2")


def figures(run):
    """Figures of the training steps and evaluations."""
    rows = read_metrics(run / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["tokens_seen"] == 4 * LENGTH * row["step"] for row in rows)
    found = {name: [row[name] for row in rows] for name in ("loss", "gradient_norm", "choice_loss", "divergence")}
    found["choice_recall"] = [recall for row in rows for recall in row["choice_recall"]]
    evaluations = read_metrics(run / "metrics.jsonl", "evaluation")
    return found | {name: [row[name] for row in evaluations] for name in ("validation_loss", "bits_per_byte")}


def finish(folder, size, *flags, config=True, follows=True, fault="", **variables):
    """A run, or the rest of one; what it learns from a model that it follows is shared like its loss."""
    folder.mkdir(exist_ok=True)
    path = write_config(folder) if config else None
    if config and follows:
        flags = (*flags, "--distill.from", str(write_model(folder / "frozen")), "--distill.text_weight", "0.5")
    ended = train(folder, path, *flags, size=size, fault=fault, **variables).finish()
    assert all("warn" not in end.error.lower() for end in ended), ended[0].error
    return folder / "run"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run of one process."""
    return finish(tmp_path_factory.mktemp("one"), 1, *FLAGS)


def same(run, one):
    """Sums over processes round otherwise; six steps at 1e-2 pass that on."""
    for name, values in figures(one).items():
        assert figures(run)[name] == pytest.approx(values, rel=1e-3), name


def test_a_run_is_that_of_one_process(one, tmp_path):
    """Two processes with rows of packed documents, two at a time; the attention's statistics are of whole rows."""
    run = finish(tmp_path, 2, *FLAGS, "--parallel.context", "2", *TWO_ROWS)
    same(run, one)
    notes = [row["message"] for row in read_metrics(run / "metrics.jsonl", "event") if row["name"] == "note"]
    assert any(note.endswith("; 2 processes share each row") for note in notes)
    measured = [read_metrics(path / "metrics.jsonl", "telemetry") for path in (run, one)]
    assert len(measured[1]) == 2
    for mine, theirs in zip(*measured, strict=True):
        assert mine["gate_mean_slc"] == pytest.approx(theirs["gate_mean_slc"], rel=1e-3)


def test_recorded_steps_are_the_same(one, tmp_path):
    """Four processes, two a row, their weights sharded; gradients are added up in fixed buffers."""
    same(
        finish(tmp_path, 4, *FLAGS, *TWO_ROWS, "--parallel.context", "2", "--parallel.mode", "fsdp", fault="graphs"),
        one,
    )


def test_compiled_layers_are_the_same(tmp_path):
    """The exchange of keys is an operator for the compiler, and is repeated where activations are made again.

    The compiler takes most of the time, so there is one layer.
    """
    few = ("--train.sequence_length", str(LENGTH), "--evaluate.interval_steps", "0", "--model.attention", "dense")
    few += ("--model.num_layers", "1")
    flags = ("--parallel.context", "2", "--train.compile", "true", "--train.activation_checkpointing", "all")
    plain = finish(tmp_path / "plain", 1, *few, follows=False)
    run = finish(tmp_path, 2, *few, *flags, follows=False, fault="compiled", FAULT_FILE=str(tmp_path / "graphs"))
    for mine, theirs in zip(*(read_metrics(path / "metrics.jsonl", "train") for path in (run, plain)), strict=True):
        for name in ("loss", "gradient_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3)
    assert (tmp_path / "graphs1").read_text()


def test_a_run_continues_with_any_number(one, tmp_path):
    """One process, then two that share rows, then four, two by two and with two copies of the weights."""
    run = tmp_path / "run"
    shutil.copytree(one, run)
    for step, size, context, mode in ((2, 2, 2, "ddp"), (4, 4, 2, "hsdp")):
        flags = ("--resume", str(run), "--checkpoint", f"step_{step:08}", "--parallel.mode", mode)
        flags = (*flags, "--parallel.context", str(context), "--parallel.shards", "2")
        finish(tmp_path, size, *flags, config=False)
        same(run, one)
