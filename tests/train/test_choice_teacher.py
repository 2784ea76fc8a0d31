"""The loss of the choice in a training step: it teaches the index only, however a batch is cut."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.train.step.test_step import read_batches
from tests.train.tiny import assert_same_tensors, make_config, read_checkpoint
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.runlog import read_metrics
from trifocal.train import resume, train
from trifocal.train.choice_teacher import ChoiceTeacher
from trifocal.train.config.check import preflight
from trifocal.train.step.optimizer import make_optimizer
from trifocal.train.step.schedule import learning_rate
from trifocal.train.step.step import TrainStep

CPU = torch.device("cpu")
# Rows of 32 tokens in which the last queries of each document have more free blocks than places.
TAUGHT = ("--train.choice_loss_weight", "0.5", "--train.choice_loss_sample", "0.5")
INDEX = ("--model.chooser", "index")


def take_step(config, batches, heartbeat, *, step=3):
    model = DecoderLM(config.model)
    model.init_weights(5)
    model.set_activation_checkpointing(*config.train.checkpointed_layers(config.model.num_layers))
    teacher = ChoiceTeacher(model, config.train, CPU) if config.train.choice_weight(config.model) else None
    function = model if teacher is None else partial(model, teaching=teacher.teaching)
    if teacher is None:
        for layer in model.attention_layers():
            layer.choice_loss_weight = 0.0
    optimizer = make_optimizer(model, config.optimizer)
    train_step = TrainStep(function, optimizer, CPU, config.train, teacher=teacher)
    result = train_step.run(step, batches, phases=heartbeat)
    assert result.finite.wait()
    return result, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, model


@pytest.mark.parametrize("attention", ["nsa", "selected"])
def test_all_but_the_index_gets_the_same_update(tmp_path, heartbeat, attention):
    config = make_config(tmp_path, *INDEX, *TAUGHT, "--model.attention", attention)
    batches = read_batches(config, 2, 2)
    silent = replace(config, train=replace(config.train, choice_loss_weight=0.0))
    plain, _, without = take_step(silent, batches, heartbeat)
    result, gradients, taught = take_step(config, batches, heartbeat)
    assert plain.choice is None
    assert result.choice[:, 0].min() > 0.01
    assert result.choice[:, 1].min() > 0.1 and result.choice[:, 1].max() <= 1
    assert torch.equal(result.loss, plain.loss)
    assert torch.equal(result.gradient_norm, plain.gradient_norm)
    others = dict(without.named_parameters())
    index = [name for name in others if ".index." in name]
    assert len(index) == 4 and all(gradients[name].any() for name in index)
    for name, parameter in taught.named_parameters():
        assert (name in index) != torch.equal(parameter, others[name]), name


def test_how_a_batch_is_cut_does_not_matter(tmp_path, heartbeat):
    config = make_config(tmp_path, *INDEX, *TAUGHT, "--train.gradient_clip_norm", "0")
    whole = take_step(config, read_batches(config, 4, 1), heartbeat)
    checkpointed = replace(config, train=replace(config.train, activation_checkpointing="all"))
    others = {
        "accumulated": take_step(config, read_batches(config, 1, 4), heartbeat),
        "checkpointed": take_step(checkpointed, read_batches(config, 4, 1), heartbeat),
    }
    for name, (result, gradients, _) in others.items():
        torch.testing.assert_close(result.choice, whole[0].choice, rtol=1e-5, atol=1e-7, msg=name)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole[1][parameter], rtol=1e-4, atol=1e-6, msg=f"{name}: {parameter}")
    another, _, _ = take_step(config, read_batches(config, 4, 1), heartbeat, step=4)
    assert not torch.equal(another.choice, whole[0].choice), "each step has its own sample"


def test_an_index_has_its_own_learning_rate(tmp_path, heartbeat):
    """The first step of Adam without decay moves each parameter by its learning rate."""
    config = make_config(tmp_path, *INDEX, *TAUGHT, "--optimizer.weight_decay", "0", "--optimizer.index_lr_factor", "1")
    batches = read_batches(config, 2, 2)
    faster = replace(config, optimizer=replace(config.optimizer, index_lr_factor=3.0))
    _, gradients, plain = take_step(config, batches, heartbeat)
    _, _, fast = take_step(faster, batches, heartbeat)
    start = DecoderLM(config.model)
    start.init_weights(5)
    begin, moved = dict(start.named_parameters()), dict(fast.named_parameters())
    for name, parameter in plain.named_parameters():
        if ".index." not in name:
            assert torch.equal(parameter, moved[name]), name
            continue
        taught = gradients[name].abs() > 1e-5
        ratio = ((moved[name] - begin[name]) / (parameter - begin[name]))[taught]
        assert taught.any() and ratio.detach() == pytest.approx(3.0, rel=1e-2), name


def test_no_eligible_query_is_no_loss(tmp_path, heartbeat):
    config = make_config(tmp_path, *INDEX, *TAUGHT, "--model.geometry.num_selected_blocks", "4")
    batches = read_batches(config, 2, 2)
    assert sum(ChoiceTeacher(DecoderLM(config.model), config.train, CPU).eligible(batches, 3)) == 0
    result, gradients, _ = take_step(config, batches, heartbeat)
    assert result.choice is not None and not result.choice.any()
    assert not any(gradient.any() for name, gradient in gradients.items() if ".index." in name)


@pytest.mark.parametrize(
    ("model", "weight"),
    [
        ((), 0),
        (INDEX, 1),
        ((*INDEX, *TAUGHT), 0.5),
        # A mix whose layers have no choice.
        ((*INDEX, "--model.layer_types", "window", "dense"), 0),
        # A control, in which no index chooses.
        ((*INDEX, "--model.selection", "random"), 0),
    ],
)
def test_the_weight_follows_the_model_unless_it_is_given(tmp_path, model, weight):
    config = make_config(tmp_path, *model)
    assert config.train.choice_weight(config.model) == weight
    preflight(config, CPU)


def test_a_stretch_is_that_of_any_loop_and_at_most_a_row(tmp_path):
    config = make_config(tmp_path, *INDEX, "--train.sequence_length", "1000")
    layers = DecoderLM(config.model).attention_layers()
    assert {layer.choice_loss_stretch for layer in layers} == {config.train.choice_loss_stretch}
    assert replace(config.train, sequence_length=32).choice_loss_stretch == 32


@pytest.mark.parametrize("only", ["all", "chooser"])
def test_a_run_writes_the_loss_of_its_choice_and_teaches_the_same_when_resumed(tmp_path, only):
    # Traces and telemetry find nothing of what is frozen.
    seen = ("--trace.what", "gradients,modules,memory", "--trace.steps", "2:3", "--log.telemetry_interval_steps", "2")
    config = make_config(tmp_path, *INDEX, *TAUGHT, *seen, "--train.only", only)
    train(config)
    run = Path(config.run.directory)
    whole = read_checkpoint(run / "checkpoints" / "step_00000006")
    rows = read_metrics(run / "metrics.jsonl", "train")
    assert len(rows) == 6 and all(row["choice_loss"] > 0 for row in rows)
    # Also where only the index learns, at three times this rate.
    rates = [learning_rate(config, step) for step in range(1, 7)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)
    assert all(len(row["choice_recall"]) == 2 and 0 < min(row["choice_recall"]) <= 1 for row in rows)
    assert resume(run, checkpoint="step_00000004").finished
    assert_same_tensors(read_checkpoint(run / "checkpoints" / "step_00000006"), whole)
    again = read_metrics(run / "metrics.jsonl", "train")
    assert [row["choice_recall"] for row in again] == [row["choice_recall"] for row in rows]
    # The moments of everything else would be lost, or lack.
    other = replace(config, train=replace(config.train, only="chooser" if only == "all" else "all"))
    with pytest.raises(UserError, match=rf'train\.only is "{only}" in .* here, .* \(--model\.from .* NEW\)$'):
        resume(run, config=other)
