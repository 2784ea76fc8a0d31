"""Fine-tuning on chats by one command: the model and the tokenizer of a folder, loss only on the answers."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
import pyarrow
import pyarrow.parquet as parquet

from tests.chat_data import make_chats, write_tokenizer
from tests.train.test_launch import rows
from tests.train.tiny import assert_same_tensors, make_config, read_checkpoint, write_config
from trifocal import load_model, load_tokenizer
from trifocal.cli import main
from trifocal.data import make_tokenizer
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.runlog import read_metrics
from trifocal.testing.small_models import small_config
from trifocal.train import load_config, resume, train
from trifocal.train.checkpoint.export import export_folder, export_weights, weights_step
from trifocal.train.checkpoint.pretrained import load_frozen, open_pretrained
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
    "evaluate.sequences": 4,
    "log.interval_steps": 1,
    "log.sample_interval_steps": 0,
    "log.telemetry_interval_steps": 0,
    "data.shuffle_sequences": 4,
}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """An exported model of random weights, with a tokenizer and its chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(str(write_tokenizer(folder / "tokenizer")))
    model = DecoderLM(small_config(vocab_size=tokenizer.vocab_size))
    model.init_weights(1)
    export_folder(model, tokenizer, folder / "exported")
    return folder / "exported"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A data set of two splits."""
    folder = tmp_path_factory.mktemp("chats")
    for name, count, seed in (("train", 40, 0), ("validation", 8, 1)):
        parquet.write_table(pyarrow.table({"messages": make_chats(count, seed)}), folder / f"{name}.parquet")
    return folder


def test_one_command_fine_tunes_and_resumes_exactly(model_folder, chats, tmp_path):
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
    # The template stays with the model.
    assert make_tokenizer(str(whole / "weights")).fingerprint == make_tokenizer(str(model_folder)).fingerprint

    shutil.copytree(whole, other)
    shutil.rmtree(other / "checkpoints" / "step_00000008")
    assert main(["train", "--resume", str(other), "--run.directory", str(other)]) == 0
    assert_same_tensors(*(read_checkpoint(run / "checkpoints" / "step_00000008") for run in (whole, other)))
    assert rows(other, "train") == train and rows(other, "evaluation") == evaluations


def test_a_folder_without_a_tokenizer_is_refused(model_folder, chats, tmp_path):
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
    # Other commands have no flag for it.
    with pytest.raises(
        UserError, match=r"bare has no tokenizer\.json: copy the files of the model's tokenizer into it"
    ):
        load_tokenizer(bare)


def test_the_tokenizer_that_lies_with_the_weights_wins(tmp_path):
    named, run = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "run"
    first = make_tokenizer(str(named)).fingerprint
    overrides = {"data.tokenizer": str(named), "model.vocab_size": 300, "train.steps": 1, "schedule.warmup_steps": 0}
    train(load_config(write_config(tmp_path), overrides))
    shutil.rmtree(named)
    write_tokenizer(named, merges=(("a", "b"),))
    for place in (run, run / "weights", run / "checkpoints" / "step_00000001"):
        config = load_config(None, {"model.from": str(place), "data.source": "builtin"})
        assert config.data.tokenizer == str(run / "weights")
        tokenizer = make_tokenizer(config.data.tokenizer, separator=config.data.separator)
        assert tokenizer.fingerprint == load_tokenizer(place).fingerprint == first
    # A run without a copy has the one that it names.
    shutil.rmtree(run / "weights")
    for place in (run, run / "checkpoints" / "step_00000001"):
        config = load_config(None, {"model.from": str(place), "data.source": "builtin"})
        assert (config.data.tokenizer, config.data.separator) == (str(named), "<|endoftext|>")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A finished run of two steps, whose model is not that of the tiny configuration."""
    folder = tmp_path_factory.mktemp("source")
    train(make_config(folder, "--train.steps", "2", "--model.mlp_dim", "24", "--model.rope_theta", "500.0"))
    return folder / "run"


def test_only_a_folder_marked_as_a_run_has_the_configuration_of_its_weights(source, tmp_path):
    def run_of(path):
        found = open_pretrained(path)
        return found.run

    checkpoint = "checkpoints/step_00000002"
    for part in ("weights", checkpoint):
        shutil.copytree(source / part, tmp_path / part)
        assert run_of(source / part) == load_run(source)
    shutil.copy(source / "config.toml", tmp_path)
    assert [run_of(tmp_path / part) for part in ("weights", checkpoint)] == [None, None]
    # Nor is it read: it may be another program's.
    (tmp_path / "config.toml").write_text("[other program\n")
    assert run_of(tmp_path / "weights") is None


def test_on_a_gpu_weights_without_their_run_work_in_bf16(source, tmp_path):
    """A sparse model out of a GGUF has fp32 files, and nobody serves it in fp32; a run in fp32 stays what it was."""
    alone = open_pretrained(shutil.copytree(source / "weights", tmp_path / "weights"))
    found = [
        (model.run is None, place, model.dtype(torch.device(place)))
        for model in (alone, open_pretrained(source / "weights"))
        for place in ("cuda", "cpu")
    ]
    assert found == [
        (True, "cuda", torch.bfloat16), (True, "cpu", torch.float32),
        (False, "cuda", torch.float32), (False, "cpu", torch.float32),
    ]  # fmt: skip


def begin(folder, source, **changes):
    overrides = {"model.from": str(source), "train.steps": 2, **changes}
    return load_config(write_config(folder), overrides)


def messages(run):
    return [row["message"] for row in read_metrics(run / "metrics.jsonl", "event")]


@pytest.mark.parametrize("part", ["weights", "checkpoints/step_00000002"])
def test_the_first_step_begins_with_the_weights(source, tmp_path, part):
    # So small a learning rate leaves them as they are.
    config = begin(tmp_path, source / part, **{"optimizer.learning_rate": 1e-30, "train.steps": 1})
    assert (config.model.mlp_dim, config.model.rope_theta) == (24, 500.0)
    assert config.model == load_run(source).model and config.data.tokenizer == "bytes"
    train(config)
    assert_same_tensors(load_model(source).state_dict(), load_model(tmp_path / "run").state_dict())
    assert f"begins with the weights of {source / part}" in messages(tmp_path / "run")


def test_a_resumed_run_does_not_read_them_again(source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source / "weights", copy)
    train(begin(tmp_path, copy))
    whole = load_model(tmp_path / "run").state_dict()
    other = tmp_path / "other"
    train(begin(other, copy, **{"train.steps": 1, "schedule.warmup_steps": 0}))
    shutil.rmtree(copy)
    saved = load_run(other / "run")
    assert saved.model.from_ == str(copy)
    assert resume(other / "run", config=replace(saved, train=replace(saved.train, steps=2))).step == 2
    assert whole.keys() == load_model(other / "run").state_dict().keys()


def test_flags_go_before_the_weights_where_they_fit(source, tmp_path):
    changes = {"model.geometry.window_size": 4, "model.layer_types": ("nsa", "nsa"), "model.backend": "reference"}
    config = begin(tmp_path, source, **changes, **{"model.unrotated_layers": (1,)})
    assert (config.model.geometry.window_size, config.model.mlp_dim) == (4, 24)
    train(config)
    [note] = [message for message in messages(tmp_path / "run") if message.startswith("begins with the weights of ")]
    assert "; geometry.window_size is 8 there, 4 here; " in note
    assert note.endswith("; unrotated_layers is () there, (1,) here")
    for name, value, message in (
        ("model.mlp_dim", 48, r"belongs to a different model: mlp_dim is 24 there, 48 here"),
        ("model.num_layers", 3, "num_layers is 2 there, 3 here"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            train(begin(tmp_path / name, source, **{name: value}))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / name / "run").exists()
    (tmp_path / "model.gguf").touch()
    # Some folders of the hub have one that only names the architecture.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(UserError, match=rf"^{path} is a GGUF; convert it first: trifocal convert {path} OUT"):
            load_model(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter has only an adapter; merge it into its model first"):
        load_model(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"there is no run at .*nowhere: no such folder"):
        begin(tmp_path, tmp_path / "nowhere")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"there is no run at .*model\.safetensors: it is a file"):
        load_model(tmp_path / "model.safetensors")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A dense Llama as transformers saves it, in bf16, with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = make_tokenizer(str(write_tokenizer(folder)))
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_a_dense_folder_of_transformers_is_a_model_as_converted_to_dense(theirs, tmp_path):
    """For training, measuring and generating; nothing is converted, and the same rows are measured."""
    assert main(["convert", str(theirs), str(tmp_path / "ours"), "--to", "dense"]) == 0
    expected, found = (load_model(folder) for folder in (tmp_path / "ours", theirs))
    assert found.config == expected.config and found.embedding.weight.dtype == torch.bfloat16
    assert_same_tensors(expected.state_dict(), found.state_dict())
    assert load_tokenizer(theirs).fingerprint == load_tokenizer(tmp_path / "ours").fingerprint
    # So small a learning rate leaves the weights as they are.
    flags = {"optimizer.learning_rate": 1e-30, "train.steps": 1, "data.validation_fraction": 0.3}
    config = begin(tmp_path, theirs, **flags)
    config = load_config(None, {**SETTINGS, **flags, "model.from": str(theirs), "data.source": config.data.source,
                                "run.directory": str(tmp_path / "run")})  # fmt: skip
    train(config)
    assert_same_tensors(found.float().state_dict(), load_model(tmp_path / "run").state_dict())
    rows_of = []
    sizes = ("--only", "loss", "--sequence-length", "64", "--sequences", "6", "--validation-fraction", "0.3")
    for folder in (theirs, tmp_path / "ours", tmp_path / "run" / "weights", tmp_path / "run"):
        out = tmp_path / "figures.json"
        arguments = ["evaluate", str(folder), "--source", config.data.source, *sizes, "--output", str(out)]
        assert main(arguments) == 0
        rows_of += json.loads(out.read_text())["rows"]
    assert len({row["rows"] for row in rows_of}) == 1 and [row["sequences"] for row in rows_of] == [6] * 4
    losses = [row["loss"] for row in rows_of]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-2)


def test_a_frozen_model_of_another_vocabulary_is_refused(theirs, source, tmp_path):
    config = make_config(tmp_path, "--distill.from", str(theirs))
    with pytest.raises(UserError, match=r"distill\.from .* has a vocabulary of 259 tokens, the model 257; both need"):
        train(config)
    for flags, message in (
        (("--distill.from", str(tmp_path / "nowhere")), "^distill.from: there is no run at .*nowhere: no such folder"),
        (("--distill.text_weight", "0.5"), r"distill\.text_weight goes with distill\.from"),
        (
            ("--distill.from", str(source), "--train.only", "chooser", "--model.chooser", "index"),
            "leave distill.from out",
        ),
    ):
        with pytest.raises(UserError, match=message) as caught:
            train(make_config(tmp_path, *flags))
        assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()

    # As many tokens, two of them exchanged; another template is no other vocabulary.
    other = shutil.copytree(theirs, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, cpu = load_tokenizer(theirs), torch.device("cpu")
    with pytest.raises(UserError, match=r"another tokenizer: token \d+ is '[ab]' there, '[ab]' here"):
        load_frozen(str(other), tokenizer.vocab_size, tokenizer, cpu)
    shutil.copy(theirs / "tokenizer.json", other)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(other).fingerprint != tokenizer.fingerprint
    load_frozen(str(other), tokenizer.vocab_size, tokenizer, cpu)


def test_a_run_that_follows_a_frozen_model_resumes_exactly(source, tmp_path):
    """It comes near to it; the loss in the metrics stays that on the text."""
    flags = ("--distill.from", str(source), "--distill.text_weight", "0.1", "--evaluate.interval_steps", "0")
    train(make_config(tmp_path, *flags))
    run, plain = tmp_path / "run", tmp_path / "plain"
    whole, before = read_checkpoint(run / "checkpoints" / "step_00000006"), rows(run, "train")
    assert before[-1]["divergence"] < 0.9 * before[0]["divergence"]
    assert resume(run, checkpoint="step_00000004").finished
    assert_same_tensors(read_checkpoint(run / "checkpoints" / "step_00000006"), whole)
    assert rows(run, "train") == before
    train(make_config(plain, "--train.steps", "1", "--schedule.warmup_steps", "0"))
    assert rows(plain / "run", "train")[0]["loss"] == before[0]["loss"]


def test_weights_that_are_not_whole_have_no_step(tmp_path, monkeypatch):
    model, tokenizer = DecoderLM(small_config()), make_tokenizer("bytes")
    export_weights(model, tokenizer, tmp_path, step=1)
    assert weights_step(tmp_path) == 1

    def full(*_, **__):
        raise OSError

    monkeypatch.setattr("trifocal.train.checkpoint.export.save_weights", full)
    with pytest.raises(OSError):
        export_weights(model, tokenizer, tmp_path, step=2)
    assert weights_step(tmp_path) is None
