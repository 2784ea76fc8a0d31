"""Recorded training in the trainers that people have: the weights are those of compiled training, bit for bit.

Nothing is compiled here, and a recording does the same work again.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tests.hf.recorder import record_on_a_cpu, recorder_of
from tests.hf.test_trainers import QUIET

from trifocal.hf import TrifocalConfig, TrifocalForCausalLM
from trifocal.testing.small_models import random_tokens, small_config

peft = pytest.importorskip("peft")

# transformers' and PEFT's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*"),
]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_a_cpu(monkeypatch)


@pytest.fixture
def documents() -> datasets.Dataset:
    """Of many lengths, so that no two packs have the same borders."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 30, (46,), generator=generator).tolist()
    return datasets.Dataset.from_list(
        [{"input_ids": torch.randint(60, (n,), generator=generator).tolist()} for n in lengths]
    )


def fresh_model(**changes: Any) -> TrifocalForCausalLM:
    torch.manual_seed(0)
    config = TrifocalConfig.from_model_config(small_config(**changes), pad_token_id=60, eos_token_id=61)
    return TrifocalForCausalLM(config).double()


def trainer_of(model: Any, folder: Path, data: Any, **changes: Any) -> transformers.Trainer:
    options = QUIET | {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "learning_rate": 1e-2,
    }
    arguments = transformers.TrainingArguments(str(folder), **(options | changes))
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data.select(range(8)), data_collator=collator
    )


def assert_same_training(train: Callable[[bool], tuple[Any, Any]]) -> list[Any]:
    """The outcomes, that without recordings first, of runs that must end in the same weights."""
    (plain, expected), (recorded, found) = (train(cuda_graphs) for cuda_graphs in (False, True))
    for (name, weight), other in zip(plain.named_parameters(), recorded.parameters(), strict=True):
        assert torch.equal(other, weight), name
    return [expected, found]


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        # Twelve batches an epoch: the last accumulation is partial.
        {"gradient_accumulation_steps": 5, "max_grad_norm": 0.1},
        {"average_tokens_across_devices": False, "max_grad_norm": 0.0},
        {"gradient_accumulation_steps": 3, "gradient_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 2, "bf16": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_transformers_trainer(options: dict[str, Any], documents: datasets.Dataset, tmp_path: Path) -> None:
    def train(cuda_graphs: bool) -> tuple[Any, Any]:
        bf16 = "bf16" in options
        model = fresh_model(tie_embeddings=bf16).to(torch.float32 if bf16 else torch.float64)
        model.compile_training(cuda_graphs=cuda_graphs)
        trainer = trainer_of(model, tmp_path, documents, **options)
        trainer.train()
        if cuda_graphs:
            training = recorder_of(model)
            assert 1 <= training.recordings <= 4 and training.replays >= 16
        return model, [
            {k: v for k, v in row.items() if "loss" in k or "grad" in k} for row in trainer.state.log_history
        ]

    expected, found = assert_same_training(train)
    assert found == expected


def test_a_resumed_training(documents: datasets.Dataset, tmp_path: Path) -> None:
    """Saved by a recorded training; another process goes on, recorded or not."""
    first = fresh_model()
    first.compile_training(cuda_graphs=True)
    trainer_of(first, tmp_path, documents, max_steps=7, save_strategy="steps", save_steps=7).train()
    assert recorder_of(first).recordings

    def train(cuda_graphs: bool) -> tuple[Any, Any]:
        model = fresh_model()
        model.compile_training(cuda_graphs=cuda_graphs)
        trainer_of(model, tmp_path, documents, max_steps=16).train(str(tmp_path / "checkpoint-7"))
        return model, cuda_graphs and recorder_of(model).recordings

    assert assert_same_training(train)[1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters(when: str, documents: datasets.Dataset, tmp_path: Path) -> None:
    """LoRA of all maps, and another output projection; trained, switched to checkpoints, merged."""

    def train(cuda_graphs: bool) -> tuple[Any, Any]:
        model = fresh_model()
        if when == "before":
            model.compile_training(cuda_graphs=cuda_graphs)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, modules_to_save=["head"])
        adapted = peft.get_peft_model(model, lora)
        if when == "after":
            adapted.compile_training(cuda_graphs=cuda_graphs)
        trainer = trainer_of(adapted, tmp_path, documents, num_train_epochs=1, gradient_accumulation_steps=2)
        trainer.train()
        trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
        if cuda_graphs:
            assert recorder_of(model).recordings
        before = cuda_graphs and recorder_of(model).replays
        trainer_of(adapted, tmp_path, documents, num_train_epochs=1, gradient_checkpointing=True).train()
        assert not cuda_graphs or recorder_of(model).replays > before + 6
        return adapted.merge_and_unload(), trained

    expected, found = assert_same_training(train)
    assert found == expected


def test_distributed_data_parallel() -> None:
    """One process; its hooks see each gradient once, and gradients wait while a step is accumulated."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    def train(cuda_graphs: bool) -> tuple[Any, Any]:
        model = fresh_model()
        model.compile_training(cuda_graphs=cuda_graphs)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        reduced: list[int] = []

        def reduce(_: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            reduced.append(len(bucket.gradients()))
            return _done(bucket.buffer())

        parallel.register_comm_hook(None, reduce)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2)
        for step in range(4):
            tokens = random_tokens((2, 40), 64, torch.device("cpu"), seed=step)
            with parallel.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                parallel(tokens, labels=tokens).loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        assert not cuda_graphs or recorder_of(model).replays == 3
        return model, sum(reduced)

    try:
        expected, found = assert_same_training(train)
    finally:
        torch.distributed.destroy_process_group()
    assert found == expected == 2 * len(list(fresh_model().parameters()))


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(result)
    return future
