"""Two processes compute the gradient of one in each parallel mode: each case of the checks by its name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.checks import faults
from tests.distributed import bf16
from tests.distributed.workers import Workers
from trifocal.checks.training_checks import GRADIENT_BOUND, PARALLEL_CASES, compare_processes


def test_every_case_is_one_process():
    """Every gradient, in one start of two processes, where any warning is an error; at few layers, for the time."""
    cases = list(dict.fromkeys(replace(case, num_layers=min(case.num_layers, 3)) for case in PARALLEL_CASES))
    with pytest.MonkeyPatch.context() as patch:
        warm.take_the_place_of_subprocess(patch, "trifocal.testing.processes")
        faults.before_the_worker(patch, "import warnings; warnings.simplefilter('error')")
        found = compare_processes(cases, torch.device("cpu"))
    wrong = []
    for case, (difference, parameter) in zip(cases, found, strict=True):
        # Where not even rounding differs, nothing was exchanged.
        if not 0 < difference <= GRADIENT_BOUND:
            wrong.append((case.name, difference, parameter))
    assert not wrong


def test_bf16_costs_a_sharded_model_what_it_costs_one_process(tmp_path):
    """Weights are rounded once more where they are collected in bf16; the sum over processes stays in fp32."""
    path = tmp_path / "errors.json"
    Workers([[str(Path(bf16.__file__)), str(path)]] * 2, tmp_path).finish()
    errors = json.loads(path.read_text())
    assert 1e-3 < errors["none"] < 0.1
    assert errors["ddp"] < 2 * errors["none"]
    assert errors["fsdp"] < 2 * errors["none"]
