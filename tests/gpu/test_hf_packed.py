"""Packed documents in transformers' model on a GPU: the host reads nothing, and the loss is that of checked borders."""

import pytest
import torch

pytest.importorskip("transformers")

from trifocal.hf import TrifocalForCausalLM
from trifocal.testing.small_models import make_model, minimal_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of the compiler itself, and of the mode that finds waits.
    pytest.mark.filterwarnings("ignore"),
]

LENGTHS = [130, 1, 700, 57, 300]


@pytest.mark.parametrize("how", ["eager", "compiled", "recorded"])
def test_borders_on_the_device_are_not_read(how: str) -> None:
    device = torch.device("cuda")
    model = TrifocalForCausalLM.from_decoder(make_model(minimal_config(2), device)).train()
    tokens = torch.randint(256, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    labels = tokens.masked_fill(positions == 0, -100)
    expected = model(tokens, position_ids=positions, labels=labels).loss
    borders = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    if how != "eager":
        model.compile_training(cuda_graphs=how == "recorded")
    given = {
        "position_ids": positions,
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(LENGTHS),
        "labels": labels,
        "num_items_in_batch": (labels != -100).sum(),
    }
    # Compiled, then recorded.
    for _ in range(2):
        model(tokens, **given).loss.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = model(tokens, **given).loss
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_recorded_steps_are_the_compiled_ones(checkpointed: bool) -> None:
    """AdamW in bf16 over packs of other borders and whole rows: the same weights in the end, bit for bit."""
    device = torch.device("cuda")
    found: list[dict[str, torch.Tensor]] = []
    for cuda_graphs in (False, True):
        model = TrifocalForCausalLM.from_decoder(make_model(minimal_config(2), device)).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.compile_training(cuda_graphs=cuda_graphs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        for step in range(8):
            optimizer.zero_grad()
            for half in range(2):
                tokens = torch.randint(256, (2, 594), generator=generator).to(device)
                given = {}
                if step % 2:
                    borders = torch.tensor(
                        [0, 130 + step, 131 + step + half, 700, 1188], dtype=torch.int32, device=device
                    )
                    tokens = tokens.reshape(1, -1)
                    given = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 600}
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(tokens, labels=tokens, **given).loss
                (loss / 2).backward()
            optimizer.step()
        found.append(model.state_dict())
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name
