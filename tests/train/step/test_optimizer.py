"""Weight decay by kind of parameter; a gradient that is not finite changes nothing."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Geometry
from trifocal.train.config.sections import OptimizerSection, RunConfig, ScheduleSection, TrainSection
from trifocal.train.step.optimizer import DeviceFlag, gradient_norm, guarded_step, make_optimizer
from trifocal.train.step.schedule import learning_rate

SMALL = ModelConfig(
    vocab_size=20,
    dim=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    value_dim=8,
    mlp_dim=32,
    compressor="mlp",
    geometry=Geometry(4, 2, 8, 3, 1, 1, 8),
)


def names_of_group(model: nn.Module, optimizer: torch.optim.AdamW, decayed: bool) -> set[str]:
    wanted = {id(p) for g in optimizer.param_groups if (g["weight_decay"] > 0) == decayed for p in g["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in wanted}


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_only_the_matrices_of_linear_maps_decay(tie_embeddings: bool) -> None:
    model = DecoderLM(replace(SMALL, tie_embeddings=tie_embeddings))
    optimizer = make_optimizer(model, OptimizerSection(weight_decay=0.1))
    decayed, spared = names_of_group(model, optimizer, True), names_of_group(model, optimizer, False)
    assert decayed | spared == {name for name, _ in model.named_parameters()}
    assert not decayed & spared
    for word in ("norm", "bias", "embedding", "positions"):
        named = {name for name, _ in model.named_parameters() if word in name}
        assert named, f"the model has no parameter called {word}: this test looks at nothing"
        assert named <= spared
    assert all(name.endswith("proj.weight") for name in decayed - {"head.weight"})
    assert ("head.weight" in decayed) != tie_embeddings


def make_problem(gradient: Tensor) -> tuple[nn.Linear, torch.optim.AdamW, list[nn.Parameter]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimizerSection(learning_rate=0.1))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    guarded_step(optimizer, parameters, gradient_norm(parameters), torch.tensor(1.0), 0.0)
    parameters[0].grad = gradient
    return model, optimizer, parameters


@pytest.mark.parametrize(("bad_gradient", "bad_loss"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_a_step_that_is_not_finite_changes_nothing(bad_gradient: float, bad_loss: float) -> None:
    gradient = torch.ones(2, 3)
    gradient[1, 2] = bad_gradient
    _, optimizer, parameters = make_problem(gradient.clone())
    weights = [parameter.detach().clone() for parameter in parameters]
    states = [{name: value.clone() for name, value in optimizer.state[p].items()} for p in parameters]
    finite = guarded_step(optimizer, parameters, gradient_norm(parameters), torch.tensor(bad_loss), 1.0)
    assert not finite.wait()
    for parameter, weight, state in zip(parameters, weights, states, strict=True):
        assert torch.equal(parameter, weight)
        for name, value in state.items():
            assert torch.equal(optimizer.state[parameter][name], value), name
    # Clipping must not have spread the bad entry over the others: it is how its parameter is found.
    if bad_loss == 1.0:
        assert torch.isfinite(parameters[0].grad).sum() == 5
        assert torch.isfinite(parameters[1].grad).all()
    parameters[0].grad = torch.ones(2, 3)
    assert guarded_step(optimizer, parameters, gradient_norm(parameters), torch.tensor(1.0), 1.0).wait()
    assert optimizer.state[parameters[0]]["step"] == 2


def test_the_host_can_know_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the flag is queued in front of the update, which the host then need not wait for."""
    _, adamw, parameters = make_problem(torch.ones(2, 3))
    queued = []

    class Flag(DeviceFlag):
        def __init__(self, value: Tensor) -> None:
            queued.append("flag")
            super().__init__(value)

    monkeypatch.setattr("trifocal.train.step.optimizer.DeviceFlag", Flag)
    monkeypatch.setattr(adamw, "step", lambda: queued.append("update"))
    assert guarded_step(adamw, parameters, gradient_norm(parameters), torch.tensor(1.0), 1.0).wait()
    assert queued == ["flag", "update"]


def test_clips_to_the_norm_and_steps_like_plain_adamw() -> None:
    gradient = torch.full((2, 3), 3.0)
    model, optimizer, parameters = make_problem(gradient.clone())
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(
        [{"params": [twin.weight], "weight_decay": 0.01}, {"params": [twin.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
        fused=False,
    )
    for theirs, ours in zip(twin.parameters(), parameters, strict=True):
        plain.state[theirs] = {name: value.clone() for name, value in optimizer.state[ours].items()}
    norm = (6 * 9.0 + 2 * 1.0) ** 0.5
    twin.weight.grad, twin.bias.grad = gradient / (norm + 1e-6) * 2.0, torch.ones(2) / (norm + 1e-6) * 2.0
    plain.step()
    measured = gradient_norm(parameters)
    assert measured.item() == pytest.approx(norm)
    assert guarded_step(optimizer, parameters, measured, torch.tensor(1.0), 2.0).wait()
    for theirs, ours in zip(twin.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def rates(warmup_steps: int, total_steps: int, minimum_factor: float = 0.1) -> list[float]:
    config = RunConfig(
        train=TrainSection(steps=total_steps),
        optimizer=OptimizerSection(learning_rate=2.0),
        schedule=ScheduleSection(warmup_steps=warmup_steps, minimum_factor=minimum_factor),
    )
    return [learning_rate(config, step) for step in range(1, total_steps + 1)]


def test_warms_up_linearly_to_the_peak_and_ends_on_the_floor() -> None:
    values = rates(4, 20)
    assert values[:4] == [0.5, 1.0, 1.5, 2.0]
    assert values[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(values[3:]))
    # Half-way between step 4 and step 20 a cosine stands half-way between peak and floor.
    assert values[11] == pytest.approx((2.0 + 0.2) / 2)


def test_rates_at_the_corners() -> None:
    """Without a warm-up; with one that is longer than the run; with a floor of one."""
    assert rates(0, 10)[0] == 2.0
    assert rates(20, 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates(0, 5, minimum_factor=1.0) == [2.0] * 5
