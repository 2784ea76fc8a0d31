"""The model of transformers is ours: the same bits there and back, padding and packing change nothing."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.attentions import TRAINED_OPTIONS
from trifocal import load_model
from trifocal.errors import UserError
from trifocal.hf import TrifocalConfig, TrifocalForCausalLM, TrifocalForSequenceClassification, TrifocalModel
from trifocal.models import DecoderLM, save_weights
from trifocal.nn.chooser import first_index
from trifocal.testing.small_models import make_model, random_tokens, small_config

CPU = torch.device("cpu")
# The names that transformers 5.18 has too.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
QK = ("cu_seq_lens_q", "cu_seq_lens_k")
TOKENS = random_tokens((2, 30), 64, CPU)


def padded(rows, side, more=0):
    """A batch of rows of one length, and its mask; `more` adds padding to the longest row too."""
    length = max(map(len, rows)) + more
    tokens, mask = torch.zeros(2, len(rows), length, dtype=torch.int64)
    for index, row in enumerate(rows):
        first = length - len(row) if side == "left" else 0
        tokens[index, first : first + len(row)] = row
        mask[index, first : first + len(row)] = 1
    return tokens, mask


@pytest.mark.parametrize("options", TRAINED_OPTIONS, ids=str)
def test_the_same_bits_there_and_back(options, tmp_path):
    decoder = make_model(small_config(**options), CPU).eval()
    model = TrifocalForCausalLM.from_decoder(decoder)
    expected = decoder(TOKENS)
    assert torch.equal(model(TOKENS).logits, expected)
    assert torch.equal(model.to_decoder()(TOKENS), expected)
    # Small enough for several shards of both writers.
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    save_weights(decoder, tmp_path / "ours", shard_bytes=20_000)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_attention_heads"] == 4
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        weights = {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
        # Tied weights are stored once.
        assert model.load_state_dict(weights, strict=False).unexpected_keys == []
        assert weights.keys() >= model.state_dict().keys() - {"head.weight"}
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
        ours, theirs = load_model(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert ours.config == decoder.config and isinstance(theirs, TrifocalForCausalLM)
        torch.testing.assert_close(ours.state_dict(), decoder.state_dict(), rtol=0, atol=0)
        assert torch.equal(theirs(TOKENS).logits, expected)
    base = transformers.AutoModel.from_pretrained(tmp_path / "ours")
    assert isinstance(base, TrifocalModel)
    assert torch.equal(base(TOKENS).last_hidden_state, decoder.hidden_states(TOKENS))


def test_scores_of_sequences(decoder, rows, tmp_path):
    """A reward model begins with the weights of a language model, and reads the last token of each row."""
    save_weights(decoder, tmp_path, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).train()
    assert isinstance(model, TrifocalForSequenceClassification)
    for side in ("left", "right"):
        tokens, mask = padded(rows, side)
        scores = model(tokens, attention_mask=mask).logits
        for row, score in zip(rows, scores, strict=True):
            expected = model.score(decoder.hidden_states(row[None])[0, -1])
            torch.testing.assert_close(score, expected, rtol=1e-9, atol=1e-9)
    torch.nn.functional.logsigmoid(scores[0] - scores[1]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save_pretrained(tmp_path / "scores")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "scores")
    weights = again.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    # Not to the bit: how a matrix product adds up may depend on where its weights begin in memory.
    torch.testing.assert_close(again(tokens, attention_mask=mask).logits, scores, rtol=1e-9, atol=1e-9)


def test_new_weights_are_drawn_as_ours():
    torch.manual_seed(0)
    model = TrifocalForCausalLM(TrifocalConfig.from_model_config(small_config(compressor="mlp", dim=64)))
    ours = DecoderLM(small_config(compressor="mlp", dim=64)).state_dict()
    for name, weight in model.state_dict().items():
        expected = ours[name.removeprefix("model.")]
        # Seven times the error of a deviation that is estimated twice from these numbers.
        assert float(weight.std()) == pytest.approx(float(expected.std()), rel=7 * weight.numel() ** -0.5), name
        assert float(weight.mean()) == pytest.approx(1.0 if name.endswith("norm.weight") else 0.0, abs=0.05), name


def test_a_new_index_starts_as_ours(tmp_path):
    """With new weights, and with loaded ones: there by the keys that are read in the blocks it chooses."""

    def check(layer, branch):
        keys = layer.k_proj.weight.chunk(layer.branches)[branch]
        begun = first_index(layer.q_proj.weight, keys, layer.num_kv_heads, layer.head_dim)
        assert all(torch.equal(one.weight, first) for one, first in zip(layer.index.maps, begun, strict=True))

    config = TrifocalConfig.from_model_config(small_config(chooser="index"))
    check(TrifocalForCausalLM(config).model.blocks[1].attention, 0)
    trained = TrifocalForCausalLM(TrifocalConfig.from_model_config(small_config()))
    with torch.no_grad():
        trained.model.blocks[1].attention.k_proj.weight.normal_()
    trained.save_pretrained(tmp_path)
    check(TrifocalForCausalLM.from_pretrained(tmp_path, config=config).model.blocks[1].attention, 1)


def test_padding_and_packing_change_nothing(model, rows):
    """To the bit, of the hidden states: how a matrix product adds up may depend on its number of rows."""

    def states(tokens, **options):
        return model.model(tokens, **options).last_hidden_state

    alone = [states(row[None], use_cache=False)[0] for row in rows]
    tokens = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = states(tokens, position_ids=positions)[0].split([len(row) for row in rows])
    torch.testing.assert_close(packed, alone, rtol=1e-11, atol=1e-11)
    boundaries = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0)], dtype=torch.int32)
    by_boundaries = states(tokens, cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries, max_length_q=41)
    assert torch.equal(by_boundaries[0], torch.cat(packed))
    # A cache would hold them as one document, and these alone do not say where a document begins.
    with torch.no_grad():
        for packing in ({"cu_seq_lens_q": boundaries}, {"position_ids": positions}):
            with pytest.raises(ValueError, match=r"packed documents .* use_cache=False"):
                states(tokens, **packing)
            got = states(tokens, use_cache=False, **packing)
            torch.testing.assert_close(got, by_boundaries, rtol=1e-11, atol=1e-11)
    for name in ("cu_seq_lens_k", "seq_idx"):
        with pytest.raises(ValueError, match="packed documents need cu_seq_lens_q, or position_ids"):
            states(tokens, use_cache=False, **{name: boundaries})
    for side in ("left", "right"):
        tokens, mask = padded(rows, side, more=3)
        output = model(tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)
        for got, real, expected, logits in zip(
            output.hidden_states[-1], mask.bool(), packed, output.logits, strict=True
        ):
            assert torch.equal(got[real], expected)
            torch.testing.assert_close(logits[real], model.head(expected), rtol=1e-11, atol=1e-11)
            assert not got[~real].any() and not logits[~real].any()
    # Documents inside of rows with padding; the positions of padding do not count.
    tokens, mask = padded([torch.cat(rows[:3]), rows[3]], "left")
    positions = torch.zeros_like(tokens)
    positions[0] = torch.cat([torch.arange(len(row)) for row in rows[:3]])
    positions[1, -26:] = torch.arange(26)
    got = states(tokens, attention_mask=mask, position_ids=positions)
    assert torch.equal(torch.cat((got[0], got[1, -26:])), torch.cat(packed))


@torch.no_grad()
def test_the_loss_is_ours(model, decoder):
    labels = TOKENS.clone()
    labels[0, :10] = -100
    expected = decoder(TOKENS[:, :-1], labels[:, 1:])
    counted = int((labels[:, 1:] >= 0).sum())
    # transformers computes it in float32.
    assert float(model(TOKENS, labels=labels).loss) == pytest.approx(float(expected), rel=1e-6)
    loss = model(TOKENS, labels=labels, num_items_in_batch=torch.tensor(7)).loss
    assert float(loss) == pytest.approx(float(expected) * counted / 7, rel=1e-6)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert float(model(TOKENS, shift_labels=shifted).loss) == pytest.approx(float(expected), rel=1e-6)


def test_what_is_returned(model, rows):
    tokens, mask = padded(rows, "left")
    output = model(tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)
    assert len(output.hidden_states) == 3
    assert all(states.shape == (4, 41, 32) for states in output.hidden_states)
    assert torch.equal(model.head(output.hidden_states[-1]), output.logits)
    assert torch.equal(model(tokens, attention_mask=mask, logits_to_keep=2).logits, output.logits[:, -2:])
    places = torch.tensor([3, 40])
    assert torch.equal(model(tokens, attention_mask=mask, logits_to_keep=places).logits, output.logits[:, places])
    embedded = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embedded, attention_mask=mask).logits, output.logits)
    as_tuple = model(tokens, attention_mask=mask, return_dict=False, use_cache=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], output.logits)


def test_checkpointed_layers_give_the_same_gradients(decoder, rows):
    """The pass that is made again leaves out what the dropout of an adapter left out in the first one."""
    model = TrifocalForCausalLM.from_decoder(make_model(decoder.config, CPU, torch.float64)).train()
    for block in model.model.blocks:
        block.mlp = torch.nn.Sequential(block.mlp, torch.nn.Dropout(0.5))
    tokens, mask = padded(rows, "right")
    labels = tokens.masked_fill(mask == 0, -100)
    gradients, kept = [], []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        elements = 0

        def count(x):
            nonlocal elements
            elements += x.numel()
            return x

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            loss = model(tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        kept.append(elements)
        model.zero_grad()
    assert model.is_gradient_checkpointing and kept[1] < kept[0] / 2
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    for options in ({"every_n_layers": 2}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}):
        with pytest.raises(ValueError, match="leave offload, every_n_layers and use_reentrant=True out"):
            model.gradient_checkpointing_enable(**options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "attention_mask has padding between the real tokens of row 0"),
        ({"attention_mask": torch.tensor([[0, 0, 0]])}, "attention_mask hides every token of row 0"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"must have the shape \[B, T\] = \[1, 3\], got \[1, 1, 3, 3\]"),
        (
            {"position_ids": torch.tensor([[0, 1]])},
            r"position_ids must have the shape \[B, T\] = \[1, 3\], got \[1, 2\]",
        ),
        ({"position_ids": torch.tensor([[5, 6, 7]])}, "must count from 0 in each document, got 5 at token 0 of row 0"),
        ({"position_ids": torch.tensor([[1, 2, 3]])}, "must count from 0 in each document, got 1 at token 0 of row 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 2])}, "cu_seq_lens_q must end at the number of tokens, 3, got 2"),
        (dict(zip(QK, torch.tensor([[0, 2, 3], [0, 1, 3]]), strict=True)), "cu_seq_lens_k must be equal to cu_seq"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 1, 3]), "position_ids": torch.tensor([[0, 1, 0]])},
            "position_ids and cu_seq_lens_q begin documents at different tokens",
        ),
        ({"output_attentions": True}, "output_attentions=True is not possible"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "either input_ids or inputs_embeds"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_possible_is_refused_by_name(model, given, message):
    with pytest.raises(ValueError, match=message):
        model(torch.tensor([[2, 3, 4]]), use_cache=False, **given)


def test_configurations():
    config = TrifocalConfig(hidden_size=48, num_hidden_layers=3, num_heads=6, num_key_value_heads=2, eos_token_id=5)
    assert (config.model["dim"], config.model["num_layers"], config.num_attention_heads) == (48, 3, 6)
    content = json.loads(config.to_json_string())
    assert (content["hidden_size"], content["num_key_value_heads"], content["head_dim"]) == (48, 2, 64)
    again = TrifocalConfig.from_dict(content)
    assert again.to_model_config() == config.to_model_config() and again.eos_token_id == 5
    # What is set counts before it is saved too.
    again.sliding_window, again.rms_norm_eps = 16, 1e-3
    changed = again.to_model_config()
    assert (changed.sliding_window, changed.norm_eps) == (16, 1e-3)
    assert TrifocalConfig.from_dict(content, sliding_window=16, norm_eps=1e-3).to_model_config() == changed
    assert TrifocalConfig.from_dict(json.loads(again.to_json_string())).to_model_config() == changed
    with pytest.raises(UserError, match=r"got hidden_size = 64, but model\.dim = 48; give both one value"):
        TrifocalConfig.from_dict(content | {"hidden_size": 64})
    with pytest.raises(UserError, match=r"model\.num_heads must be a multiple of model\.num_kv_heads, got 6 and 4"):
        TrifocalConfig(num_heads=6, num_kv_heads=4)
    with pytest.raises(UserError, match=r'unknown key "model\.dims"; the nearest valid one is "model\.dim"'):
        TrifocalConfig(model={"dims": 3})
    with pytest.raises(ValueError, match="does not support Flash Attention"):
        TrifocalForCausalLM._from_config(config, attn_implementation="flash_attention_2")


def test_another_vocabulary(decoder, tmp_path):
    model = TrifocalForCausalLM.from_decoder(make_model(decoder.config, CPU))
    model.resize_token_embeddings(70)
    assert model(TOKENS).logits.shape == (2, 30, 70)
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).config.vocab_size == 70
