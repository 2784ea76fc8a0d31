"""What a model learns from a frozen one, against PyTorch's own divergence over whole logits."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from trifocal.models import distillation
from trifocal.models.decoder import Distillation
from trifocal.ops import Documents
from trifocal.testing.small_models import make_model, small_config

CPU = torch.device("cpu")


def pair(**changes):
    """A sparse model and a frozen dense one with other weights, float64."""
    sparse = make_model(small_config(attention="selected", **changes), CPU, torch.float64)
    dense = make_model(small_config(attention="dense"), CPU, torch.float64)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return sparse, dense.requires_grad_(False)


def expected(model, dense, tokens, targets, documents, weight):
    log_q, log_p = (one(tokens, cu_seqlens=documents).log_softmax(-1)[targets >= 0] for one in (model, dense))
    divergence = functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    text = functional.nll_loss(log_q, targets[targets >= 0])
    (divergence + weight * text).backward()
    return divergence.detach(), text.detach()


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("case", ["rows", "documents", "checkpointed", "tied"])
def test_the_gradient_is_that_of_the_plain_divergence(weight, case, monkeypatch):
    # 80 tokens in chunks of 16.
    monkeypatch.setattr(distillation, "_LOGITS_AT_ONCE", 16 * 64)
    model, dense = pair(tie_embeddings=case == "tied")
    if case == "checkpointed":
        model.set_activation_checkpointing(0, 2)
    tokens = torch.randint(64, (1, 80), generator=torch.Generator().manual_seed(2))
    targets = tokens.roll(-1).masked_fill(torch.arange(80) % 7 == 3, -100)
    documents = None
    if case == "documents":
        documents = Documents.from_cu_seqlens(torch.tensor([0, 30, 80], dtype=torch.int32), 80)
    divergence, text = expected(model, dense, tokens, targets, documents, weight)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    given = Distillation(dense, weight, torch.zeros((), dtype=torch.float64))
    loss = model(tokens, targets, cu_seqlens=documents, distillation=given)
    torch.testing.assert_close(loss.detach(), text)
    torch.testing.assert_close(given.total / (targets >= 0).sum(), divergence)
    loss.backward()
    torch.testing.assert_close([one.grad for one in model.parameters()], gradients, rtol=1e-9, atol=1e-12)
    assert any(gradient.any() for gradient in gradients) and all(one.grad is None for one in dense.parameters())


def test_no_logits_of_all_tokens_exist(monkeypatch):
    """Neither forward nor backward: the largest product of an output weight has one chunk's rows."""
    monkeypatch.setattr(distillation, "_LOGITS_AT_ONCE", 8 * 64)
    model, dense = pair()
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(2))
    rows = []
    linear = nn.functional.linear

    def noted(x, weight, *rest):
        if weight.shape[0] == 64 and weight.shape[1] == 32 and x.ndim == 2:
            rows.append(x.shape[0])
        return linear(x, weight, *rest)

    monkeypatch.setattr(nn.functional, "linear", noted)
    model(tokens, tokens, distillation=Distillation(dense, 0.0, torch.zeros(()))).backward()
    # Of both models, forward and again in backward.
    assert rows == [8] * (4 * 64 // 8)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_chunks_are_one_graph_for_the_compiler():
    model, dense = pair()
    tokens = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(2))
    gradients = []
    for compiled in (False, True):
        model.zero_grad()
        if compiled:
            model._sums = torch.compile(
                distillation.distillation_sums, fullgraph=True, dynamic=False, backend="aot_eager"
            )
        model(tokens, tokens, distillation=Distillation(dense, 0.3, torch.zeros(()))).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
