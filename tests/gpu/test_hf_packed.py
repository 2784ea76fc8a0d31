"""Packed documents in transformers' model on a GPU: the host reads nothing, and the loss stays."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.devices import QUIET_GPU
from trifocal.hf import TrifocalForCausalLM
from trifocal.testing.small_models import make_model, minimal_config

pytestmark = list(QUIET_GPU)

LENGTHS = [130, 1, 700, 57, 300]


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_boundaries_on_the_device_are_not_read(compiles):
    device = torch.device("cuda")
    model = TrifocalForCausalLM.from_decoder(make_model(minimal_config(2), device)).train()
    tokens = torch.randint(256, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    labels = tokens.masked_fill(positions == 0, -100)
    expected = model(tokens, position_ids=positions, labels=labels).loss
    boundaries = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    given = {
        "position_ids": positions,
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(LENGTHS),
        "labels": labels,
        "num_items_in_batch": (labels != -100).sum(),
    }
    run = torch.compile(model) if compiles else model
    # The first run compiles.
    for _ in range(2):
        run(tokens, **given).loss.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = run(tokens, **given).loss
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
