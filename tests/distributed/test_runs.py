"""Whole runs in several processes: the same losses as in one, and checkpoints that load in any mode and number."""

import json
import shutil

import pytest
import torch

from tests.distributed.workers import train
from tests.train.tiny import assert_same_tensors, read_checkpoint, write_config, write_documents, write_model
from trifocal import load_model
from trifocal.runlog import read_metrics

FLAGS = ("--log.sample_interval_steps", "3", "--log.sample_tokens", "4", "--checkpoint.keep_last", "4",
         "--data.streams", "2")  # fmt: skip
# Sums over processes round otherwise than sums over rows; six steps of AdamW at 1e-2 pass that on.
LOSS_TOLERANCE = 1e-4


def losses(run):
    """The training losses by step, and then the validation losses."""
    rows = read_metrics(run / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["tokens_seen"] == 4 * 32 * row["step"] for row in rows)
    evaluations = read_metrics(run / "metrics.jsonl", "evaluation")
    return [row["loss"] for row in rows] + [row["validation_loss"] for row in evaluations]


def finish(folder, mode, size, *flags, fault="", **variables):
    """A whole run."""
    folder.mkdir(exist_ok=True)
    flags = (*FLAGS, "--parallel.mode", mode, *flags)
    ended = train(folder, write_config(folder), *flags, size=size, fault=fault, **variables).finish()
    assert all("warn" not in end.error.lower() for end in ended), ended[0].error
    return folder / "run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of one process and of two in each mode; under ddp, each has fewer sequences than a micro-batch may have."""
    folder = tmp_path_factory.mktemp("runs")
    whole = ("--train.micro_batch_size", "4")
    return {
        "none": finish(folder / "none", "auto", 1),
        "ddp": finish(folder / "ddp", "ddp", 2, *whole),
        "fsdp": finish(folder / "fsdp", "fsdp", 2),
    }


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_losses_do_not_depend_on_the_number_of_processes(runs, mode):
    """Training and validation; four sequences are one micro-batch each of two processes, or two of one.

    AdamW forgives a gradient of twice the size, and the logged norms do not.
    """
    assert losses(runs[mode]) == pytest.approx(losses(runs["none"]), rel=LOSS_TOLERANCE)
    several, one = (
        [row["gradient_norm"] for row in read_metrics(runs[name] / "metrics.jsonl", "train")] for name in (mode, "none")
    )
    assert several == pytest.approx(one, rel=1e-3)
    whole, expected = (load_model(runs[name] / "weights").state_dict() for name in (mode, "none"))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)


def test_gradients_of_recorded_graphs_are_the_same(runs, tmp_path):
    """Exchanged after backward; two micro-batches a step, plain rows and packed documents."""
    run = finish(tmp_path / "graphs", "ddp", 2, "--train.micro_batch_size", "1", fault="graphs")
    assert losses(run) == pytest.approx(losses(runs["ddp"]), rel=LOSS_TOLERANCE)


def test_a_taught_choice_is_that_of_one_process(tmp_path):
    """The queries, their loss and its scale: two processes, and two sharded and recorded ones; and what is learned from
    a frozen model meanwhile, on two sources.
    """
    frozen = write_model(tmp_path / "frozen")
    flags = ("--model.chooser", "index", "--train.choice_loss_weight", "0.5", "--train.choice_loss_sample", "0.5")
    flags = (*flags, "--log.sample_interval_steps", "0", "--distill.from", str(frozen))
    sources = [f"text:{write_documents(tmp_path / name, count)}" for name, count in (("first", 24), ("second", 12))]
    flags = (
        *flags,
        "--data.source",
        *sources,
        "--data.weights=2,1",
        "--data.weights_after=1,3",
        "--data.change_step=3",
    )
    small = ("--train.micro_batch_size", "1")
    found = [
        finish(tmp_path / "none", "auto", 1, *flags),
        finish(tmp_path / "ddp", "ddp", 2, *flags),
        finish(tmp_path / "fsdp graphs", "fsdp", 2, *flags, *small, fault="graphs"),
    ]
    taught = [[row["choice_loss"] for row in read_metrics(run / "metrics.jsonl", "train")] for run in found]
    assert min(taught[0]) > 0.01
    divergences = [[row["divergence"] for row in read_metrics(run / "metrics.jsonl", "train")] for run in found]
    assert divergences[0][-1] < 0.9 * divergences[0][0]
    for mine in divergences[1:]:
        assert mine == pytest.approx(divergences[0], rel=1e-3)
    for run, choice_losses in zip(found[1:], taught[1:], strict=True):
        assert losses(run) == pytest.approx(losses(found[0]), rel=LOSS_TOLERANCE)
        assert choice_losses == pytest.approx(taught[0], rel=1e-3)
        mine, one = (read_metrics(path / "metrics.jsonl", "evaluation")[-1] for path in (run, found[0]))
        for source in sources:
            key = f"validation_loss/{source}"
            assert mine[key] == pytest.approx(one[key], rel=LOSS_TOLERANCE)
        whole, expected = (load_model(path / "weights").state_dict() for path in (run, found[0]))
        torch.testing.assert_close(whole, expected, rtol=0.05, atol=5e-3)


def test_the_gradient_of_an_index_is_that_of_one_process(tmp_path):
    """Averaged during backward, or added up behind it. Where all else is frozen, the norm that is logged is its own."""
    flags = ("--model.chooser", "index", "--train.choice_loss_sample", "0.5", "--train.only", "chooser")
    flags = (*flags, "--train.steps", "2", "--evaluate.interval_steps", "0", "--log.sample_interval_steps", "0")
    norms = []
    for mode, size, fault in (("auto", 1, ""), ("ddp", 2, ""), ("ddp", 2, "graphs")):
        run = finish(tmp_path / f"{mode}{fault}", mode, size, *flags, fault=fault)
        norms.append([row["gradient_norm"] for row in read_metrics(run / "metrics.jsonl", "train")])
    assert len(norms[0]) == 2 and min(norms[0]) > 0
    for several in norms[1:]:
        assert several == pytest.approx(norms[0], rel=1e-3)


def test_compiled_checkpointed_layers_are_the_same(tmp_path):
    """And compiled: the hooks of FSDP stay outside, so that all layers share one's graphs. The layers are OLMo 2's."""
    olmo = (f"--model.{name}=true" for name in ("norm_after", "qk_norm", "qk_norm_all_heads"))
    dense = ("--model.attention", "dense", *olmo, "--evaluate.interval_steps", "0", "--log.sample_interval_steps", "0")
    plain = finish(tmp_path / "plain", "auto", 1, *dense)
    flags = ("--train.compile", "true", "--train.activation_checkpointing", "all", *dense)
    run = finish(tmp_path, "fsdp", 2, *flags, fault="compiled", FAULT_FILE=str(tmp_path / "graphs"))
    assert losses(run) == pytest.approx(losses(plain), rel=LOSS_TOLERANCE)
    made = [(tmp_path / f"graphs{rank}").read_text().splitlines() for rank in (0, 1)]
    # What layers share, a layer, and the end of the model.
    assert len(made[0]) == len(made[1]) == 3


def test_each_rank_writes_its_own_and_rank_0_the_rest(runs):
    run = runs["fsdp"]
    assert sorted(path.name for path in (run / "heartbeat").iterdir()) == ["rank0.jsonl", "rank1.jsonl"]
    for rank in (0, 1):
        last = json.loads((run / "heartbeat" / f"rank{rank}.jsonl").read_text().splitlines()[-1])
        assert (last["status"], last["rank"], last["step"]) == ("finished", rank, 6)
        assert "wait" in last["total_seconds"]
    checkpoint = run / "checkpoints" / "step_00000006"
    assert {path.name for path in checkpoint.iterdir()} == {"manifest.json", "rank0.json", "rank1.json", "weights"}
    manifest = json.loads((checkpoint / "manifest.json").read_text())["content"]["files"]
    weights = {f"weights/shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)}
    assert manifest.keys() == {"rank0.json", "rank1.json", *weights}
    assert len((run / "samples" / "step_00000006.txt").read_text()) > 4
    notes = [row["message"] for row in read_metrics(run / "metrics.jsonl", "event") if row["name"] == "note"]
    assert any("2 processes, fsdp" in note for note in notes)


def test_any_number_continues_from_any_other(runs, tmp_path):
    """Four from the checkpoint of one, two from that of four, one from that of two."""
    expected = losses(runs["none"])
    # The same rows in each evaluation, though a micro-batch of four processes has one.
    rows = ("--train.micro_batch_size", "1")
    run, source = tmp_path / "run", runs["none"]
    shutil.copytree(source, run)
    for step, mode, size in ((2, "fsdp", 4), (4, "hsdp", 2), (4, "auto", 1)):
        flags = ("--resume", str(run), "--checkpoint", f"step_{step:08}", "--parallel.mode", mode, *rows)
        train(tmp_path, None, *flags, size=size).finish()
        assert len(list((run / "heartbeat").iterdir())) == size, "no others count as lost"
        assert losses(run) == pytest.approx(expected, rel=LOSS_TOLERANCE)
        assert final(run)["data"] == final(source)["data"]


@pytest.mark.parametrize(("mode", "size"), [("fsdp", 2), ("ddp", 3)])
def test_the_same_number_continues_bit_for_bit(runs, tmp_path, mode, size):
    """Sums of three depend on their order; and DDP's first step differs in its buckets, and in how it accumulates.

    And Muon's matrices, which three processes divide.
    """
    flags = ("--train.global_batch_size", "6", "--train.micro_batch_size", "1", "--parallel.static_graph", "true")
    flags = (*flags, "--optimizer.kind", "muon")
    run = runs["fsdp"] if size == 2 else finish(tmp_path / "three", mode, size, *flags)
    resumed = shutil.copytree(run, tmp_path / "run")
    flags = ("--resume", str(resumed), "--checkpoint", "step_00000002", "--parallel.mode", mode)
    train(tmp_path, None, *flags, size=size).finish()
    rows = [read_metrics(folder / "metrics.jsonl", "train") for folder in (resumed, run)]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    mine, theirs = (read_checkpoint(folder / "checkpoints" / "step_00000006") for folder in (resumed, run))
    assert_same_tensors(mine, theirs)
    assert sum("exp_avg" in key or "momentum" in key for key in mine) > 20
    assert [final(resumed, rank) for rank in range(size)] == [final(run, rank) for rank in range(size)]


def final(run, rank=0):
    """The state of a process in the last checkpoint."""
    return json.loads((run / "checkpoints" / "step_00000006" / f"rank{rank}.json").read_text())
