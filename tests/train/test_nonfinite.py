"""A step that is not finite ends the run before it does harm, and says why."""

import json
import math
import time

import pytest
import torch

from tests.train.tiny import before_step, make_config
from trifocal.models import DecoderLM
from trifocal.runlog import read_metrics
from trifocal.train import NonFiniteError, train
from trifocal.train.checkpoint import save_load


def poison(step, name, value):
    """Make one entry of a parameter's gradient not finite in one step."""

    def action(now, arguments):
        parameter = dict(arguments["loss_function"].named_parameters())[name]
        if now == step:
            handle = parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([1]), value))
            action.handle = handle
        elif hasattr(action, "handle"):
            action.handle.remove()

    return action


def test_the_last_checkpoint_is_whole_when_the_run_has_failed(tmp_path, monkeypatch):
    """It is written by a thread, which ends with the process."""
    write = save_load._write
    monkeypatch.setattr(save_load, "_write", lambda *given: (time.sleep(0.5), write(*given)))
    before_step(monkeypatch, poison(5, "head.weight", math.nan))
    flags = ("--checkpoint.interval_steps", "4", "--checkpoint.asynchronous", "true", "--evaluate.interval_steps", "0")
    with pytest.raises(NonFiniteError):
        train(make_config(tmp_path, *flags))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004"]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl", "event")[-1]["name"] == "checkpoint_saved"


@pytest.mark.parametrize(("value", "log_interval"), [(math.nan, "100"), (math.inf, "1")])
def test_a_bad_gradient_stops_the_run_before_it_is_applied(tmp_path, monkeypatch, value, log_interval):
    """Whether or not the host would have looked at the step for its own sake (a log interval of 100)."""
    bad = "blocks.1.mlp.up_proj.weight"
    flags = ("--log.interval_steps", log_interval, "--checkpoint.interval_steps", "4", "--evaluate.interval_steps", "0")
    before_step(monkeypatch, poison(5, bad, value))
    with pytest.raises(NonFiniteError) as caught:
        train(make_config(tmp_path, *flags))
    run = tmp_path / "run"
    message = str(caught.value)
    assert message.startswith("step 5: gradient norm ")
    assert f"first parameter with a non-finite gradient: {bad} (1 in all); documents: " in message
    event = read_metrics(run / "metrics.jsonl", "event")[-1]
    assert (event["name"], event["severity"], event["message"]) == ("non_finite", "error", message)
    assert json.loads((run / "heartbeat" / "rank0.jsonl").read_text().splitlines()[-1])["status"] == "failed"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000004"]


@pytest.mark.parametrize("interval", ["0", "2"], ids=["last", "checkpoint"])
def test_an_update_that_makes_weights_infinite_is_not_saved(tmp_path, monkeypatch, interval):
    """Loss and gradient of the step are finite; no evaluation and no later step sees the weights."""

    def action(now, arguments):
        if now == 4:
            arguments["optimizer"].param_groups[0]["lr"] = math.inf

    before_step(monkeypatch, action)
    flags = ("--train.steps", "4" if interval == "0" else "6", "--evaluate.interval_steps", "0")
    with pytest.raises(
        NonFiniteError, match=r"step 4: the update, with a .* made weights that are not finite; first parameter: \w"
    ):
        train(make_config(tmp_path, "--checkpoint.interval_steps", interval, *flags))
    run = tmp_path / "run"
    saved = sorted(path.name for path in run.glob("checkpoints/*"))
    assert saved == ([] if interval == "0" else ["step_00000002"])
    assert not (run / "weights").exists()
    event = read_metrics(run / "metrics.jsonl", "event")[-1]
    assert (event["name"], event["severity"]) == ("non_finite", "error")


def test_a_bad_loss_stops_the_run(tmp_path, monkeypatch):
    forward = DecoderLM.forward
    calls = []

    def broken(self, *args, **kwargs):
        calls.append(1)
        loss = forward(self, *args, **kwargs)
        # Two micro-batches a step: the second of step 2.
        return loss + math.inf if len(calls) == 4 else loss

    monkeypatch.setattr(DecoderLM, "forward", broken)
    with pytest.raises(NonFiniteError, match="step 2: loss inf is not finite; all gradients are finite"):
        train(make_config(tmp_path))
