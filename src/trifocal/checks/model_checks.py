"""Checks of the model: gradients with checkpointing, no look ahead, decoding, a gradient for every parameter."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trifocal.checks.measurement import Measurement, largest
from trifocal.inference import CachedModel
from trifocal.models import DecoderLM, ModelConfig
from trifocal.models.choice_teaching import ChoiceTeaching, eligible_queries
from trifocal.ops import Geometry
from trifocal.testing.small_models import MINIMAL, MIX, make_model, minimal_config, random_tokens, small_config
from trifocal.testing.tolerances import FULL_COVERAGE, error

# The types of layers that no other model has, with all that dense models have.
MIXED: dict[str, Any] = {
    "layer_types": ("selected", "window"),
    **dict.fromkeys(("qk_norm", "qkv_bias", "o_bias", "mlp_bias"), True),
}
# These norms are not joined with products.
NORMS_AFTER: dict[str, Any] = dict.fromkeys(("norm_after", "qk_norm", "qk_norm_all_heads"), True)


def checkpointing(device: torch.device) -> Measurement:
    """Recomputing activations changes no gradient, of any parameter.

    Bound: the same operations on the same numbers give the same bits where they run in one order; eight roundings of
    float32 are left to devices that add up in any.
    """
    config = minimal_config(4)
    tokens = random_tokens((2, 128), config.vocab_size, device)
    gradients = []
    for recompute in (False, True):
        model = make_model(config, device, torch.float32)
        if recompute:
            model.set_activation_checkpointing(0, config.num_layers)
        model(tokens, tokens.roll(-1, 1)).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    found = {name: _relative_difference(gradients[1][name], gradient) for name, gradient in gradients[0].items()}
    return largest(found, 8 * torch.finfo(torch.float32).eps, "difference")


def index_in_any_loop(device: torch.device) -> Measurement:
    """In a training loop of anybody's an index gets the gradient of the trainer's loss of the choice, in float64.

    On the same queries; the rest of the model gets what it gets without that loss. Bound: as of full coverage.
    """
    geometry = Geometry(4, 2, 8, 4, 1, 1, 16)
    config = small_config(layer_types=("selected", "nsa"), chooser="index", geometry=geometry)
    tokens = random_tokens((2, 97), config.vocab_size, device)
    model = make_model(config, device, torch.float64)
    for layer in model.attention_layers():
        # Every query: nothing is left to chance.
        layer.choice_loss_stretch = 1  # type: ignore[assignment]
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    counts = (
        torch.tensor(eligible_queries(config, tokens[:, :-1].cpu(), None, 1, 1), device=device) * config.num_kv_heads
    )
    totals = torch.zeros(config.num_layers, 2, dtype=torch.float64, device=device)
    teaching = ChoiceTeaching(torch.ones((), dtype=torch.int64, device=device), 1 / counts, totals, 96, 1)
    model(tokens[:, :-1], tokens[:, 1:], teaching=teaching).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    differences = {name: _relative_difference(found[name], gradient) for name, gradient in expected.items()}
    return largest(differences, FULL_COVERAGE[torch.float64], "difference")


def _relative_difference(actual: Tensor | None, exact: Tensor | None) -> float:
    if actual is None or exact is None:
        return float("inf")
    size = exact.abs().max().item()
    return (actual - exact).abs().max().item() / size if size else float("inf")


def future_leak(device: torch.device) -> Measurement:
    """Another token at position t changes no logit before t: in training, packed, in prefill and in decoding.

    For three branches and for the mix; for every t at once, with caches for every fifth: row t of a batch gets another
    token at t. The figure counts the logits before it that moved by a single bit. Bound: none.
    """
    moved: dict[str, int] = {}
    alive = True
    for model_name, changes in (("nsa", {}), ("the mix", MIX)):
        config = small_config(**changes)
        model = make_model(config, device, torch.float32)
        leaks, own_moved = _leaks(model, config, device)
        leaks["packed documents"] = _packed_leaks(model, config, device)
        moved |= {f"{model_name}, {name}": count for name, count in leaks.items()}
        alive &= own_moved
    if not alive:
        return Measurement(float("inf"), 0, "logits", ("a token's own logits did not move: not a model",))
    details = [f"{name}: {count}" for name, count in moved.items()]
    return Measurement(sum(moved.values()), 0, "logits", tuple(details))


def _leaks(model: DecoderLM, config: ModelConfig, device: torch.device) -> tuple[dict[str, int], bool]:
    """Logits that move before the changed token, in training, prefill and decoding; whether its own moved each time."""
    length, moved, alive = 40, {}, True
    tokens = random_tokens((1, length), config.vocab_size, device).expand(length, -1)
    changed = tokens.clone()
    changed.diagonal().copy_((tokens.diagonal() + 1) % config.vocab_size)
    # Row t, position s: outputs that may not change.
    before = torch.ones(length, length, dtype=torch.bool, device=device).tril(-1)
    for name, every, logits in (
        ("training", 1, lambda x: model(x)),
        ("prefill in chunks", 5, lambda x: _decoded(model, x, length, chunk=7)),
        ("decoding, 3 tokens a step", 5, lambda x: _decoded(model, x, 1, step=3)),
    ):
        with torch.no_grad():
            difference = (logits(tokens[1::every]) != logits(changed[1::every])).any(-1)
        moved[name] = int((difference & before[1::every]).sum())
        own = torch.eye(length, dtype=torch.bool, device=device)[1::every]
        alive &= bool(difference[own].all())
    return moved, alive


def _packed_leaks(model: DecoderLM, config: ModelConfig, device: torch.device) -> int:
    """Logits that move though the changed token lies behind them or in another document."""
    lengths = (11, 1, 3, 16, 9)
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    total = int(boundaries[-1])
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    tokens = random_tokens((1, total), config.vocab_size, device)
    leaks = 0
    with torch.no_grad():
        before = model(tokens, cu_seqlens=boundaries)
        for position in range(total):
            changed = tokens.clone()
            changed[0, position] = (tokens[0, position] + 1) % config.vocab_size
            moved = (model(changed, cu_seqlens=boundaries) != before).any(-1)[0]
            may_move = (documents == documents[position]) & (torch.arange(total, device=device) >= position)
            leaks += int((moved & ~may_move).sum())
    return leaks


def _decoded(model: DecoderLM, tokens: Tensor, prefill: int, *, chunk: int = 0, step: int = 1) -> Tensor:
    """Logits of a batch whose first tokens are prefilled in chunks, and whose others are decoded some at a time."""
    batch, length = tokens.shape
    cached = CachedModel(model, max_sequences=batch, max_length=length, prefill_chunk_size=chunk or length)
    sequences = [cached.admit() for _ in range(batch)]
    prompts = zip(sequences, tokens[:, :prefill], strict=True)
    parts = [torch.stack([cached.prefill(sequence, prompt, all_logits=True) for sequence, prompt in prompts])]
    if prefill < length:
        parts += [cached.decode(sequences, new) for new in tokens[:, prefill:].split(step, 1)]
    return torch.cat(parts, 1)


def decode(device: torch.device) -> Measurement:
    """Decoding token by token after a prefill of any length gives the logits of one whole pass, for all layers.

    Prefills of every length from 1 to three times the larger of selection block and window, three tokens decoded
    after each; one sequence decoded from its second token to its last, one at a time and three at a time; one
    prefilled in chunks. In float64. Bound: each layer may add the error that full coverage allows to one attention.
    """
    found = {}
    for name, changes in (("nsa", {}), ("dense", {"attention": "dense"}), ("mixed", MIXED), ("the mix", MIX)):
        config = small_config(**changes)
        model = make_model(config, device, torch.float64)
        longest = 3 * max(config.geometry.selection_block_size, config.geometry.window_size)
        tokens = random_tokens((2, longest + 3), config.vocab_size, device)
        with torch.no_grad():
            whole = model(tokens)
        found[f"{name}, token by token"] = error(_decoded(model, tokens, 1), whole)
        found[f"{name}, three tokens at a time"] = error(_decoded(model, tokens, 1, step=3), whole)
        found[f"{name}, chunks of 5"] = error(_decoded(model, tokens, longest + 3, chunk=5), whole)
        for prefill in range(1, longest + 1):
            part = slice(prefill + 3)
            decoded = _decoded(model, tokens[:, part], prefill)
            found[f"{name}, prefill of {prefill}"] = error(decoded, whole[:, part])
    return largest(found, 2 * FULL_COVERAGE[torch.float64], "error")


def batch_invariance(device: torch.device) -> Measurement:
    """A sequence decoded by itself and in a batch gives the same bits, for four models.

    Five sequences of other lengths, decoded one by one and then together, in fp32 by the code that `auto` chooses here.
    The figure counts the logits that differ by a single bit. Bound: none.
    """
    differ, details = 0, []
    # Fewer blocks than the sequences have, so that some are chosen.
    geometry = replace(MINIMAL, num_selected_blocks=3, num_local_blocks=1)
    models = {"nsa": {}, "dense": {"attention": "dense"}, "norms behind": NORMS_AFTER, "the mix": MIX}
    for name, changes in models.items():
        config = small_config(**changes, geometry=geometry)
        model = make_model(config, device, torch.float32)
        lengths = (3, 17, 40, 64, 111)
        tokens = random_tokens((len(lengths), max(lengths) + 8), config.vocab_size, device)
        found = []
        for company in ([[0], [1], [2], [3], [4]], [[4, 2, 0, 3, 1]]):
            logits: dict[int, Tensor] = {}
            for members in company:
                cached = CachedModel(model, max_sequences=len(members), max_length=tokens.shape[1])
                sequences = [cached.admit() for _ in members]
                for i, sequence in zip(members, sequences, strict=True):
                    cached.prefill(sequence, tokens[i, : lengths[i]])
                new = torch.stack([tokens[i, lengths[i] : lengths[i] + 8] for i in members])
                steps = torch.cat([cached.decode(sequences, column) for column in new.split(1, 1)], 1)
                logits.update(zip(members, steps, strict=True))
            found.append(torch.stack([logits[i] for i in range(len(lengths))]))
        count = int((found[0] != found[1]).sum())
        differ += count
        details.append(f"{name}: {count}")
    return Measurement(differ, 0, "logits", tuple(details))


def parameter_gradients(device: torch.device) -> Measurement:
    """Every parameter gets a gradient in every step, also when a branch sees nothing; in ordinary steps none is zero.

    The figure counts parameters without, or in ordinary steps with nothing but zeros. Bound: none.
    """
    without, details = 0, []
    for changes in ({}, {"compressor": "mlp"}, {"shared_kv": True, "tie_embeddings": True}, MIXED):
        config = small_config(**changes)
        boundaries = {
            "ordinary": (40, None),
            "a sequence shorter than a block": (3, None),
            "documents of one token": (6, torch.arange(7)),
        }
        for kind, (length, cu_seqlens) in boundaries.items():
            model = make_model(config, device, torch.float32)
            tokens = random_tokens((1, length), config.vocab_size, device)
            model(tokens, tokens.roll(-1, 1), cu_seqlens=cu_seqlens).backward()
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                if gradient is None or not gradient.isfinite().all() or (kind == "ordinary" and not gradient.any()):
                    without += 1
                    details.append(f"{name}, {kind}")
    return Measurement(without, 0, "parameters", tuple(details[:4]))
