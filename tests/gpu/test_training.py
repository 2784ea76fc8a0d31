"""Training steps on a GPU in every form: eager, compiled, recorded as graphs, and both."""

import copy

import pytest
import torch

from tests.devices import QUIET_GPU
from tests.models.conftest import gpu_model
from trifocal.data import Batch
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.train.config.sections import OptimizerSection, TrainSection
from trifocal.train.step.cuda_graphs import MicroBatchGraphs
from trifocal.train.step.optimizer import make_optimizer
from trifocal.train.step.step import TrainStep

pytestmark = list(QUIET_GPU)

GPU = torch.device("cuda")
LENGTH = 1088


def draw_batches():
    """Micro-batches of both kinds, with different borders, none of them with as many valid targets as another."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number, inside in enumerate([None, [5, 40, 700], None, [333]]):
        tokens = torch.randint(257, (2, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[0, : 3 * number] = -100
        borders = None
        if inside is not None:
            borders = torch.tensor([0, *inside, LENGTH, 2 * LENGTH], dtype=torch.int32)
        batches.append(Batch(tokens[:, :-1].contiguous(), targets, borders, (), 0, (0,), int((targets != -100).sum())))
    return batches


def take_steps(model, folder, *, compile=False, cuda_graphs=False, precision="bf16", steps=3):
    """Losses, gradient norms, and the first step's gradients."""
    torch._dynamo.reset()
    config = TrainSection(precision=precision, compile=compile, cuda_graphs=cuda_graphs)
    optimizer = make_optimizer(model, OptimizerSection(learning_rate=1e-3))
    if compile:
        model.compile_training()
    graphs = MicroBatchGraphs(model, model, GPU, precision) if cuda_graphs else None
    train_step = TrainStep(model, optimizer, GPU, config, graphs=graphs)
    results, gradients = [], []
    for step in range(1, steps + 1):
        result = train_step.run(step, draw_batches(), phases=Heartbeat(folder, device=GPU))
        assert result.finite.wait()
        results.append((result.loss.item(), result.gradient_norm.item()))
        gradients = gradients or [parameter.grad.clone() for parameter in model.parameters()]
    if graphs is not None:
        assert graphs.memory_bytes > 0
    return results, gradients


@pytest.fixture(scope="module")
def model():
    """Weights that all tests start from."""
    return gpu_model()


@pytest.mark.parametrize("checkpointed", [0, 2])
def test_graphs_change_nothing(model, tmp_path, checkpointed):
    """Who starts the kernels is all that differs: the same losses, norms and gradients, but for the order that a
    library may choose for a sum."""
    found = []
    for cuda_graphs in (False, True):
        own = copy.deepcopy(model)
        own.set_activation_checkpointing(0, checkpointed)
        found.append(take_steps(own, tmp_path, cuda_graphs=cuda_graphs))
    (losses, gradients), (recorded_losses, recorded_gradients) = found
    torch.testing.assert_close(recorded_losses, losses, rtol=1e-3, atol=0)
    for mine, theirs in zip(recorded_gradients, gradients, strict=True):
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm()


@pytest.mark.parametrize("checkpointed", [0, 2])
def test_compiling_and_recording_err_no_more_than_eager_passes(model, tmp_path, checkpointed):
    """bf16 against fp32, every parameter. Compiling keeps more in fp32, and so must not be worse; recorded passes read
    weights in bf16, for which the compiler may fuse and keep other things, but not worse ones."""
    exact = take_steps(copy.deepcopy(model), tmp_path, precision="fp32", steps=1)[1]
    losses, errors = [], {}
    for form in ({}, {"compile": True}, {"compile": True, "cuda_graphs": True}):
        own = copy.deepcopy(model)
        own.set_activation_checkpointing(0, checkpointed)
        found, gradients = take_steps(own, tmp_path, steps=1, **form)
        losses.append(found)
        errors[len(form)] = [
            ((mine - right).norm() / right.norm()).item() for mine, right in zip(gradients, exact, strict=True)
        ]
    torch.testing.assert_close(losses[2], losses[1], rtol=1e-3, atol=0)
    for name, eager, compiled, recorded in zip(dict(model.named_parameters()), *errors.values(), strict=True):
        assert compiled <= 1.5 * eager, (name, eager, compiled)
        assert recorded <= 1.5 * eager, (name, eager, recorded)
        assert max(compiled, recorded) < 0.1, (name, compiled, recorded)
    assert sum(errors[2]) <= 1.1 * sum(errors[1]), (errors[1], errors[2])
