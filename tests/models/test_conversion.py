"""Dense models of transformers become sparse ones of ours: the same logits where all blocks are read."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from trifocal.errors import UserError
from trifocal.models import DecoderLM, ModelConfig
from trifocal.models.conversion import convert_tensors, converted_config
from trifocal.models.hf_reader import read_hf_config, read_hf_model
from trifocal.nn.chooser import first_index
from trifocal.ops import Geometry

transformers = pytest.importorskip("transformers")

LENGTH = 45
COVERING = Geometry(4, 2, 8, num_selected_blocks=6, num_initial_blocks=1, num_local_blocks=1, window_size=8)
SIZES = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.2, "mscale_all_dim": 0.8},
    "linear": {"factor": 2.0},
}
# Their own special tokens lie beyond this vocabulary.
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CASES = {
    "llama, biases, tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, wide heads": ("Llama", {"head_dim": 24, "num_key_value_heads": 1}),
    **{
        f"llama, {kind}": ("Llama", {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **values}})
        for kind, values in ROPES.items()
    },
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "mistral, sliding": ("Mistral", {"sliding_window": 7}),
    "smollm3": ("SmolLM3", {**TOKENS, "no_rope_layers": [1, 0, 1]}),
    "smollm3, sliding": (
        "SmolLM3",
        {
            **TOKENS,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
        },
    ),
    "olmo2, biases, tied, sliding ignored": (
        "Olmo2",
        {
            **TOKENS,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "olmo3, yarn": (
        "Olmo3",
        {
            **TOKENS,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
}


def theirs(kind, folder, **changes):
    """A random model of transformers, also as a folder; all weights drawn, those of norms and biases too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=0.5, std=0.5)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return model


def ours(config, tensors):
    with torch.device("meta"):
        model = DecoderLM(config)
    model.load_state_dict(tensors, assign=True)
    return model


def drawn_tokens(rows=2):
    return torch.randint(53, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def assert_near(found, expected):
    """Both add up in fp32, in another order; angles are in fp64 here and in fp32 in transformers."""
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


def logits(model, tokens):
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path, case):
    kind, changes = CASES[case]
    model = theirs(kind, tmp_path, **changes)
    tokens = drawn_tokens()
    expected = logits(model, tokens)
    config, tensors = read_hf_model(tmp_path)
    assert expected.abs().max() > 1
    for dense_layers in ((1,), (0, 1, 2)):
        wanted = (
            config
            if len(dense_layers) == 3
            else converted_config(config, "selected", COVERING, dense_layers=dense_layers)
        )
        assert_near(logits(ours(wanted, convert_tensors(tensors, wanted)), tokens), expected)
    with torch.no_grad():
        packed = ours(config, tensors)(tokens.view(1, -1), cu_seqlens=torch.tensor([0, LENGTH, 2 * LENGTH]))
    assert_near(packed.view_as(expected), expected)


@pytest.mark.parametrize(("kind", "shared_kv"), [("Qwen2", False), ("Qwen2", True), ("Olmo2", False)])
def test_nsa_has_the_dense_keys_and_values_in_open_branches(tmp_path, kind, shared_kv):
    model = theirs(kind, tmp_path, **TOKENS)
    tokens = drawn_tokens(1)
    config, tensors = read_hf_model(tmp_path)
    # Blocks of one token: each branch reads all of the past.
    everything = Geometry(1, 1, 1, num_selected_blocks=LENGTH, window_size=LENGTH)
    wanted = converted_config(config, "nsa", everything, dense_layers=[0], shared_kv=shared_kv)
    assert wanted.layer_types == ("dense", "nsa", "nsa") and wanted.qkv_bias == (kind == "Qwen2")
    converted = ours(wanted, convert_tensors(tensors, wanted))
    # Three equal branches with gates of one third are dense attention.
    assert_near(logits(converted, tokens), logits(model, tokens))
    copies = converted.blocks[1].attention.k_proj.weight.chunk(1 if shared_kv else 3)
    assert all(torch.equal(copy, tensors["blocks.1.attention.k_proj.weight"]) for copy in copies)
    converted(tokens, tokens).backward()
    for name, parameter in converted.named_parameters():
        assert parameter.grad.any(), name


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_an_index_begins_as_the_layers_attention(tmp_path, kind):
    theirs(kind, tmp_path)
    config, tensors = read_hf_model(tmp_path)
    wanted = converted_config(config, "nsa", COVERING, chooser="index")
    converted, again = convert_tensors(tensors, wanted), convert_tensors(tensors, wanted)
    for layer in range(3):
        attention = f"blocks.{layer}.attention"
        q, k = (tensors[f"{attention}.{name}.weight"] for name in ("q_proj", "k_proj"))
        begun = first_index(q, k, config.num_kv_heads, config.head_dim)
        for name, expected in zip(("query_proj", "key_proj"), begun, strict=True):
            weight = converted[f"{attention}.index.{name}.weight"]
            # Queries and keys with norms are not what their maps give.
            assert torch.equal(weight, expected) == (not config.qk_norm) and weight.shape == expected.shape
            assert torch.equal(weight, again[f"{attention}.index.{name}.weight"]) and weight.any()
    assert config.qk_norm == (kind == "Qwen3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama in several files."""
    path = tmp_path_factory.mktemp("llama")
    theirs("Llama", path).save_pretrained(path, max_shard_size="20KB")
    (path / "model.safetensors").unlink()
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def test_the_type_of_the_weights_stays(tmp_path):
    model = theirs("Llama", tmp_path).bfloat16()
    # As some files have it; layers compute in one type.
    model.lm_head.float()
    model.save_pretrained(tmp_path)
    config, tensors = read_hf_model(tmp_path)
    converted = convert_tensors(tensors, converted_config(config, "nsa", Geometry()))
    assert {tensor.dtype for tensor in converted.values()} == {torch.bfloat16}


def _edit(**changes):
    def edit(folder):
        path = folder / "config.json"
        content = json.loads(path.read_text())
        for name, value in changes.items():
            content.pop(name) if value is ... else content.update({name: value})
        path.write_text(json.dumps(content))

    return edit


def test_a_folder_without_a_key_is_read_as_transformers_reads_it(tmp_path):
    options = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    theirs("Qwen2", tmp_path, **options, rope_parameters={"rope_type": "default", "rope_theta": 5e3})
    _edit(sliding_window=..., layer_types=..., rope_scaling={"type": "linear", "factor": 2.0})(tmp_path)
    expected, found = transformers.AutoConfig.from_pretrained(tmp_path), read_hf_config(tmp_path)
    assert [kind == "window" for kind in found.layer_types] == [kind[0] == "s" for kind in expected.layer_types]
    assert found.sliding_window == expected.sliding_window == 4096
    for other in ({"max_window_layers": 3}, {"use_sliding_window": ...}):
        _edit(**other)(tmp_path)
        without = read_hf_config(tmp_path)
        assert (without.attention, without.layer_types, without.sliding_window) == ("dense", (), 0)
        _edit(max_window_layers=1)(tmp_path)
    # Beside rope_parameters, rope_scaling is the one that somebody has added.
    assert found.rope_theta == expected.rope_parameters["rope_theta"] == 10000.0
    assert found.rope_scaling.factor == expected.rope_parameters["factor"] == 2.0
    # Files from before rope_parameters.
    _edit(rope_parameters=..., rope_scaling=..., rope_theta=7e3)(tmp_path)
    expected, found = transformers.AutoConfig.from_pretrained(tmp_path), read_hf_config(tmp_path)
    assert found.rope_theta == expected.rope_parameters["rope_theta"] == 7000.0
    # All of the head is rotated, and no window is set.
    rope = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0}
    _edit(rope_parameters=rope, model_type="smollm3", no_rope_layers=[1, 0, 1])(tmp_path)
    expected, found = transformers.AutoConfig.from_pretrained(tmp_path), read_hf_config(tmp_path)
    assert found.rope_theta == expected.rope_parameters["rope_theta"] == 5000.0
    assert set(expected.layer_types) == {"full_attention"} and set(found.attention_of_layers) == {"dense"}


def test_an_olmo_3_has_a_dense_layer_behind_three_of_windows(tmp_path):
    theirs("Olmo3", tmp_path, **TOKENS, num_hidden_layers=5, sliding_window=7)
    _edit(layer_types=...)(tmp_path)
    expected = transformers.AutoConfig.from_pretrained(tmp_path).layer_types
    found = read_hf_config(tmp_path).layer_types
    assert [kind == "window" for kind in found] == [kind == "sliding_attention" for kind in expected]
    assert found == (*["window"] * 3, "dense", "window")


def test_a_mistral_has_the_layers_that_its_file_names(tmp_path):
    theirs("Mistral", tmp_path, sliding_window=7)
    _edit(layer_types=["sliding_attention", "full_attention", "sliding_attention"])(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    config, tensors = read_hf_model(tmp_path)
    tokens = drawn_tokens()
    assert_near(logits(ours(config, tensors), tokens), logits(model, tokens))


def test_tied_embeddings_may_be_stored_twice_if_they_are_equal(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    _edit(tie_word_embeddings=True)(copy)
    with pytest.raises(UserError, match=r"tie_word_embeddings = true, but lm_head\.weight differs"):
        read_hf_model(copy)
    _edit_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0}))(copy)
    config, tensors = read_hf_model(copy)
    assert config.tie_embeddings and "head.weight" not in tensors


def _second(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def _edit_tensors(change):
    def edit(folder):
        tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


BAD = [
    (_edit(model_type="phi3"), "the architecture 'phi3' is not supported; it must be one of llama, mistral"),
    (
        _edit(model_type="olmo3", rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
        "the rope parameters {.*} of sliding_attention are not supported",
    ),
    (_edit(num_hidden_layers=1_000), r"got \d+ tensors, but config.json has 1,000 layers"),
    (
        _edit(model_type="qwen3", layer_types=["full_attention"] * 2),
        "layer_types names 2 layers, but num_hidden_layers is 3",
    ),
    (_edit(model_type="qwen3", layer_types=["full_attention"] * 4), "layer_types names 4 layers"),
    (_edit(model_type="qwen3", layer_types=["chunked_attention"] * 3), "the layer type 'chunked_attention' is not"),
    (
        _edit(model_type="qwen3", layer_types=["sliding_attention"] * 3),
        "layer_types has sliding_attention, but sliding_window is not set",
    ),
    (_edit(hidden_act="gelu"), "the activation 'gelu'"),
    (_edit(vocab_size=...), "lacks the key 'vocab_size'"),
    (_edit(quantization_config={"bits": 4}), "quantised weights"),
    (_edit(rope_parameters={"rope_type": "longrope"}), "rope_type must be one of default, .*, got 'longrope'"),
    (_edit(rope_parameters={"rope_type": "default", "mrope_section": [1]}), "the rope parameter 'mrope_section'"),
    (_edit(rope_parameters={"full_attention": {}}), "rope parameters that differ between layers"),
    (_edit(partial_rotary_factor=0.5), "the partial_rotary_factor 0.5 is not supported"),
    (_edit(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "'llama3' needs the parameter 'low_freq_factor'"),
    (lambda folder: (folder / "model.safetensors.index.json").unlink(), "has no safetensors: neither"),
    (
        lambda folder: _second(folder).unlink(),
        r"lacks the shard model-00002-of-\d+.safetensors, which model.safetensors.index.json names",
    ),
    (lambda folder: _second(folder).write_bytes(b"x"), "is not a whole safetensors file"),
    (_edit_tensors(lambda tensors: tensors.pop("model.norm.weight")), "lacks the tensor model.norm.weight"),
    (
        _edit_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)})),
        r"model.norm.weight has the shape \[7\], but config.json makes it \[32\]",
    ),
    (_edit_tensors(lambda tensors: tensors.update(extra=torch.ones(1))), "config.json does not know: extra"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_folders_are_named_in_a_line(folder, tmp_path, damage, message):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    with pytest.raises(UserError, match=message) as caught:
        read_hf_model(copy)
    assert "\n" not in str(caught.value)


def test_options_that_do_not_fit_are_refused():
    config = ModelConfig(num_layers=3, attention="dense")
    with pytest.raises(UserError, match="--dense-layers names layer 3, but the model has layers 0 to 2"):
        converted_config(config, "selected", COVERING, dense_layers=[3])
    with pytest.raises(UserError, match="--dense-layers goes with another --to"):
        converted_config(config, "dense", COVERING, dense_layers=[0])
    for to in ("selected", "mix"):
        with pytest.raises(UserError, match="--shared-kv goes with --to nsa"):
            converted_config(replace(config, num_layers=4), to, COVERING, shared_kv=True)
    # Layers that are alike are not named one by one, and no window is set where none is.
    assert converted_config(config, "selected", COVERING) == replace(config, attention="selected", geometry=COVERING)
    # A window that the old geometry gives stays, whatever the new one is.
    for layers in (("dense", "window"), ("window", "window")):
        before = ModelConfig(num_layers=2, layer_types=layers, geometry=Geometry(window_size=96))
        assert converted_config(before, "nsa", COVERING).sliding_window == 96
    assert converted_config(replace(config, num_layers=4), "mix", COVERING).sliding_window == COVERING.window_size
    with pytest.raises(UserError, match="the model has layers with a sliding window already"):
        converted_config(before, "mix", COVERING)
    # The fourth layer would select blocks.
    with pytest.raises(UserError, match="no layer is left to select blocks"):
        converted_config(config, "mix", COVERING)
    with pytest.raises(UserError, match="layer 0 has the type 'nsa' already"):
        converted_config(ModelConfig(), "selected", COVERING)
