"""Two processes compute the gradient of one, however the model is spread."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import gradients
from tests.distributed.workers import Workers

CASES = [case.name for case in gradients.cases()]
STEPS = [f"{mode} {shards} five steps" for mode, shards in (("ddp", 0), ("fsdp", 0), ("hsdp", 1), ("hsdp", 2))]
# Each of both sides adds up the same numbers in another order; a dozen layers pass their rounding on.
BOUND = 64 * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything in one start of two processes."""
    folder = tmp_path_factory.mktemp("gradients")
    script = str(Path(gradients.__file__))
    ended = Workers([[script, str(folder / "figures.json")]] * 2, folder).join(150)
    assert [end.status for end in ended] == [0, 0], ended[0].error + ended[1].error
    # The one warning of DDP's is its answer to an option that no run takes.
    errors = [end.error for end in ended]
    assert all("find_unused_parameters=True was specified" in line for error in errors for line in error.splitlines())
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_that_of_one_process(figures: dict[str, Any], name: str) -> None:
    assert figures[name]["difference"] <= BOUND, figures[name]
    assert figures[name]["difference"] > 0, "not even rounding differs: nothing was exchanged"


@pytest.mark.parametrize("name", STEPS)
def test_all_processes_have_the_same_parameters_after_five_steps(figures: dict[str, Any], name: str) -> None:
    assert figures[name] is True


def test_bf16_costs_a_sharded_model_what_it_costs_one_process(figures: dict[str, Any]) -> None:
    """Weights are rounded once more where they are collected in bf16; the sum over processes stays in fp32."""
    errors = figures["bf16"]
    assert 1e-3 < errors["none"] < 0.1
    assert errors["ddp"] < 2 * errors["none"]
    assert errors["fsdp"] < 2 * errors["none"]
