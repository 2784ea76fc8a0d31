"""The gate before timing passes a right attention and refuses faults."""

from dataclasses import replace

import pytest
import torch

from lib import choice_problem, parity
from lib.recorder import Refused
from lib.shapes import AttentionShape
from tests.benchmarks.tiny import MODEL
from trifocal.ops import Geometry, mean_compress, nsa_attention, select_blocks

SHAPE = AttentionShape("", 1, 4096, 8, 4, 16, 8)
GEOMETRY = Geometry(8, 4, 16, 3, 1, 1, 16)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_passes(dtype):
    assert 0 < parity.check_parity(SHAPE, GEOMETRY, CPU, dtype, "auto") <= 1


def wrong_output(*args, backend, **rules):
    o = nsa_attention(*args, backend="reference", **rules)
    return o if backend == "reference" else o * 1.01


def wrong_gradient(q, *args, backend, **rules):
    if backend != "reference":
        q = q.detach() + 1.05 * (q - q.detach())
    return nsa_attention(q, *args, backend="reference", **rules)


def wrong_mean(x, geometry, backend):
    return mean_compress(x, geometry, backend="reference") * (1.0 if backend == "reference" else 1.01)


def worse_choice(*args, backend, **rules):
    chosen = select_blocks(*args, backend="reference", **rules)
    if backend != "reference":
        # The last block but the forced ones, whatever it is worth.
        own = torch.arange(chosen.shape[1])[None, :, None] // GEOMETRY.selection_block_size
        chosen[..., 1] = torch.where(own >= 3, own - 1, chosen[..., 1].long()).int()
    return chosen


@pytest.mark.parametrize(
    ("name", "faulty", "message"),
    [
        ("nsa_attention", wrong_output, r"is off by .* at 85 tokens, allowed is"),
        ("nsa_attention", wrong_gradient, "the gradient of q is off"),
        ("mean_compress", wrong_mean, "mean is off"),
        ("select_blocks", worse_choice, "of the importance that the best ones cover"),
    ],
)
def test_a_fault_is_refused(name, faulty, message, monkeypatch):
    monkeypatch.setattr(parity, name, faulty)
    with pytest.raises(Refused, match=message):
        parity.check_parity(SHAPE, GEOMETRY, CPU, torch.float32, "auto")


@pytest.mark.parametrize("faulty", ["loss", "gradient", None])
def test_a_wrong_loss_of_the_choice_is_refused(faulty, monkeypatch):
    right = choice_problem.choice_loss

    def loss(*args, backend, **student):
        if faulty == "gradient" and backend != "reference":
            student["q_idx"] = student["q_idx"].detach() + 1.05 * (student["q_idx"] - student["q_idx"].detach())
        figures = right(*args, backend="reference", **student)
        if faulty == "loss" and backend != "reference":
            # Its gradient stays, so that rounding does not decide which of the two is further off.
            figures = figures + figures.detach() * torch.tensor([0.01, 0.0])
        return figures

    monkeypatch.setattr(choice_problem, "choice_loss", loss)
    if faulty is None:
        assert 0 < choice_problem.check_choice_parity(SHAPE, GEOMETRY, CPU, torch.bfloat16) <= 1
        return
    with pytest.raises(Refused, match=f"the {faulty}.* is off by"):
        choice_problem.check_choice_parity(SHAPE, GEOMETRY, CPU, torch.float32)
    parity.check_model_parity(MODEL, CPU, torch.float32)
    with pytest.raises(Refused, match=r"the loss|the gradient of [qk]_idx"):
        parity.check_model_parity(replace(MODEL, chooser="index"), CPU, torch.float32)
