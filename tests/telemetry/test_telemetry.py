"""Telemetry against counting by hand, on a real model; on a GPU, the kernels' figures without a wait for them."""

import math
from dataclasses import replace

import pytest
import torch

from tests.devices import WIDE, needs_gpu
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Documents, Geometry, compressed_attention, mean_compress, select_blocks, select_blocks_by_index
from trifocal.ops.layout import pad_boundaries
from trifocal.runlog import read_metrics
from trifocal.runlog.metrics import MetricsWriter
from trifocal.telemetry.attention_picture import read_picture
from trifocal.telemetry.attention_telemetry import AttentionTelemetry, alarms_of
from trifocal.telemetry.maps import LayerAttention, full_attention_shares
from trifocal.telemetry.statistics import (
    choice_statistics,
    distance_bins,
    gate_statistics,
    selection_statistics,
)
from trifocal.testing.small_models import draw_keys_apart, small_config

GEOMETRY = Geometry(8, 4, 8, 4, num_initial_blocks=1, num_local_blocks=2, window_size=16)
LENGTH = 150  # 19 blocks, the last one short; far more than n


def layer_of(borders, *, by_index=False):
    generator = torch.Generator().manual_seed(5)
    q = 3 * torch.randn(1, LENGTH, 4, 8, generator=generator)
    k = torch.randn(1, LENGTH, 2, 8, generator=generator)
    cu_seqlens = None if borders is None else torch.tensor(borders)
    if by_index:
        chooser = (torch.randn(1, LENGTH, 2, 4, generator=generator), torch.randn(1, LENGTH, 4, generator=generator))
        selected = select_blocks_by_index(*chooser, GEOMETRY, cu_seqlens=cu_seqlens)
    else:
        chooser = (mean_compress(k, GEOMETRY, cu_seqlens=cu_seqlens),)
        _, lse = compressed_attention(q, *chooser, *chooser, GEOMETRY, cu_seqlens=cu_seqlens)
        selected = select_blocks(q, *chooser, lse, GEOMETRY, cu_seqlens=cu_seqlens)
    gates = torch.full((1, LENGTH, 4, 3), 0.5)
    return LayerAttention(gates, q, k, selected, chooser, GEOMETRY, documents_of(borders))


def documents_of(borders):
    return None if borders is None else Documents.from_cu_seqlens(torch.tensor(borders), LENGTH)


@pytest.mark.parametrize("borders", [None, [0, 5, 90, LENGTH]])
def test_selection_figures_equal_counting_by_hand(borders):
    selected = layer_of(borders).selected[0]
    figures = selection_statistics(selected, GEOMETRY, documents_of(borders))
    starts = [0] if borders is None else borders[:-1]
    bins = [0.0] * distance_bins(LENGTH, GEOMETRY)
    total = forced = free = local = queries = shared = compared = 0
    counts = [0] * 5
    # Tiles of neighbours in one document, whose first query has more than four candidates.
    tiles = {4: [], 8: [], 16: []}
    # Later ones of the 128 pairs of neighbours, of 149, that are compared.
    measured = {1 + round(pair * 148 / 127) for pair in range(128)}
    for t in range(LENGTH):
        position = t - max(start for start in starts if start <= t)
        own = position // 8
        for group in range(2):
            chosen = [block for block in selected[t, group].tolist() if block >= 0]
            queries += 1
            counts[len(chosen)] += 1
            for number, found in tiles.items():
                whole = t + number <= LENGTH and not any(t < start < t + number for start in starts)
                if t % number == 0 and whole and own + 1 > 4:
                    found.append(len({*selected[t : t + number, group].flatten().tolist()} - {-1}))
            for block in chosen:
                distance = own - block
                bins[0 if distance == 0 else 1 + int(math.log2(distance))] += 1
                total += 1
                is_forced = block < 1 or block > own - 2
                forced += is_forced
                if not is_forced and own + 1 > 4:
                    free += 1
                    local += position - 8 * block < 16
            if t in measured and position > 0:
                before = selected[t - 1, group].tolist()
                shared += sum(block in before for block in chosen)
                compared += len(chosen)
    assert figures["selected_distance_shares"].tolist() == pytest.approx([count / total for count in bins])
    assert figures["selected_forced_share"].item() == pytest.approx(forced / total)
    assert figures["free_local_share"].item() == pytest.approx(local / free)
    assert figures["selected_count_shares"].tolist() == pytest.approx([count / queries for count in counts])
    assert figures["fewer_than_n_share"].item() == pytest.approx(sum(counts[:4]) / queries)
    assert figures["neighbour_overlap"].item() == pytest.approx(shared / compared)
    together = [sum(found) / len(found) / 4 for found in tiles.values()]
    assert figures["blocks_of_neighbours"].tolist() == pytest.approx(together)
    assert 1 < together[0] < together[1] < together[2]


def test_no_neighbours_have_no_blocks_together():
    selected = layer_of(None).selected[:, :5]
    figures = selection_statistics(selected, GEOMETRY, None)["blocks_of_neighbours"]
    assert figures.shape == (1, 3) and figures.isnan().all(), "five queries, none of which has a choice"


@pytest.mark.parametrize("by_index", [False, True], ids=["compressed", "index"])
@pytest.mark.parametrize("kind", ["whole", "packed", "padded"])
def test_recall_of_the_choice_equals_a_loop_over_tokens(kind, by_index):
    borders = None if kind == "whole" else [0, 5, 90, 148, 149, LENGTH]
    layer = layer_of(borders, by_index=by_index)
    if kind == "padded":
        padded = pad_boundaries(torch.tensor(borders), LENGTH)
        layer = replace(layer, documents=Documents.from_checked(padded, LENGTH))
    starts = [0] if borders is None else borders[:-1]
    recalls, chances = [], []
    exact, held = [0.0] * 6, [0.0] * 6
    for t in torch.linspace(0, LENGTH - 1, 128).round().long().tolist():
        start = max(border for border in starts if border <= t)
        own = (t - start) // 8
        # One place of four is free: the first block and the last two are forced.
        free = range(1, own - 1)
        if len(free) < 2:
            continue
        for group in range(2):
            mass = [0.0] * (own + 1)
            for head in (2 * group, 2 * group + 1):
                scores = layer.k_slc[0, start : t + 1, group].double() @ layer.q[0, t, head].double() * 8**-0.5
                for s, share in enumerate(scores.softmax(0).tolist()):
                    mass[s // 8] += share / 2
            chosen = [block for block in layer.selected[0, t, group].tolist() if block in free]
            best = max(free, key=lambda block: mass[block])
            assert len(chosen) == 1
            recalls.append(mass[chosen[0]] / mass[best])
            chances.append(sum(mass[block] for block in free) / len(free) / mass[best])
            for bins, block in ((exact, best), (held, chosen[0])):
                bins[1 + int(math.log2(own - block))] += mass[block] / mass[best]
    figures = {name: value[0].tolist() for name, value in choice_statistics(layer).items()}
    assert figures["choice_recall"] == pytest.approx(sum(recalls) / len(recalls), rel=1e-5)
    assert figures["recall_by_chance"] == pytest.approx(sum(chances) / len(chances), rel=1e-5)
    assert figures["exact_mass_by_distance"] == pytest.approx([mass / len(recalls) for mass in exact], abs=1e-6)
    assert figures["held_mass_by_distance"] == pytest.approx([mass / len(recalls) for mass in held], abs=1e-6)
    assert sum(figures["exact_mass_by_distance"]) == pytest.approx(1, abs=1e-5)
    assert by_index or figures["recall_by_chance"] < figures["choice_recall"] < 1.0


def test_the_exact_choice_finds_everything_and_forced_blocks_count_for_nothing():
    layer = layer_of(None)
    mass = full_attention_shares(layer, torch.arange(LENGTH))
    assert torch.allclose(mass.sum(-1), torch.ones(1, LENGTH, 2))
    own = torch.arange(LENGTH)[:, None, None] // 8
    block = torch.arange(19)
    free = mass.masked_fill((block < 1) | (block > own - 2), -1)
    exact = torch.cat([torch.zeros_like(layer.selected[..., :3]), free.argmax(-1, keepdim=True)], -1)
    assert choice_statistics(replace(layer, selected=exact))["choice_recall"].item() == pytest.approx(1, abs=1e-6)
    forced = torch.cat([torch.zeros_like(exact[..., :2]), (own - 1).expand(1, -1, 2, 1), own.expand(1, -1, 2, 1)], -1)
    assert choice_statistics(replace(layer, selected=forced))["choice_recall"].item() == 0.0
    wide = replace(layer, geometry=replace(GEOMETRY, num_selected_blocks=19))
    assert all(value.isnan().all() for value in choice_statistics(wide).values())


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_are_seen():
    model, tokens = model_of(), torch.arange(LENGTH)[None] % 64
    rows = AttentionTelemetry(model).measure(tokens)
    for block in model.blocks:
        block.compile(backend="eager")
    model(tokens, tokens).backward()
    assert AttentionTelemetry(model).measure(tokens) == rows


def test_few_queries_stand_for_a_long_sequence():
    layer = layer_of(None)
    assert layer.sampled_queries().tolist()[-1] == LENGTH - 1 and len(layer.sampled_queries()) == 128
    long = replace(layer, q=torch.empty(1, 65536, 64, 1, device="meta"))
    assert len(long.sampled_queries()) == 16


def test_gate_figures():
    gates = torch.full((10, 4, 3), 0.5)
    gates[:, 0, 0] = 0.0
    gates[:, 1, 1] = torch.linspace(0, 1, 10)
    figures = {name: value.item() for name, value in gate_statistics(gates).items()}
    assert figures["gate_mean_cmp"] == pytest.approx(0.375)
    assert figures["gate_entropy_win"] == pytest.approx(math.log(2))
    assert figures["gate_entropy_cmp"] == pytest.approx(0.75 * math.log(2))
    assert figures["gate_share_win"] == pytest.approx((gates[..., 2] / gates.sum(-1)).double().mean().item(), rel=1e-5)
    assert sum(figures[f"gate_share_{branch}"] for branch in ("cmp", "slc", "win")) == pytest.approx(1)


def model_of(**changes):
    model = DecoderLM(small_config(num_layers=3, value_dim=8, geometry=GEOMETRY, **changes))
    model.init_weights(3)
    draw_keys_apart(model)
    return model


@pytest.mark.parametrize("attention", ["nsa", "selected"])
def test_every_chooser_is_measured(attention):
    tokens = torch.arange(LENGTH).view(1, LENGTH) % 64
    recalls = {}
    for chooser, changes in (("compressed", {}), ("index", {"chooser": "index"}), ("exact", {"selection": "exact"})):
        telemetry = AttentionTelemetry(model_of(attention=attention, **changes))
        recalls[chooser] = [row["choice_recall"] for row in telemetry.measure(tokens)]
        picture = telemetry.picture(1, tokens, ["a"] * LENGTH)
        assert ((picture.importance / 255.0) ** 2).sum(-1)[:, 16:] == pytest.approx(1, abs=0.1)
        assert (picture.importance == picture.dense).all() == (chooser == "exact")
    assert recalls["exact"] == pytest.approx([1, 1, 1], abs=1e-4)
    assert all(0 < recall < 1 for recall in recalls["compressed"] + recalls["index"])


def test_measuring_leaves_the_model_and_its_training_as_they_were():
    tokens = torch.arange(LENGTH).view(1, LENGTH) % 64
    model, twin = model_of(), model_of()
    telemetry = AttentionTelemetry(model)
    telemetry.measure(tokens)
    model.set_activation_checkpointing(0, 3)
    for each in (model, twin):
        each(tokens, tokens).backward()
    telemetry.measure(tokens)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("changes", [{"attention": "dense"}, {"attention": "window"}, {"selection": "random"}], ids=str)
def test_a_model_that_chooses_no_blocks_has_none(changes):
    assert AttentionTelemetry(model_of(**changes)).measure(torch.zeros(1, 8, dtype=torch.long)) == []


def test_layers_without_choice_are_left_out_and_those_without_gates_have_no_figures_of_them(tmp_path):
    layers = {"layer_types": ("window", "nsa", "selected"), "sliding_window": 9}
    model = model_of(**layers, norm_after=True, qk_norm=True, qk_norm_all_heads=True)
    telemetry = AttentionTelemetry(model)
    tokens = torch.arange(LENGTH)[None] % 64
    nsa, selected = telemetry.measure(tokens)
    assert (nsa["layer"], selected["layer"]) == (1, 2)
    assert selected.keys() == nsa.keys()
    assert [name for name in selected if selected[name] is None] == [
        name for name in selected if name.startswith(("gate_", "free_local"))
    ]
    assert 0 < selected["choice_recall"] <= 1 and None not in nsa.values()
    assert not list(alarms_of(selected))
    picture = telemetry.picture(1, tokens, ["a"] * LENGTH)
    assert (picture.layers, picture.others) == ([1, 2], [[0, 9]])
    assert (picture.gates[1] == [0, 255, 0]).all() and (picture.gates[0] > 0).all()
    picture.save(tmp_path / "attention" / "picture.npz")
    assert read_picture(tmp_path / "attention" / "picture.npz").layers == [1, 2]


def test_alarms_are_events_once_and_end(tmp_path):
    model = model_of()
    tokens = torch.arange(LENGTH).view(1, LENGTH) % 64
    telemetry = AttentionTelemetry(model)
    gate = telemetry.layers[1].gate.proj
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        telemetry.log(metrics, 10, tokens)
        with torch.no_grad():
            gate.bias.view(4, 3)[:, 2] = -20.0
        telemetry.log(metrics, 20, tokens)
        telemetry.log(metrics, 30, tokens)
        with torch.no_grad():
            gate.bias.zero_()
        telemetry.log(metrics, 40, tokens)
    events = read_metrics(tmp_path / "metrics.jsonl", "event")
    assert [(event["step"], event["name"], event["layer"]) for event in events] == [
        (20, "gate_closed", 1),
        (40, "gate_closed_over", 1),
    ]
    assert events[0]["severity"] == "warning" and events[0]["branch"] == "win"
    assert len(read_metrics(tmp_path / "metrics.jsonl", "telemetry")) == 12


def test_gates_that_are_no_numbers_raise_nothing(tmp_path):
    """The update before the look may have been one too far; the loss tells so, the look must not end the run first."""
    telemetry = AttentionTelemetry(model_of())
    with torch.no_grad():
        telemetry.layers[1].gate.proj.bias.fill_(math.nan)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        telemetry.log(metrics, 10, torch.arange(LENGTH).view(1, LENGTH) % 64)
    rows = read_metrics(tmp_path / "metrics.jsonl", "telemetry")
    assert rows[1]["gate_mean_cmp"] is None
    assert read_metrics(tmp_path / "metrics.jsonl", "event") == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, None),
        ({"gate_mean_cmp": 0.01, "gate_entropy_cmp": 0.01}, "gate_closed"),
        ({"gate_mean_slc": 0.99, "gate_entropy_slc": 0.01}, "gate_saturated"),
        ({"free_local_share": 0.99}, "choices_local"),
    ],
)
def test_every_alarm_has_its_threshold(change, name):
    row = {"layer": 0, "free_local_share": 0.5}
    for branch in ("cmp", "slc", "win"):
        row |= {f"gate_mean_{branch}": 0.5, f"gate_entropy_{branch}": 0.6}
    assert [key[0] for key, _ in alarms_of(row | change)] == [name] * (name is not None)


GPU_LENGTH = 2048


def gpu_telemetry(backend):
    config = ModelConfig(vocab_size=257, num_layers=2, geometry=Geometry(), backend=backend, **WIDE)
    model = DecoderLM(config).cuda()
    model.init_weights(0)
    return AttentionTelemetry(model)


def gpu_tokens():
    return torch.randint(257, (2, GPU_LENGTH), generator=torch.Generator().manual_seed(0)).cuda()


@needs_gpu
# PyTorch warns that this mode of it is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("borders", [None, [0, 700, 3000, 2 * GPU_LENGTH]])
def test_no_figure_makes_the_host_wait(borders):
    telemetry, tokens = gpu_telemetry("triton"), gpu_tokens()
    cu_seqlens = None if borders is None else torch.tensor(borders)
    with torch.autocast("cuda", torch.bfloat16):
        # The first call compiles kernels and fills caches.
        telemetry.figures(tokens, cu_seqlens=cu_seqlens)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            figures = telemetry.figures(tokens, cu_seqlens=cu_seqlens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(value.is_cuda for value in figures.values())


@needs_gpu
def test_kernels_and_reference_give_the_same_figures():
    tokens = gpu_tokens()
    for mine, other in zip(
        gpu_telemetry("triton").measure(tokens), gpu_telemetry("reference").measure(tokens), strict=True
    ):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            # Two blocks of equal importance may change places.
            assert value == pytest.approx(other[name], abs=0.02), name


@needs_gpu
def test_a_picture_of_the_kernels_choice():
    tokens = gpu_tokens()
    picture = gpu_telemetry("triton").picture(1, tokens, ["x"] * GPU_LENGTH)
    blocks = GPU_LENGTH // 64
    assert picture.importance.shape == (2, 128, 2, blocks)
    total = ((picture.dense / 255.0) ** 2).sum(-1)
    assert abs(total - 1).max() < 0.1
    assert (picture.selected[:, -1].max(-1) == blocks - 1).all()
