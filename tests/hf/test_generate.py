"""Generating with transformers' caches gives what the whole sequence gives, row by row, whatever padding there is."""

import pytest
import torch
import transformers
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from tests.attentions import OPTIONS
from tests.hf.test_modeling import padded
from trifocal.data import make_tokenizer
from trifocal.hf import TrifocalConfig, TrifocalForCausalLM
from trifocal.testing.small_models import make_model, random_tokens, small_config

# transformers 5.24 has another name for it.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
NEW = 8


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch):
    """So that short sequences fill several, and the tensors grow."""
    monkeypatch.setattr("trifocal.hf.cached_forward.PAGE_SIZE", 8)


def model_of(**options):
    decoder = make_model(small_config(**options), torch.device("cpu"), torch.float64)
    return TrifocalForCausalLM.from_decoder(decoder, eos_token_id=1, pad_token_id=0).eval()


def generate(model, tokens, mask=None, **options):
    """The new tokens."""
    torch.manual_seed(3)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False, **options}
    return model.generate(tokens, attention_mask=mask, **options)[:, tokens.shape[1] :]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_a_cache_changes_nothing(options, rows):
    model = model_of(**options)
    tokens, mask = padded(rows, "left")
    new = generate(model, tokens, mask)
    assert torch.equal(new, generate(model, tokens, mask, use_cache=False))
    for row, expected in zip(rows, new, strict=True):
        assert torch.equal(generate(model, row[None])[0], expected)
    # A prompt in chunks, a few tokens at a time, one at a time.
    tokens, mask = torch.cat((tokens, new), dim=1), torch.nn.functional.pad(mask, (0, NEW), value=1)
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    cache, first, logits = DynamicCache(config=model.config), 0, []
    for count in (13, 15, 3, 7, 8, 1, 1, 1):
        stop = first + count
        output = model(tokens[:, first:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        logits.append(output.logits)
        first = stop
        assert cache.get_seq_length() == stop
    torch.testing.assert_close(torch.cat(logits, dim=1)[mask.bool()], expected[mask.bool()], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_cache_sees_what_a_hook_makes_of_a_learned_compressor(rows):
    """Decoding reads φ's weights, so it does not run where they are not all that φ computes."""
    model = model_of(compressor="mlp")
    new, tokens = generate(model, rows[0][None]), rows[0][None]
    layer = model.get_submodule("model.blocks.0.attention")
    layer.k_compressor.down_proj.register_forward_hook(lambda module, args, output: 50 * output + 1)
    hooked = generate(model, tokens)
    assert torch.equal(hooked, generate(model, tokens, use_cache=False)) and not torch.equal(hooked, new)


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[5], OPTIONS[6]], ids=str)
@torch.no_grad()
def test_a_pass_that_fails_leaves_the_cache_as_it_was(options, monkeypatch):
    """Behind the last layer, with more tokens than the rings hold."""
    model = model_of(**options)
    tokens = torch.randint(2, 64, (1, 160), generator=torch.Generator().manual_seed(7))
    expected = model(tokens, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    first = model(tokens[:, :20], past_key_values=cache).logits

    def fail(*_):
        raise torch.OutOfMemoryError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.norm, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            model(tokens[:, 20:], past_key_values=cache)
    logits = torch.cat((first, model(tokens[:, 20:], past_key_values=cache).logits), dim=1)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@torch.no_grad()
def test_a_cache_has_the_name_of_each_version(model, rows, name):
    """`generate` of transformers 5.24 passes and reads it as `cache`."""
    tokens = rows[0][None]
    cache = DynamicCache(config=model.config)
    for decoder, logits_of in (
        (model, lambda output: output.logits),
        (model.model, lambda output: model.head(output[0])),
    ):
        cache.reset()
        logits = []
        for new in (tokens[:, :30], tokens[:, 30:]):
            output = decoder(input_ids=new, use_cache=True, **{name: cache})
            assert cache in output.values()
            logits.append(logits_of(output))
        expected = logits_of(decoder(tokens, use_cache=False))
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-9, atol=1e-9)


def test_a_cache_with_gradients_is_refused(model, rows):
    tokens = rows[0][None]
    with pytest.raises(ValueError, match=r"use_cache=True: caches are for decoding without gradients"):
        model(tokens, use_cache=True)
    # A loop that was written without `no_grad` ends at its second token, with gradients or without.
    cache = model(tokens).past_key_values
    for gradients in (True, False):
        with pytest.raises(ValueError, match="from the first token on"), torch.set_grad_enabled(gradients):
            model(tokens[:, :1], past_key_values=cache)


def test_strings_that_stop(model, rows, tmp_path):
    make_tokenizer("bytes").save(tmp_path)
    new = generate(model, rows[0][None])[0].tolist()
    options = {"stop_strings": [chr(new[3])], "tokenizer": transformers.AutoTokenizer.from_pretrained(tmp_path)}
    found = generate(model, rows[0][None], **options)[0].tolist()
    assert found == new[: new.index(new[3]) + 1] != new


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.5},
        {"num_beams": 3, "length_penalty": 0.5},
        {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
        {"prefill_chunk_size": 10},
        {"eos_token_id": list(range(2, 10))},
    ],
    ids=lambda options: " ".join(options),
)
def test_ways_of_generating(model, rows, options):
    tokens, mask = padded([rows[2], rows[3]], "left")
    without = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    expected = generate(model, tokens, mask, use_cache=False, **without)
    assert torch.equal(generate(model, tokens, mask, **options), expected)


def test_tokens_that_are_guessed_and_taken_back(model, rows):
    prompt = torch.cat((rows[0], rows[0][:30]))[None]
    expected = generate(model, prompt)
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=12), expected)


def test_a_conversation_continues_with_its_cache(model, rows):
    cache = DynamicCache(config=model.config)
    first = generate(model, rows[0][None], past_key_values=cache)
    # Embedded prompts, as PEFT's prompt tuning gives them; and a cache need not know the configuration.
    embedded = model.get_input_embeddings()(rows[0][None])
    assert torch.equal(
        model.generate(inputs_embeds=embedded, max_new_tokens=NEW, do_sample=False, eos_token_id=None), first
    )
    assert torch.equal(generate(model, rows[0][None], past_key_values=DynamicCache()), first)
    # The last token of an answer is not in the cache yet.
    assert cache.get_seq_length() == len(rows[0]) + NEW - 1
    prompt = torch.cat((rows[0][None], first, rows[3][None]), dim=1)
    expected = generate(model, prompt)
    assert torch.equal(generate(model, prompt, past_key_values=cache), expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, rows[0][None], past_key_values=cache), first)


@pytest.mark.parametrize("options", [{}, {"layer_types": ("window", "dense")}], ids=lambda options: " ".join(options))
def test_a_cache_of_inference_mode_is_continued_outside(options, rows):
    model, cache = model_of(**options), DynamicCache()
    with torch.inference_mode():
        model(rows[0][None, :-1], past_key_values=cache)
    assert torch.equal(generate(model, rows[0][None], past_key_values=cache), generate(model, rows[0][None]))


@torch.no_grad()
def test_rows_are_repeated_chosen_and_cut(model, rows):
    tokens, mask = padded(rows, "left")
    cache = model(tokens, attention_mask=mask).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1, 6]))
    cache.crop(-2)
    more = torch.tensor([[5, 6], [7, 8]])
    ones = torch.nn.functional.pad(mask[[0, 3]][:, :-2], (0, 2), value=1)
    logits = model(more, attention_mask=ones, past_key_values=cache).logits
    for row, new, got in zip((rows[0], rows[3]), more, logits, strict=True):
        expected = model(torch.cat((row[:-2], new))[None]).logits[0, -2:]
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="crop cannot take 65 tokens of 41"):
        cache.crop(-65)
    # As older callers give it: the number that stays.
    cache.crop(50)
    assert cache.get_seq_length() == 41
    cache.crop(1)
    assert cache.get_seq_length() == 1
    with pytest.raises(ValueError, match="crop cannot take 2 tokens of 1"):
        cache.crop(-2)


@torch.no_grad()
def test_padding_on_the_right_is_cut_before_tokens(model, rows):
    rows = [rows[0], rows[3]]
    tokens, mask = padded(rows, "right")
    cache = model(tokens, attention_mask=mask).past_key_values
    # The first crop takes padding alone of the second row.
    cache.crop(-9)
    cache.crop(-11)
    kept = tokens.shape[1] - 20
    more = torch.tensor([[5, 6], [7, 8]])
    logits = model(more, past_key_values=cache).logits
    for row, new, got in zip(rows, more, logits, strict=True):
        expected = model(torch.cat((row[:kept], new))[None]).logits[0, -2:]
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_tokens_that_the_rings_have_lost_are_not_taken_back(model):
    """Each crop counts, until as many tokens have come."""
    tokens = random_tokens((1, 160), 64, torch.device("cpu"))
    cache = model(tokens).past_key_values
    for taken, new in ((40, 0), (24, 2), (2, 30)):
        length = cache.get_seq_length() - taken
        cache.crop(-taken)
        if new:
            got = model(tokens[:, length : length + new], past_key_values=cache).logits
            expected = model(tokens[:, : length + new], use_cache=False).logits[:, length:]
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="crop can take back 30 tokens, got 31"):
        cache.crop(-31)
    # Of the row that got the fewest.
    cache = model(tokens.expand(2, -1)).past_key_values
    cache.crop(-64)
    mask = torch.ones(2, 106, dtype=torch.int64)
    mask[1, 98:] = 0
    model(tokens[:, 96:106].expand(2, -1), attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="crop can take back 2 tokens, got 3"):
        cache.crop(-3)


@torch.no_grad()
def test_what_a_cache_cannot_is_refused_by_name(model, rows):
    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            generate(model, rows[0][None], **options)

    for name in ("static", "offloaded", "quantized"):
        refused(f"the cache_implementation '{name}' is not possible", cache_implementation=name)
    with pytest.raises(ValueError, match="static caches are not possible"):
        StaticCache(config=model.config, max_cache_len=64)
    # With the argument of that name, transformers asks PyTorch for a stream, which a GPU build has on a GPU alone.
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    refused("an offloaded cache is not possible", past_key_values=offloaded)
    with pytest.raises(ValueError, match=r"continuous batching .* is not possible"):
        model.generate_batch([[2, 3, 4]])
    refused(
        "must be a DynamicCache.*, got another Cache: .* prefix tuning",
        past_key_values=Cache([DynamicLayer(), DynamicLayer()]),
    )
    other = DynamicCache(config=TrifocalConfig.from_model_config(small_config(num_layers=3)))
    refused("past_key_values have 3 layers, the model 2", past_key_values=other)
    right, mask = padded(rows, "right")
    with pytest.raises(ValueError, match="of row 1: pad rows that are continued on the left"):
        generate(model, right, mask)

    cache = model(rows[0][None]).past_key_values
    one = torch.tensor([[5]])
    with pytest.raises(ValueError, match="position_ids must count on from the tokens in past_key_values"):
        model(one, past_key_values=cache, position_ids=torch.tensor([[7]]))
    with pytest.raises(ValueError, match="must hide the same earlier tokens"):
        mask = torch.ones(1, 42, dtype=torch.int64)
        mask[0, 0] = 0
        model(one, past_key_values=cache, attention_mask=mask)
    with pytest.raises(ValueError, match="past_key_values have 1 rows, the tokens 2"):
        model(one.expand(2, 1), past_key_values=cache)


@torch.no_grad()
def test_an_early_exit_is_refused_and_leaves_the_model_whole(model, rows):
    expected = generate(model, rows[0][None])
    with pytest.raises(ValueError, match="assistant_early_exit is not possible for Trifocal's models"):
        generate(model, rows[0][None], assistant_early_exit=1)
    assert model.config.num_hidden_layers == 2 and torch.equal(generate(model, rows[0][None]), expected)


@torch.no_grad()
def test_a_model_that_cannot_keep_a_cache_does_without(rows):
    """In every way of calling it: transformers' tools ask for a cache, or leave it to the model."""
    model, tokens = model_of(selection="random"), rows[0][None]
    decoder = model.to_decoder()
    for _ in range(NEW):
        tokens = torch.cat((tokens, decoder(tokens)[:, -1:].argmax(-1)), dim=1)
    for options in ({}, {"use_cache": True}):
        assert torch.equal(generate(model, rows[0][None], **options), tokens[:, -NEW:])
    assert torch.equal(model(tokens).logits, decoder(tokens))
    with pytest.raises(ValueError, match='selection "random" is a control for training'):
        model(tokens, use_cache=True)
