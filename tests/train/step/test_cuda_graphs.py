"""Recorded micro-batches on a CPU: a recorder that only does the work again stands in for the device's.

What is tested is everything around the recording: its own inputs, padding, weights, kinds, gradients that stay.
That a GPU's recording gives the same is in tests/gpu/test_training.py.
"""

import functools
import weakref

import pytest
import torch
from torch import Tensor

from tests.attentions import ATTENTIONS, flags
from tests.train.step.test_step import CPU, read_batches
from tests.train.tiny import Repeater, make_config
from trifocal.models import DecoderLM
from trifocal.runlog import read_metrics
from trifocal.train import train
from trifocal.train.choice_teacher import ChoiceTeacher
from trifocal.train.step import cuda_graphs
from trifocal.train.step.cuda_graphs import MicroBatchGraphs
from trifocal.train.step.micro_batch import model_inputs
from trifocal.train.step.optimizer import make_optimizer
from trifocal.train.step.step import TrainStep


@pytest.fixture(autouse=True)
def _repeat(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "GraphRecorder", Repeater)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    Repeater.recordings = Repeater.passes = 0


def take_steps(config, steps, heartbeat, recorded):
    """Results, and the model with the gradients of the last step."""
    model = DecoderLM(config.model)
    model.init_weights(5)
    optimizer = make_optimizer(model, config.optimizer)
    teacher = ChoiceTeacher(model, config.train, CPU) if config.model.has_index else None
    loss = model if teacher is None else functools.partial(model, teaching=teacher.teaching)
    graphs = MicroBatchGraphs(loss, model, CPU, config.train.precision) if recorded else None
    train_step = TrainStep(loss, optimizer, CPU, config.train, graphs=graphs, teacher=teacher)
    results = [train_step.run(number, batches, phases=heartbeat) for number, batches in enumerate(steps, 1)]
    return results, model


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_recorded_steps_are_the_plain_ones(attention, tmp_path, heartbeat):
    """Several steps of several micro-batches, with and without borders: the same losses, norms and weights."""
    config = make_config(tmp_path, *flags(ATTENTIONS[attention]))
    batches = read_batches(config, 2, 12)
    kinds = {batch.cu_seqlens is None for batch in batches}
    assert kinds == {True, False}
    steps = [batches[first : first + 3] for first in range(0, 12, 3)]
    plain, expected = take_steps(config, steps, heartbeat, recorded=False)
    recorded, given = take_steps(config, steps, heartbeat, recorded=True)
    assert Repeater.recordings == 2
    assert Repeater.passes == 12, "each micro-batch is computed once, as sharded models need it"
    for mine, theirs in zip(recorded, plain, strict=True):
        torch.testing.assert_close(mine.loss, theirs.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(mine.gradient_norm, theirs.gradient_norm, rtol=1e-5, atol=0)
    assert len({result.loss.item() for result in recorded}) == len(recorded), "each result keeps its own loss"
    torch.testing.assert_close([*given.parameters()], [*expected.parameters()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [("--model.compressor", "mlp"), ("--model.tie_embeddings", "true")], ids=str)
def test_bf16_copies_of_the_matrices_give_the_plain_bits(tmp_path, heartbeat, options):
    """Matrices cast once a step, and gradients written in bf16: no bit of loss, norm, gradient or weight changes."""
    config = make_config(tmp_path, "--train.precision", "bf16", "--data.source", "synthetic", *options)
    batches = read_batches(config, 2, 6)
    steps = [batches[:1], batches[1:4], batches[4:]]
    plain, expected = take_steps(config, steps, heartbeat, recorded=False)
    recorded, given = take_steps(config, steps, heartbeat, recorded=True)
    assert Repeater.recordings == 1
    for mine, theirs in zip(recorded, plain, strict=True):
        assert torch.equal(mine.loss, theirs.loss) and torch.equal(mine.gradient_norm, theirs.gradient_norm)
    for (name, mine), theirs in zip(given.named_parameters(), expected.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == torch.float32, name
        assert torch.equal(mine.grad, theirs.grad), name
        assert torch.equal(mine, theirs), name


@pytest.mark.filterwarnings("ignore")
def test_layers_with_copies_share_what_is_compiled(tmp_path, monkeypatch):
    """And autograd hands each gradient over as it is: copies would be kernels. (Tracing takes seconds.)"""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    config = make_config(tmp_path, "--model.attention", "dense", "--data.source", "synthetic")
    model = DecoderLM(config.model)
    model.compile_training()
    graphs = MicroBatchGraphs(model, model, CPU, "bf16")
    for batch in read_batches(config, 2, 2):
        graphs.begin_step()
        graphs.add_gradients(batch, 1.0)
    # A layer and the end of the model.
    assert len(model.blocks) > 1 and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    graphs.begin_step()
    with torch.profiler.profile() as profile:
        graphs.add_gradients(batch, 1.0)
    taken = [event for event in profile.events() if event.name == "torch::autograd::AccumulateGrad"]
    assert len(taken) == len(list(model.parameters()))
    assert {part.name for event in taken for part in event.cpu_children} == {"aten::detach"}


def test_gradients_keep_their_memory_and_take_the_last_ones_place(tmp_path):
    config = make_config(tmp_path)
    batch = read_batches(config, 2, 1)[0]
    model = DecoderLM(config.model)
    graphs = MicroBatchGraphs(model, model, CPU, "fp32")
    graphs.begin_step()
    first = graphs.add_gradients(batch, 0.5).item()
    parameter = next(model.parameters())
    gradient, place = parameter.grad.clone(), parameter.grad.data_ptr()
    graphs.add_gradients(batch, 0.25)
    torch.testing.assert_close(parameter.grad, 1.5 * gradient)
    graphs.begin_step()
    torch.testing.assert_close(parameter.grad, 1.5 * gradient)  # Until the next pass, a bad step can be looked at.
    assert graphs.add_gradients(batch, 1.0).item() == pytest.approx(2 * first, rel=1e-6)
    torch.testing.assert_close(parameter.grad, 2 * gradient)
    assert parameter.grad.data_ptr() == place
    recorded = [weakref.ref(one) for recording in graphs._recordings.values() for one in recording.results]
    graphs.release()
    assert recorded and all(reference() is None for reference in recorded)


def test_rows_become_documents_where_others_have_some(tmp_path):
    config = make_config(tmp_path)
    model = DecoderLM(config.model).double()
    batch = next(batch for batch in read_batches(config, 2, 30) if batch.cu_seqlens is None)
    plain, packed = (model_inputs(batch, pad_documents=True, documents=number) for number in (0, 40))
    assert len(plain) == 2 and packed[2].tolist() == [0, 32, *[64] * 63]
    both = []
    for inputs in (plain, packed):
        loss = cuda_graphs.call_with(model, inputs, batch.rows.shape)
        both.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(both[1], both[0], rtol=1e-12, atol=1e-14)


def test_a_cpu_run_says_that_it_records_nothing(tmp_path):
    train(make_config(tmp_path, "--train.cuda_graphs", "true", "--train.steps", "1"))
    assert Repeater.recordings == 0
    notes = [row["message"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "event") if "message" in row]
    assert any("train.cuda_graphs is for GPUs" in note for note in notes), notes
