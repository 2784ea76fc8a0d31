"""Weight decay by kind of parameter; a gradient that is not finite changes nothing."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.testing.small_models import small_config
from trifocal.train.config.sections import OptimizerSection, RunConfig, ScheduleSection, TrainSection
from trifocal.train.step.muon import SCALE, orthogonalise
from trifocal.train.step.optimizer import DeviceFlag, gradient_norm, guarded_step, make_optimizer
from trifocal.train.step.schedule import learning_rate

SMALL = small_config(num_layers=1, compressor="mlp")


def names_of_group(model, optimizer, decayed):
    wanted = {id(p) for g in optimizer.param_groups if (g["weight_decay"] > 0) == decayed for p in g["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in wanted}


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_only_the_matrices_of_linear_maps_decay(tie_embeddings):
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


def make_problem(gradient):
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
def test_a_step_that_is_not_finite_changes_nothing(bad_gradient, bad_loss):
    gradient = torch.ones(2, 3)
    gradient[1, 2] = bad_gradient
    _, optimizer, parameters = make_problem(gradient.clone())
    weights = [parameter.detach().clone() for parameter in parameters]
    states = [{name: value.clone() for name, value in optimizer.state[p].items()} for p in parameters]
    finite = guarded_step(optimizer, parameters, gradient_norm(parameters), torch.tensor(bad_loss), 1.0)
    assert not finite.wait()
    for parameter, weight, state in zip(parameters, weights, states, strict=True):
        assert torch.equal(parameter, weight)
        torch.testing.assert_close(optimizer.state[parameter], state, rtol=0, atol=0)
    # Clipping must not have spread the bad entry over the others: it is how its parameter is found.
    if bad_loss == 1.0:
        assert torch.isfinite(parameters[0].grad).sum() == 5
        assert torch.isfinite(parameters[1].grad).all()
    parameters[0].grad = torch.ones(2, 3)
    assert guarded_step(optimizer, parameters, gradient_norm(parameters), torch.tensor(1.0), 1.0).wait()
    assert optimizer.state[parameters[0]]["step"] == 2


def test_the_host_can_know_before_the_update(monkeypatch):
    """The copy of the flag is queued in front of the update, which the host then need not wait for."""
    _, adamw, parameters = make_problem(torch.ones(2, 3))
    queued = []

    class Flag(DeviceFlag):
        def __init__(self, value):
            queued.append("flag")
            super().__init__(value)

    monkeypatch.setattr("trifocal.train.step.optimizer.DeviceFlag", Flag)
    monkeypatch.setattr(adamw, "step", lambda: queued.append("update"))
    assert guarded_step(adamw, parameters, gradient_norm(parameters), torch.tensor(1.0), 1.0).wait()
    assert queued == ["flag", "update"]


def test_clips_to_the_norm_and_steps_like_plain_adamw():
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
    torch.testing.assert_close(parameters, [*twin.parameters()], rtol=1e-6, atol=1e-7)


def test_parameters_apart_are_clipped_by_their_own_norm():
    _, optimizer, [weight, bias] = make_problem(torch.full((2, 3), 100.0))
    norm = gradient_norm([weight])
    assert guarded_step(optimizer, [weight], norm, torch.tensor(1.0), 2.0, apart=[bias]).wait()
    assert gradient_norm([weight]).item() == pytest.approx(2.0)
    assert torch.equal(bias.grad, torch.ones(2))
    bias.grad[0] = torch.nan
    assert not guarded_step(optimizer, [weight], norm, torch.tensor(1.0), 2.0, apart=[bias]).wait()


def orthogonalise_as_pytorch_does(matrices):
    """In bf16, one after the other: a step from zero, against the gradient."""
    found = [torch.zeros(matrices.shape[1:]) for _ in matrices]
    rate = 5.0 / max(matrices.shape[1:]) ** 0.5
    options = {"momentum": 0.0, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    for zero, matrix in zip(found, matrices.float(), strict=True):
        zero.grad = -matrix
    torch.optim.Muon(found, lr=rate, weight_decay=0.0, **options).step()
    return torch.stack(found)


def test_muon_trains_the_matrices_of_layers_as_pytorch_s_does(monkeypatch):
    """Apart from Newton–Schulz, which is PyTorch's here and has its own test, to a rounding of fp32."""
    monkeypatch.setattr("trifocal.train.step.muon.orthogonalise", lambda x: SCALE * orthogonalise_as_pytorch_does(x))
    torch.manual_seed(0)
    model = DecoderLM(replace(SMALL, chooser="index"))
    section = OptimizerSection(
        kind="muon", learning_rate=0.01, weight_decay=0.1, adamw_lr_factor=0.5, index_lr_factor=5.0
    )  # fmt: skip
    optimizer = make_optimizer(model, section)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = optimizer.param_groups[0]["params"]
    others = [one for group in optimizer.param_groups[1:] for one in group["params"]]
    assert {names[id(one)].split(".")[-2] for one in matrices} == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert {names[id(one)] for one in others} == set(names.values()) - {names[id(one)] for one in matrices}
    assert "blocks.0.attention.gate.proj.weight" in {names[id(one)] for one in others}
    rates = {names[id(one)]: group["lr"] for group in optimizer.param_groups for one in group["params"]}
    assert {rate for name, rate in rates.items() if ".index." in name} == {0.01 * 0.5 * 5}
    assert (rates[names[id(matrices[0])]], rates["norm.weight"]) == (0.01, 0.005)
    twins = [[one.detach().clone().requires_grad_() for one in group] for group in (matrices, others)]
    plain = torch.optim.Muon(twins[0], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for group, theirs in zip((matrices, others), twins, strict=True):
            for parameter, twin in zip(group, theirs, strict=True):
                parameter.grad = twin.grad = torch.randn_like(parameter)
        if step == 1:
            values = [*model.parameters(), *(optimizer.state[one]["momentum_buffer"] for one in matrices)]
            before = [one.detach().clone() for one in values]
            sound, matrices[0].grad = matrices[0].grad, torch.full_like(matrices[0], float("nan"))
            assert not guarded_step(optimizer, matrices, gradient_norm(matrices), torch.tensor(1.0), 0.0).wait()
            assert all(map(torch.equal, before, values))
            matrices[0].grad = sound
        guarded_step(optimizer, matrices, torch.tensor(1.0), torch.tensor(1.0), 0.0)
        plain.step()
    for parameter, twin in zip(matrices, twins[0], strict=True):
        torch.testing.assert_close(parameter, twin, rtol=0, atol=1e-6)
        assert set(optimizer.state[parameter]) == {"momentum_buffer"}
    for parameter, twin in zip(others, twins[1], strict=True):
        assert optimizer.state[parameter]["step"] == 3 and not torch.equal(parameter, twin)


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (8, 8)])
def test_orthogonalised_matrices_keep_their_singular_vectors(shape):
    """Each by itself: singular values from a tenth of the largest come near 1, others at least grow."""
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(3, shape[0], 8, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(3, shape[1], 8, dtype=torch.float64))
    values = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.01, 0.0], dtype=torch.float64)
    found = left.mT @ orthogonalise(left * values @ right.mT, torch.float64) @ right / SCALE
    diagonal = found.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found, torch.diag_embed(diagonal), rtol=0, atol=1e-9)
    assert (diagonal[:, :6] - 1).abs().max() < 0.35
    assert (diagonal[:, 6] > 0.5).all() and (diagonal[:, 7].abs() < 1e-9).all()


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
@pytest.mark.parametrize("smallest", [0.0, -3.0])
def test_orthogonalising_rounds_less_than_pytorch_s_does(shape, smallest):
    """Beside the same iteration in float64, with singular values as momentum has them; of any size."""
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(4, *shape), full_matrices=False)
    matrices = (left * torch.logspace(0, smallest, min(shape)) @ right).bfloat16()
    exact = orthogonalise(matrices, torch.float64) / SCALE
    theirs = (orthogonalise_as_pytorch_does(matrices) - exact).norm()
    for size in (1.0, 2.0**20, 2.0**-20):
        found = orthogonalise(size * matrices).double() / SCALE
        assert (found - exact).norm() < 0.5 * theirs
        assert torch.linalg.svdvals(found).max() < 1.25


def test_muon_without_a_matrix_is_refused():
    model = DecoderLM(SMALL)
    for block in model.blocks:
        block.requires_grad_(False)
    with pytest.raises(UserError, match=r'optimizer\.kind "muon" has no matrix of a layer to train here; take "adamw"'):
        make_optimizer(model, OptimizerSection(kind="muon"))


def rates(warmup_steps, total_steps, minimum_factor=0.1, **options):
    config = RunConfig(
        train=TrainSection(steps=total_steps),
        optimizer=OptimizerSection(learning_rate=2.0),
        schedule=ScheduleSection(warmup_steps=warmup_steps, minimum_factor=minimum_factor, **options),
    )
    return [learning_rate(config, step) for step in range(1, total_steps + 1)]


def test_warms_up_linearly_to_the_peak_and_ends_on_the_floor():
    values = rates(4, 20)
    assert values[:4] == [0.5, 1.0, 1.5, 2.0]
    assert values[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(values[3:]))
    # Half-way between step 4 and step 20 a cosine stands half-way between peak and floor.
    assert values[11] == pytest.approx((2.0 + 0.2) / 2)


def test_rates_at_the_corners():
    """Without a warm-up; with one that is longer than the run; with a floor of one, which is a constant rate."""
    assert rates(0, 10)[0] == 2.0
    assert rates(20, 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates(0, 5, minimum_factor=1.0) == [2.0] * 5


def test_wsd_stays_at_the_peak_and_declines_linearly_at_the_end():
    values = rates(2, 10, kind="wsd", decay_fraction=0.4)
    assert values == pytest.approx([1.0, *[2.0] * 5, 1.55, 1.1, 0.65, 0.2])
    # The decline waits for the warm-up, and takes one step at least.
    assert rates(4, 6, kind="wsd", decay_fraction=1.0) == pytest.approx([0.5, 1.0, 1.5, 2.0, 1.1, 0.2])
    assert rates(0, 3, kind="wsd", decay_fraction=0.01) == pytest.approx([2.0, 2.0, 0.2])
