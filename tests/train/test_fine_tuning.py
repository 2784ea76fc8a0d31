"""Fine-tuning on chats by one command: the model and the tokenizer of a folder, loss on the answers alone."""

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
import pyarrow
import pyarrow.parquet as parquet

from tests.chat_data import make_chats, write_tokenizer
from tests.train.test_resume import rows
from tests.train.tiny import read_checkpoint
from trifocal.cli import main
from trifocal.data import make_tokenizer
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.testing.small_models import small_config
from trifocal.train import load_config
from trifocal.train.checkpoint.export import export_folder
from trifocal.train.run_folder import load_run

SETTINGS = {
    "run.device": "cpu",
    "train.steps": 8,
    "train.sequence_length": 192,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 4,
    "schedule.warmup_steps": 1,
    "optimizer.learning_rate": 1e-2,
    "checkpoint.interval_steps": 4,
    "evaluate.interval_steps": 4,
    "evaluate.batches": 2,
    "log.interval_steps": 1,
    "log.sample_interval_steps": 0,
    "log.telemetry_interval_steps": 0,
    "data.shuffle_sequences": 4,
}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model of random weights, with a tokenizer and its chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(str(write_tokenizer(folder / "tokenizer")))
    model = DecoderLM(small_config(vocab_size=tokenizer.vocab_size))
    model.init_weights(1)
    export_folder(model, tokenizer, folder / "exported")
    return folder / "exported"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of two splits."""
    folder = tmp_path_factory.mktemp("chats")
    for name, count, seed in (("train", 40, 0), ("validation", 8, 1)):
        parquet.write_table(pyarrow.table({"messages": make_chats(count, seed)}), folder / f"{name}.parquet")
    return folder


def test_one_command_fine_tunes_and_resumes_exactly(model_folder: Path, chats: Path, tmp_path: Path) -> None:
    source = ["--model.from", str(model_folder), "--data.source", f"hf:{chats}#messages"]
    whole, other = tmp_path / "whole", tmp_path / "other"
    assert main(["train", *source, *FLAGS, "--run.directory", str(whole)]) == 0
    saved = load_run(whole)
    assert saved.data.tokenizer == str(model_folder) and saved.model.vocab_size == 259
    train = rows(whole, "train")
    assert [row["step"] for row in train] == list(range(1, 9))
    assert train[-1]["loss"] < 0.75 * train[0]["loss"]
    evaluations = rows(whole, "evaluation")
    assert evaluations[-1]["validation_loss"] < evaluations[0]["validation_loss"]
    assert evaluations[-1]["bits_per_byte"] > 0
    assert any(f"reads hf:{chats} (fingerprint " in row["message"] for row in rows(whole, "event"))
    # The template goes on with the model.
    assert make_tokenizer(str(whole / "weights")).fingerprint == make_tokenizer(str(model_folder)).fingerprint

    shutil.copytree(whole, other)
    shutil.rmtree(other / "checkpoints" / "step_00000008")
    assert main(["train", "--resume", str(other), "--run.directory", str(other)]) == 0
    mine, theirs = (read_checkpoint(run / "checkpoints" / "step_00000008") for run in (whole, other))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert rows(other, "train") == train and rows(other, "evaluation") == evaluations


def test_a_folder_without_a_tokenizer_is_refused(model_folder: Path, chats: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare)
    flags = {"model.from": str(bare), "data.source": f"hf:{chats}#messages"}
    (bare / "tokenizer_config.json").unlink()
    # It has the tokens, and names their end.
    assert load_config(None, flags).data.tokenizer == str(bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"bare has no tokenizer; name one with --data\.tokenizer"):
        load_config(None, flags)
    assert load_config(None, flags | {"data.tokenizer": "bytes"}).data.tokenizer == "bytes"
