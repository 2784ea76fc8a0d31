"""Every feature with every attention: what one has, all have, or it is refused in a line.

Gradients of packed documents, checkpointing and single formulas of counts are in tests/models, with the same layers;
recorded steps are in tests/train/step.
"""

import functools
from dataclasses import replace

import pytest
import torch

from tests.attentions import ATTENTIONS
from tests.distributed import context_worker
from trifocal.inference import CachedModel, Engine, Request, Sampling
from trifocal.inference.prompt_lookup import PromptLookup
from trifocal.models import DecoderLM, flops_per_token, load_weights, save_weights
from trifocal.models.conversion import convert_tensors, converted_config
from trifocal.report.picture import picture_card
from trifocal.telemetry.attention_telemetry import AttentionTelemetry
from trifocal.testing.small_models import make_model, random_tokens, small_config

CPU = torch.device("cpu")
NEW = 12
each = pytest.mark.parametrize("attention", ATTENTIONS)


@functools.cache
def model_of(attention):
    """In float64, so that another order of a sum is told from another result."""
    return make_model(small_config(**ATTENTIONS[attention]), CPU, torch.float64)


@functools.cache
def prompts():
    """Three that begin with the same tokens, again and again the same few ones, which are easy to guess."""
    begin = random_tokens((6,), 64, CPU).tolist() * 5
    return [[*begin, number, *begin[: 3 * number]] for number in range(3)]


@functools.cache
@torch.no_grad()
def greedy(attention):
    """The likeliest tokens behind each prompt, every sequence computed from its start for every token."""
    found = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(model_of(attention)(torch.tensor([tokens]))[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def completions(attention, numbers, speculate=False, **sizes):
    sizes = {"max_sequences": 3, "max_length": 90, "page_size": 8, "prefill_chunk_size": 16} | sizes
    engine = Engine(CachedModel(model_of(attention), **sizes), speculate=speculate)
    sampling = Sampling(temperature=0)
    requests = [Request(prompt=prompts()[n], max_new_tokens=NEW, sampling=sampling) for n in numbers]
    return engine, engine.complete(requests)


@each
def test_decoding_paged_caches_and_company(attention):
    """Bits do not depend on the batch, nor on pages so few that sequences leave and come back."""
    alone = [completions(attention, [number])[1][0] for number in range(3)]
    assert [one.tokens for one in alone] == greedy(attention)
    _, together = completions(attention, [0, 1, 2], num_pages=14)
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.log_probabilities) == (other.tokens, other.log_probabilities)


@each
def test_prefix_cache_and_speculation(attention, monkeypatch):
    """A window reads of a prefix what its ring kept, and of a guess that was wrong nothing."""
    engine, _ = completions(attention, [0], spare_rows=2)
    for number in (1, 2, 0):
        [again] = engine.complete(
            [Request(prompt=prompts()[number], max_new_tokens=NEW, sampling=Sampling(temperature=0))]
        )
        assert again.tokens == greedy(attention)[number] and again.reused_tokens >= 16
    texts = [prompt + new for prompt, new in zip(prompts(), greedy(attention), strict=True)]

    def guess(lookup, most):
        """What will come, at every second place with a wrong token at the end."""
        size = len(lookup._tokens)
        [text] = [text for text in texts if text[:size] == lookup._tokens]
        draft = text[size : size + most]
        return [*draft[:-1], (draft[-1] + 1) % 64] if draft and size % 2 else draft

    monkeypatch.setattr(PromptLookup, "guess", guess)
    guessing, found = completions(attention, [0, 1, 2], speculate=True)
    assert [one.tokens for one in found] == greedy(attention)
    assert guessing.guessed_tokens > guessing.right_tokens > 0


@each
def test_telemetry_and_the_picture_have_the_layers(attention):
    """Figures of those that choose blocks; in the picture the others too."""
    telemetry, tokens = AttentionTelemetry(model_of(attention)), random_tokens((1, 60), 64, CPU)
    kinds = model_of(attention).config.attention_of_layers
    choosing = [number for number, kind in enumerate(kinds) if kind in ("nsa", "selected")]
    assert [row["layer"] for row in telemetry.measure(tokens)] == choosing
    if not choosing:
        return
    picture = telemetry.picture(1, tokens, ["a"] * 60)
    windows = {number: 7 if kind == "window" else 0 for number, kind in enumerate(kinds) if number not in choosing}
    assert (picture.layers, dict(picture.others)) == (choosing, windows)
    layers = picture_card([picture]).partition('class="layer"')[2].partition("</select>")[0]
    assert layers.count("<option") == len(kinds)


# The layers of a model without selected blocks, and what it is converted to: no target is without some, so models
# of windows stay what they are.
CONVERTED = {
    "nsa": ("dense", "nsa"), "selected": ("dense", "selected"), "window": ("window", "selected"),
    "dense": ("dense", "dense"), "mix": ("dense", "mix"), "mix-unrotated": ("dense", "mix"),
    "mix-dense": ("mix-dense", "dense"),
}  # fmt: skip


@each
@torch.no_grad()
def test_conversion(attention):
    """Where the blocks cover everything, a converted model computes what the dense one does; three branches never."""
    source, target = CONVERTED[attention]
    changes = {name: getattr(model_of(attention).config, name) for name in ("num_layers", "unrotated_layers")}
    before = make_model(small_config(**(ATTENTIONS[source] | changes)), CPU, torch.float64)
    chooser = "compressed" if target == "dense" else model_of(attention).config.chooser
    window = 7 if source != "dense" else 70
    geometry = replace(small_config().geometry, num_selected_blocks=9, window_size=window)
    config = converted_config(before.config, target, geometry, chooser=chooser)
    assert config.attention_of_layers == model_of(attention).config.attention_of_layers
    assert config.unrotated_layers == changes["unrotated_layers"]
    after = DecoderLM(config).double()
    after.load_state_dict(convert_tensors(before.state_dict(), config))
    tokens = random_tokens((1, 70), 64, CPU)
    if target != "nsa":
        torch.testing.assert_close(after(tokens), before(tokens), rtol=0, atol=1e-9)


@each
@torch.no_grad()
def test_packed_documents(attention):
    """One longer than a window and all chosen blocks, one of a token."""
    tokens, lengths = random_tokens((1, 70), 64, CPU), (45, 1, 24)
    packed = model_of(attention)(tokens, cu_seqlens=torch.tensor([0, 45, 46, 70]))
    alone = torch.cat([model_of(attention)(document) for document in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-9)


@each
def test_export_and_transformers(attention, tmp_path):
    """A folder is the model again, and generates with transformers' caches."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("trifocal.hf")
    save_weights(model_of(attention), tmp_path)
    config = load_weights(tmp_path).config
    assert config.attention_of_layers == model_of(attention).config.attention_of_layers
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for prompt, expected in zip(prompts(), greedy(attention), strict=True):
        tokens, options = torch.tensor([prompt]), {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **options)
        assert found[0, len(prompt) :].tolist() == expected


@each
def test_counts_are_those_of_the_layers(attention):
    """A model's operations are the sum of its layers', an index only where one chooses; and the output's."""
    config = model_of(attention).config
    of_layers = [
        flops_per_token(small_config(num_layers=1, attention=kind, chooser=config.chooser), 70)
        for kind in config.attention_of_layers
    ]
    output = 2 * config.dim * config.vocab_size
    found = flops_per_token(config, 70)
    for name, times in (("executed_forward", 1), ("executed_training", 3), ("dense_equivalent_training", 3)):
        expected = sum(getattr(layer, name) - times * output for layer in of_layers) + times * output
        assert getattr(found, name) == pytest.approx(expected, rel=1e-12)


def test_rows_in_other_files_have_every_column():
    """Context parallelism knows layers, not models: each kind, and each beside another."""
    kinds = {kind for changes in context_worker.MODELS.values() for kind in small_config(**changes).attention_of_layers}
    assert kinds == {"nsa", "selected", "window", "dense"}
    assert {"window, dense", "window, selected, index"} <= context_worker.MODELS.keys()
