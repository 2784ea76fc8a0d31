"""`trifocal convert` and `trifocal train --model.from`, as a person types them."""

import errno
import importlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.cli.test_commands import refused
from tests.data.test_tokenizers import tokenizer_file
from tests.train.tiny import write_config, write_documents, write_model
from trifocal import load_model
from trifocal.cli import main
from trifocal.cli.generate_model import GenerateArguments, load
from trifocal.data import make_tokenizer
from trifocal.models import save_weights
from trifocal.ops.devices import computes_bf16
from trifocal.runlog import read_metrics
from trifocal.testing.small_models import make_model, small_config
from trifocal.train.run_folder import load_run

__all__ = ["tokenizer_file"]
SMALL = ["--geometry.compression-block-size", "4", "--geometry.compression-stride", "2"]
SMALL += ["--geometry.selection-block-size", "8", "--geometry.num-selected-blocks", "3"]
ONE_LOCAL = ["--geometry.num-local-blocks", "1"]
TRAIN = ["--train.steps", "2", "--train.sequence-length", "64", "--train.global-batch-size", "2"]
TRAIN += ["--train.micro-batch-size", "2", "--evaluate.interval-steps", "0", "--data.validation-fraction", "0.3"]


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    """A finished tiny run of a dense model."""
    folder = tmp_path_factory.mktemp("dense")
    assert main(["train", str(write_config(folder)), "--model.attention", "dense", "--train.steps", "2"]) == 0
    return folder / "run"


@pytest.mark.parametrize("tokenizer_file", ["ByteLevel"], indirect=True)
def test_a_model_of_hugging_face_becomes_sparse_and_trains_on(tmp_path, tokenizer_file, capsys):
    transformers = pytest.importorskip("transformers")
    folder, out = tmp_path / "theirs", tmp_path / "new" / "ours"
    config = transformers.LlamaConfig(
        vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).bfloat16()
    # Two tokens end an answer, as in many chat models.
    settings = {"eos_token_id": [0, 5], "bos_token_id": 7, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    theirs.generation_config = transformers.GenerationConfig(**settings)
    theirs.save_pretrained(folder, max_shard_size="30KB")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    assert main(["convert", str(folder), str(out), "--to", "selected", "--dense-layers", "0", *SMALL]) == 0
    assert "layers: 1 dense, 1 selected" in capsys.readouterr().out
    assert load_model(out).config.layer_types == ("dense", "selected")
    assert main(["generate", str(out), "--prompt", "Hello", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("Hello")
    options = GenerateArguments(path=str(out), prompt="Hello", device="cpu", top_p=0.8, max_new_tokens=4)
    loaded = load(options, out, [("the prompt", "Hello")])
    asked = loaded.request(options, 0, "the prompt")
    assert asked.stop_tokens == (0, 5) and (asked.sampling.temperature, asked.sampling.top_p) == (0.6, 0.8)
    assert loaded.model.dtype == (torch.bfloat16 if computes_bf16(torch.device("cpu")) else torch.float32)

    run, text = tmp_path / "run", write_documents(tmp_path / "text")
    arguments = ["--model.from", str(out), "--data.source", f"text:{text}", "--run.directory", str(run), *TRAIN]
    assert main(["train", *arguments]) == 0
    trained = load_run(run)
    assert trained.model == load_model(out).config and trained.model.from_ == str(out)
    assert (trained.data.tokenizer, trained.data.separator) == (str(out), "<|endoftext|>")
    # The run needs the folder no longer: it has a copy of the tokenizer.
    out.rename(tmp_path / "elsewhere")
    assert main(["generate", str(run), "--prompt", "Hello", "--max-new-tokens", "4"]) == 0
    # The settings beside the weights are still there, for us and for transformers.
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    for place in (run / "weights", tmp_path / "exported"):
        kept = transformers.GenerationConfig.from_pretrained(place).to_diff_dict()
        assert settings.items() <= kept.items() and kept["pad_token_id"] == 0
        written = json.loads((place / "config.json").read_text())
        assert (written["eos_token_id"], written["bos_token_id"]) == ([0, 5], 7)
        # The longest text too.
        assert json.loads((place / "tokenizer_config.json").read_text())["model_max_length"] == 64
    (folder / "tokenizer.json").write_text("{")
    message = refused(capsys, "convert", str(folder), str(out), "--to", "dense")
    assert message.startswith("trifocal: DIR/tokenizer.json is not valid JSON")


def test_an_index_is_taught_with_the_model_frozen(tmp_path, capsys):
    out, run = tmp_path / "out", tmp_path / "index"
    # An index can do what its attention does, which is far from uniform.
    dense = write_model(tmp_path / "dense", num_heads=2, num_layers=4, unrotated_layers=(0, 1, 3))
    assert main(["convert", str(dense), str(out), "--to", "mix", *SMALL, *ONE_LOCAL]) == 0
    told = capsys.readouterr().out
    # The two commands that it prints, made quick.
    replaced = {"runs/index": str(run), "text:PATH": f"text:{write_documents(tmp_path / 'text')}"}
    teach, train_on = (
        [replaced.get(word, word) for word in line.split()[1:]]
        for line in told.splitlines()
        if "trifocal train" in line
    )
    assert str(out) in teach and str(run) in train_on
    small = [*TRAIN[4:], "--data.validation-fraction", "0", "--log.interval-steps", "1"]
    fast = ["--train.steps", "80", "--schedule.warmup-steps", "0", "--lr", "0.007"]
    assert main([*teach, *small, *fast]) == 0
    before, after = load_model(out), load_model(run)
    changed = {
        name for name, weight in before.state_dict().items() if not torch.equal(weight, after.state_dict()[name])
    }
    assert changed == {name for name in before.state_dict() if ".index." in name} and changed
    rows = list(read_metrics(run / "metrics.jsonl", "train"))
    recall, loss = [sum(filter(None, row["choice_recall"])) for row in rows], [row["choice_loss"] for row in rows]
    assert sum(recall[-5:]) > 1.1 * sum(recall[:5]) and sum(loss[-5:]) < 0.8 * sum(loss[:5])
    assert main([*train_on, *small, "--run.directory", str(tmp_path / "on"), "--train.steps", "2"]) == 0
    trained = load_model(tmp_path / "on")
    # It follows the dense model.
    assert all(row["divergence"] > 0 for row in read_metrics(tmp_path / "on" / "metrics.jsonl", "train"))
    assert not torch.equal(trained.embedding.weight, after.embedding.weight)
    assert main(["generate", str(tmp_path / "on"), "--prompt", "the dog", "--max-new-tokens", "4"]) == 0


@pytest.mark.parametrize("part", ["", "weights"])
def test_a_dense_run_of_ours_becomes_sparse(dense_run, tmp_path, part, capsys, monkeypatch):
    out = tmp_path / "out"
    # An empty folder may be there, also with the shell in it.
    out.mkdir()
    monkeypatch.chdir(out)
    # Another program may have made one of its weights.
    (dense_run / "model.gguf").touch()
    assert main(["convert", str(dense_run / part), "." if part else str(out), "--to", "nsa", *SMALL]) == 0
    assert not [*out.glob(".model.*")]
    # `trifocal export` writes the same.
    config, generation = (json.loads((out / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert config["eos_token_id"] == 256
    assert config["max_position_embeddings"] == load_run(dense_run).train.sequence_length
    assert generation == {"eos_token_id": 256, "pad_token_id": 256}
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    assert tokenizer["pad_token"] == tokenizer["eos_token"]
    before, after = load_model(dense_run), load_model(out)
    assert after.config.attention_of_layers == ("nsa", "nsa")
    assert torch.equal(after.blocks[0].mlp.up_proj.weight, before.blocks[0].mlp.up_proj.weight)
    assert main(["generate", str(out), "--prompt", "the dog", "--max-new-tokens", "4"]) == 0
    capsys.readouterr()
    assert main(["convert", str(dense_run / part), str(tmp_path / "as it is"), "--to", "dense"]) == 0
    same = load_model(tmp_path / "as it is")
    assert same.config.attention_of_layers == before.config.attention_of_layers
    assert all(torch.equal(weight, before.state_dict()[name]) for name, weight in same.state_dict().items())
    capsys.readouterr()
    assert "'nsa' already" in refused(capsys, "convert", str(out), str(tmp_path / "twice"), "--to", "selected")


def test_bad_input_is_one_line_and_leaves_nothing(dense_run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    before = sorted(tmp_path.rglob("*"))
    out = str(tmp_path / "out")
    for arguments, message in (
        ([str(dense_run), str(tmp_path / "full"), "--to", "nsa"], "full exists already; give a new folder"),
        ([str(tmp_path / "gpt2"), out, "--to", "nsa"], "the architecture 'gpt2' is not supported"),
        (["meta-llama/Llama-3.1-8B", out, "--to", "nsa"], "no such folder; a model of the hub is downloaded first"),
        ([str(dense_run), str(tmp_path / "dangling"), "--to", "nsa"], "dangling: File exists"),
        (
            [str(dense_run), out, "--to", "sparse"],
            "--to must be one of 'mix', 'selected', 'nsa', 'dense', got 'sparse'",
        ),
        ([str(dense_run), out, "--to", "nsa", "--dense-layers", "2"], "--dense-layers names layer 2"),
        *(
            ([str(dense_run), out, "--to", "dense", f"--{name}", value], f"{name.partition('.')[0]} goes with another")
            for name, value in (("dense-layers", "0"), ("chooser", "index"), ("geometry.window-size", "5"))
        ),
    ):
        assert message in refused(capsys, "convert", *arguments)
        assert sorted(tmp_path.rglob("*")) == before
    assert "full exists already" in refused(capsys, "export", str(dense_run), str(tmp_path / "full"))
    assert "dangling: File exists" in refused(capsys, "export", str(dense_run), str(tmp_path / "dangling"))


def test_what_ends_early_leaves_what_others_wrote(dense_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, note = Path("out"), Path("out/note.txt")

    def interrupt(*_, **__):
        note.write_text("mine")
        raise KeyboardInterrupt

    def fail(path, target):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path), None, str(target))

    for command in (["convert", str(dense_run), "out", "--to", "nsa"], ["export", str(dense_run), "out"]):
        with monkeypatch.context() as patch:
            for module in ("cli.convert", "train.checkpoint.export"):
                patch.setattr(f"trifocal.{module}.save_weights", interrupt)
            assert main(command) == 130
        assert list(out.iterdir()) == [note]
        note.unlink()
        out.rmdir()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fail)
            assert f"json: {os.strerror(errno.ESTALE)}; out was not written" in refused(capsys, *command)
        assert not out.exists()
        assert main(command) == 0
        assert load_model(out) and not list(out.glob(".*"))
        shutil.rmtree(out)


def test_weights_and_tokenizers_are_checked_before_anything_is_written(tmp_path, capsys):
    model = make_model(small_config(attention="dense"), torch.device("cpu"))
    source, out = tmp_path / "source", tmp_path / "out"
    save_weights(model, source)
    make_tokenizer("bytes").save(source)
    command = ["convert", str(source), str(out), "--to", "selected"]
    assert main(command) == 0
    assert "the tokenizer has ids up to 256, the model 64 tokens; name one" in capsys.readouterr().out
    shutil.rmtree(out)
    save_weights(make_model(small_config(attention="window"), torch.device("cpu")), source)
    assert main(command) == 0
    assert "layers: 2 window" in capsys.readouterr().out
    shutil.rmtree(out)
    path = source / "tokenizer.json"
    before = path.read_bytes()
    path.write_text('{"model": {"type": "WordLevel", "vocab": {"<eos>": 4000000000}, "unk_token": "<eos>"}}')
    assert "tokenizer" in refused(capsys, *command) and not out.exists()
    path.write_bytes(before)
    with torch.no_grad():
        model.blocks[1].mlp.up_proj.weight[3, 4] = torch.nan
    save_weights(model, source)
    assert "model.blocks.1.mlp.up_proj.weight has values that are NaN or infinite" in refused(capsys, *command)
    assert not out.exists()


@pytest.fixture
def gguf():
    """The module that needs transformers."""
    pytest.importorskip("transformers")
    return importlib.import_module("trifocal.hf.gguf")


def test_a_gguf_is_named_or_lies_in_a_folder(gguf, tmp_path, capsys, monkeypatch):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"no GGUF")
    # Some folders of the hub have one that only names the architecture.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    out = str(tmp_path / "out")
    assert f"has 2 GGUF files; name one of them, such as {tmp_path / 'a.gguf'}" in refused(
        capsys, "convert", str(tmp_path), out, "--to", "selected"
    )
    (tmp_path / "b.gguf").unlink()
    for source in (tmp_path, tmp_path / "a.gguf"):
        for there, missing in (("", "gguf accelerate"), ("gguf", "accelerate")):
            monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name, there=there: name == there or None)
            message = refused(capsys, "convert", str(source), out, "--to", "nsa")
            assert message.rstrip().endswith(f"a GGUF needs more packages: pip install {missing}")
        monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: name)
        message = refused(capsys, "convert", str(source), out, "--to", "nsa")
        assert "a.gguf: transformers cannot read this GGUF: " in message

    def another(_file, folder):
        (folder / "config.json").write_text('{"model_type": "gemma2"}')

    monkeypatch.setattr(gguf, "write_folder_of_gguf", another)
    message = refused(capsys, "convert", str(tmp_path / "a.gguf"), out, "--to", "nsa")
    assert f"{tmp_path / 'a.gguf'}/config.json: the architecture 'gemma2' is not supported" in message
    assert not (tmp_path / "out").exists()


def write_gguf(path, model, tokenizer_file, *, keys=(), left_out=(), more=()):
    """Write a Llama as llama.cpp does; `keys` are further metadata without the architecture, `left_out` names tensors,
    or the key `head_count_kv`.
    """
    gguf = pytest.importorskip("gguf")
    config, words = model.config, json.loads(tokenizer_file.read_text())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if "head_count_kv" not in left_out:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, value in keys:
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"llama.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
    writer.add_token_merges([" ".join(merge) for merge in words["merges"]])
    writer.add_bos_token_id(7)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stored = names.get_name(name, (".weight", ".bias"))
        if "q_proj" in name or "k_proj" in name:
            # The pairs of a rotation side by side.
            tensor = tensor.unflatten(0, (2, 2, -1)).transpose(1, 2).flatten(0, 2)
        if name != "lm_head.weight" and stored not in left_out:
            kind = "Q8_0" if stored.startswith("blk.0.ffn_up") else "F32"
            kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored, gguf.quants.quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    for name, tensor in more:
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama():
    """Makes a Llama of two heads with rope parameters; 8 bits hold a part of it exactly."""
    transformers = pytest.importorskip("transformers")

    def make(**rope):
        config = transformers.LlamaConfig(
            vocab_size=700, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 5e4, **rope},
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
            up = model.model.layers[0].mlp.up_proj.weight
            up.copy_(torch.randint(-127, 128, up.shape) / 512)
            up[:, 0] = 127 / 512
        return model

    return make


ROPES = {
    "as in pretraining": ({}, (), ()),
    "linear": (
        {"rope_type": "linear", "factor": 4.0}, [("rope.scaling.type", "linear"), ("rope.scaling.factor", 4.0)], ()
    ),
    "linear, before it had a type": ({"rope_type": "linear", "factor": 4.0}, [("rope.scale_linear", 4.0)], ()),
    "linear, without its type": ({"rope_type": "linear", "factor": 4.0}, [("rope.scaling.factor", 4.0)], ()),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        [("rope.scaling.type", "yarn"), ("rope.scaling.factor", 4.0), ("rope.scaling.original_context_length", 16)],
        (),
    ),
    "llama3": (
        {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        (), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("tokenizer_file", ["ByteLevel"], indirect=True)
@pytest.mark.parametrize("rope", ROPES)
def test_a_gguf_is_a_folder_like_any_other(llama, rope, tmp_path, tokenizer_file):
    """transformers leaves the rope parameters of a GGUF out."""
    parameters, keys, has_factors = ROPES[rope]
    theirs = llama(**parameters)
    factors = []
    if has_factors:
        unscaled = 5e4 ** (-torch.arange(0, 16, 2) / 16)
        factors = [("rope_freqs.weight", unscaled / theirs.model.rotary_emb.inv_freq)]
    # transformers would prefer a tokenizer.json beside it.
    (tmp_path / "alone").mkdir()
    write_gguf(tmp_path / "alone" / "model.gguf", theirs, tokenizer_file, keys=keys, more=factors)
    assert main(["convert", str(tmp_path / "alone"), str(tmp_path / "out"), "--to", "dense"]) == 0
    tokens = torch.arange(60)[None]
    with torch.no_grad():
        logits = load_model(tmp_path / "out")(tokens)
        torch.testing.assert_close(logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    tokenizer = make_tokenizer(str(tmp_path / "out"))
    assert tokenizer.encode_prompt([{"role": "user", "content": "Hello"}]).size
    # transformers 5.17 took the token that begins a text for its end too.
    assert tokenizer.ends == (0,)


@pytest.mark.parametrize("tokenizer_file", ["ByteLevel"], indirect=True)
def test_a_gguf_of_which_something_would_be_lost_is_refused(llama, tmp_path, tokenizer_file, capsys):
    """transformers draws weights that a GGUF lacks, leaves out those that it does not know, and keeps llama.cpp's order
    where the number of key heads is not given.
    """
    wrong = {
        "lacks the tensor blk.1.ffn_down.weight; parts of a GGUF are joined first": {
            "left_out": ("blk.1.ffn_down.weight",)
        },
        "lacks the key llama.attention.head_count_kv": {"left_out": ("head_count_kv",)},
        "cannot read the tensor blk.0.attn_output.bias": {"more": [("blk.0.attn_output.bias", torch.ones(32))]},
        "the rope factors of rope_freqs.weight are not those of a Llama": {
            "more": [("rope_freqs.weight", torch.arange(1.0, 9.0))]
        },
        "the rope parameter 'yarn_log_mul' is not supported": {
            "keys": [("rope.scaling.type", "yarn"), ("rope.scaling.yarn_log_mul", 0.1)]
        },
    }
    for message, options in wrong.items():
        write_gguf(tmp_path / "model.gguf", llama(), tokenizer_file, **options)
        given = ["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"), "--to", "nsa"]
        assert main(given) == 2
        # Behind the bars of transformers.
        assert message in capsys.readouterr().err.splitlines()[-1]
