"""Telemetry against counting by hand, on a real model."""

import math
from pathlib import Path

import pytest
import torch

from trifocal.diagnostics import MetricsWriter, read_metrics
from trifocal.diagnostics.attention_statistics import (
    distance_bins,
    gate_statistics,
    importance_covered,
    selection_statistics,
)
from trifocal.diagnostics.telemetry import AttentionTelemetry, alarms_of
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops import Documents, Geometry, compressed_attention, mean_compress, select_blocks

GEOMETRY = Geometry(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=4,
    num_initial_blocks=1,
    num_local_blocks=2,
    window_size=16,
)
LENGTH = 150  # 19 blocks, the last one short; far more than n


def choice(borders: list[int] | None) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    q = 3 * torch.randn(1, LENGTH, 4, 8, generator=generator)
    k = torch.randn(1, LENGTH, 2, 8, generator=generator)
    cu_seqlens = None if borders is None else torch.tensor(borders)
    k_cmp = mean_compress(k, GEOMETRY, cu_seqlens=cu_seqlens)
    _, lse = compressed_attention(q, k_cmp, k_cmp, GEOMETRY, cu_seqlens=cu_seqlens)
    return q[0], k_cmp[0], lse[0], select_blocks(q, k_cmp, lse, GEOMETRY, cu_seqlens=cu_seqlens)[0]


def documents_of(borders: list[int] | None) -> Documents | None:
    return None if borders is None else Documents.from_cu_seqlens(torch.tensor(borders), LENGTH)


@pytest.mark.parametrize("borders", [None, [0, 5, 90, LENGTH]])
def test_selection_figures_equal_counting_by_hand(borders: list[int] | None) -> None:
    *_, selected = choice(borders)
    figures = selection_statistics(selected, GEOMETRY, documents_of(borders))
    starts = [0] if borders is None else borders[:-1]
    bins = [0.0] * distance_bins(LENGTH, GEOMETRY)
    total = forced = free = local = fewer = queries = shared = compared = 0
    blocks: dict[int, int] = {}
    for t in range(LENGTH):
        position = t - max(start for start in starts if start <= t)
        own = position // 8
        for group in range(2):
            chosen = [block for block in selected[t, group].tolist() if block >= 0]
            queries += 1
            fewer += len(chosen) < 4
            for block in chosen:
                distance = own - block
                bins[0 if distance == 0 else 1 + int(math.log2(distance))] += 1
                total += 1
                blocks[block] = blocks.get(block, 0) + 1
                is_forced = block < 1 or block > own - 2
                forced += is_forced
                if not is_forced and own + 1 > 4:
                    free += 1
                    local += position - 8 * block < 16
            if t > 0 and position > 0:
                before = selected[t - 1, group].tolist()
                shared += sum(block in before for block in chosen)
                compared += len(chosen)
    assert figures["selected_distance_shares"].tolist() == pytest.approx([count / total for count in bins])
    assert figures["selected_forced_share"].item() == pytest.approx(forced / total)
    assert figures["free_local_share"].item() == pytest.approx(local / free)
    assert figures["fewer_than_n_share"].item() == pytest.approx(fewer / queries)
    entropy = -sum(count / total * math.log(count / total) for count in blocks.values())
    assert figures["selected_block_entropy"].item() == pytest.approx(entropy, rel=1e-5)
    # Measured at 128 of the 149 pairs.
    assert figures["neighbour_overlap"].item() == pytest.approx(shared / compared, abs=0.05)


@pytest.mark.parametrize("borders", [None, [0, 5, 90, LENGTH]])
def test_covered_importance_is_everything_when_everything_is_chosen(borders: list[int] | None) -> None:
    q, k_cmp, lse, _ = choice(borders)
    everything = torch.arange(19, dtype=torch.int32).expand(LENGTH, 2, 19)
    covered = importance_covered(q, k_cmp, lse, everything, GEOMETRY, 8**-0.5, documents_of(borders))
    assert covered.item() == pytest.approx(1.0, abs=1e-5)
    nothing = torch.full((LENGTH, 2, 4), -1, dtype=torch.int32)
    assert importance_covered(q, k_cmp, lse, nothing, GEOMETRY, 8**-0.5, documents_of(borders)).item() == 0.0


def test_covered_importance_equals_the_sum_by_hand() -> None:
    q, k_cmp, lse, selected = choice(None)
    sample = torch.linspace(0, LENGTH - 1, 128).round().long().tolist()
    shares = []
    for t in sample:
        for group in range(2):
            importance = [0.0] * 19
            for block in range(k_cmp.shape[0]):
                if 4 * block + 7 > t:
                    continue
                for head in (2 * group, 2 * group + 1):
                    score = (q[t, head] @ k_cmp[block, group]).item() * 8**-0.5
                    p = math.exp(score - lse[t, head].item())
                    for j in range(19):
                        importance[j] += p * GEOMETRY.overlap_tokens(block, j) / 4
            if sum(importance) > 0:
                taken = sum(importance[j] for j in selected[t, group].tolist() if j >= 0)
                shares.append(taken / sum(importance))
    covered = importance_covered(q, k_cmp, lse, selected, GEOMETRY, 8**-0.5, None)
    assert covered.item() == pytest.approx(sum(shares) / len(shares), rel=1e-4)
    assert 0.3 < covered.item() < 1.0


def test_gate_figures() -> None:
    gates = torch.full((10, 4, 3), 0.5)
    gates[:, 0, 0] = 0.0
    gates[:, 1, 1] = torch.linspace(0, 1, 10)
    figures = {name: value.item() for name, value in gate_statistics(gates).items()}
    assert figures["gate_mean_cmp"] == pytest.approx(0.375)
    assert figures["heads_ignoring_cmp"] == 0.25 and figures["heads_ignoring_slc"] == 0.0
    assert figures["gate_entropy_win"] == pytest.approx(math.log(2))
    assert figures["gate_entropy_cmp"] == pytest.approx(0.75 * math.log(2))
    assert figures["gate_spread_win"] == 0.0
    assert figures["gate_spread_slc"] == pytest.approx(gates[..., 1].double().std(correction=0).item(), rel=1e-5)


def model_of(attention: str = "nsa", gate: str = "sigmoid") -> DecoderLM:
    config = ModelConfig(
        vocab_size=64,
        dim=32,
        num_layers=3,
        num_heads=4,
        num_kv_groups=2,
        head_dim=8,
        value_dim=8,
        mlp_dim=64,
        geometry=GEOMETRY,
        attention=attention,
        gate=gate,
    )
    model = DecoderLM(config)
    model.init_weights(3)
    return model


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_a_model_gives_a_row_for_each_layer(gate: str) -> None:
    model = model_of(gate=gate)
    rows = AttentionTelemetry(model).measure(torch.arange(2 * LENGTH).view(2, LENGTH) % 64)
    assert [row["layer"] for row in rows] == [0, 1, 2]
    start = 0.5 if gate == "sigmoid" else 1 / 3
    for row in rows:
        assert sum(row["selected_distance_shares"]) == pytest.approx(1, abs=1e-3)
        assert row["gate_mean_slc"] == pytest.approx(start, abs=0.1)
        assert 0 < row["importance_covered"] <= 1
        # Queries in the first three blocks have at most three candidates.
        assert row["fewer_than_n_share"] == pytest.approx(24 / LENGTH, abs=1e-4)


def test_packed_documents_keep_the_borders_of_the_first_sequence() -> None:
    model = model_of()
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 64
    borders = torch.tensor([0, 70, 200, 2 * LENGTH])
    (row, *_) = AttentionTelemetry(model).measure(tokens, cu_seqlens=borders)
    assert row["fewer_than_n_share"] == pytest.approx(48 / LENGTH, abs=1e-4)


def test_measuring_leaves_the_model_and_its_training_as_they_were() -> None:
    tokens = torch.arange(LENGTH).view(1, LENGTH) % 64
    model, twin = model_of(), model_of()
    telemetry = AttentionTelemetry(model)
    telemetry.measure(tokens)
    model.set_activation_checkpointing(0, 3)
    for each in (model, twin):
        each(tokens, tokens).backward()
    telemetry.measure(tokens)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, other.grad)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_dense_model_has_none() -> None:
    assert AttentionTelemetry(model_of("dense")).measure(torch.zeros(1, 8, dtype=torch.long)) == []


def test_alarms_are_events_once_and_end(tmp_path: Path) -> None:
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
        (20, "gate_shut", 1),
        (40, "gate_shut_over", 1),
    ]
    assert events[0]["severity"] == "warning" and events[0]["branch"] == "win"
    assert len(read_metrics(tmp_path / "metrics.jsonl", "telemetry")) == 12


def test_every_alarm_has_its_threshold() -> None:
    healthy = {"layer": 0, "free_local_share": 0.5}
    for branch in ("cmp", "slc", "win"):
        healthy |= {f"gate_mean_{branch}": 0.5, f"gate_entropy_{branch}": 0.6}
    assert list(alarms_of(healthy)) == []
    names = [
        [key[0] for key, _ in alarms_of(healthy | change)]
        for change in (
            {"gate_mean_cmp": 0.01, "gate_entropy_cmp": 0.01},
            {"gate_mean_slc": 0.99, "gate_entropy_slc": 0.01},
            {"free_local_share": 0.99},
        )
    ]
    assert names == [["gate_shut"], ["gate_saturated"], ["choices_local"]]
