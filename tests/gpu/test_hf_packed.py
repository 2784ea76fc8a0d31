"""Packed documents in transformers' model on a GPU: the host reads nothing, and the loss is that of checked borders."""

import copy
from pathlib import Path
from typing import Any

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


def minimal_model(cuda_graphs: bool, dropout: float = 0.0, checkpointed: bool = False) -> TrifocalForCausalLM:
    model = TrifocalForCausalLM.from_decoder(make_model(minimal_config(2), torch.device("cuda"))).train()
    for block in model.model.blocks:
        block.mlp = torch.nn.Sequential(block.mlp, torch.nn.Dropout(dropout)) if dropout else block.mlp
    if checkpointed:
        model.gradient_checkpointing_enable()
    model.compile_training(cuda_graphs=cuda_graphs)
    return model


def recordings(model: TrifocalForCausalLM) -> int:
    assert model._training_loss is not None and model._training_loss._recorded is not None
    return model._training_loss._recorded.recordings


def train(model: Any, seed: int, steps: int = 8, evaluate: bool = False) -> list[torch.Tensor]:
    """AdamW in bf16 over packs of other borders and whole rows; returns the losses, which keep their graphs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for half in range(2):
            tokens = torch.randint(256, (2, 594), generator=generator).cuda()
            given = {}
            if step % 2:
                borders = [0, 130 + step, 131 + step + half, 700, 1188]
                cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda")
                tokens = tokens.reshape(1, -1)
                given = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 600}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(tokens, labels=tokens, **given).loss
            (loss / 2).backward()
            losses.append(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if evaluate:
            with torch.no_grad():
                assert model.eval()(tokens[:, :100]).logits.isfinite().all()
            model.train()
    return losses


def assert_equal_weights(expected: torch.nn.Module, found: torch.nn.Module) -> None:
    for (name, weight), other in zip(expected.named_parameters(), found.parameters(), strict=True):
        assert torch.equal(other, weight), name


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_recorded_steps_are_the_compiled_ones(checkpointed: bool) -> None:
    """The same weights in the end, bit for bit.

    Earlier losses live while steps are recorded: autograd's nodes of the parameters then belong to the outer stream.
    """
    models = [minimal_model(cuda_graphs, checkpointed=checkpointed) for cuda_graphs in (False, True)]
    losses = [torch.stack(train(model, 0, evaluate=True)) for model in models]
    assert torch.equal(*losses)
    assert_equal_weights(*models)
    assert recordings(models[1]) == 2


def test_weights_that_move_and_copies_are_recorded_anew() -> None:
    """While losses of the old recordings live; then a copy trains beside the first model."""
    models = [minimal_model(cuda_graphs) for cuda_graphs in (False, True)]
    kept = []
    for number in range(2):
        for model in models:
            kept.append(train(model, number, steps=4))
            model.cpu()
            # What was there is another's now.
            kept.append([torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)])
            model.cuda()
    for model in models:
        train(model, 2)
    assert_equal_weights(*models)
    twins = [copy.deepcopy(model) for model in models]
    assert recordings(models[1]) == 2 and recordings(twins[1]) == 0
    for model in (*models, *twins):
        train(model, 3)
    assert_equal_weights(*models)
    # The copies' layers are not compiled.
    torch.testing.assert_close(twins[1].head.weight, twins[0].head.weight, rtol=0, atol=0)
    assert recordings(twins[1]) == 2


def test_recorded_steps_in_distributed_data_parallel() -> None:
    """It holds the parameters' nodes of autograd all the time, on the stream on which it was made."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        models = [minimal_model(cuda_graphs) for cuda_graphs in (False, True)]
        for model in models:
            train(torch.nn.parallel.DistributedDataParallel(model, device_ids=[0]), 0)
        assert_equal_weights(*models)
        assert recordings(models[1]) == 2
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_every_replay_draws_another_dropout(checkpointed: bool) -> None:
    model = minimal_model(True, dropout=0.5, checkpointed=checkpointed)
    tokens = torch.randint(256, (2, 594), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for _ in range(5):
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        # The output's norm comes behind every dropout: its gradients tell masks apart.
        found.append((float(loss), model.model.norm.weight.grad.clone()))
    assert recordings(model) == 1
    assert len({loss for loss, _ in found}) == 5
    assert all(gradient.isfinite().all() and gradient.any() for _, gradient in found)


def test_recorded_steps_of_transformers_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(200, 400, (64,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(256, (n,), generator=generator).tolist()} for n in lengths]
    models = [minimal_model(cuda_graphs) for cuda_graphs in (False, True)]
    for model in models:
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True,
            learning_rate=1e-3, save_strategy="no", report_to=[], disable_tqdm=True, logging_nan_inf_filter=False,
        )  # fmt: skip
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collator).train()
    assert_equal_weights(*models)
    assert recordings(models[1])
