"""The tables of docs/quality.md are those of the newest results, and a sceptic can repeat each."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def quality() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "docs" / "figures"))
    yield importlib.import_module("draw_quality")
    sys.path.remove(str(ROOT / "docs" / "figures"))


def write(folder: Path, name: str, **tables: Any) -> None:
    head = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-12-01T00:00:00", "commit": "abc", "notes": []}
    (folder / f"{name}_h200_2026-12-01.json").write_text(json.dumps(head | tables))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Made-up results of every part."""
    variants = ("sparse", "dense", "window")
    for part, jobs in (("seeds", 12), ("long", 1), ("production", 1)):
        rows = [
            {"variant": variant, "seed": seed, "steps": 20, "tokens": 4_000_000, "tokens_per_second": 1000.0 + seed,
             "trainings_at_a_time": jobs, "curve": [[10, 2.0], [20, 1.5]]}
            for variant in variants for seed in (1, 2)
        ]  # fmt: skip
        means = [
            {"variant": variant, "seeds": 2, "mean_loss": 1.5, "standard_deviation": 0.01, "above_dense": 0.02,
             "standard_error_of_that": None}
            for variant in variants
        ]  # fmt: skip
        # The last variant has one seed.
        positions = [
            {"variant": variant, "seed": seed, "length": 2048, "0-7": 3.0 + seed + (variant == "window"), "8-15": 2.0}
            for variant in variants for seed in (1, 2) if (variant, seed) != ("window", 1)
        ]  # fmt: skip
        short = [row | {"above_dense": 0.125} for row in means] if part == "long" else []
        write(
            tmp_path, f"quality_{part}", rows=rows, means=means, means_on_short_rows=short, loss_by_position=positions
        )
    recall = [{"variant": "sparse", "pairs": pairs, "accuracy": accuracy} for pairs, accuracy in ((8, 1.0), (16, 0.5))]
    far = [{"variant": "sparse", "length": 64, "pairs": pairs, "0-63": 1.0, "64-127": 0.5} for pairs in (8, 16)]
    write(tmp_path, "quality_recall", rows=[], recall=recall, recall_by_distance=far)
    found = [
        {"variant": variant, "length": length, "needles": needles, "0%": 0.25, "100%": 1.0}
        for variant in variants for length in (64, 4096) for needles in (1, 8)
    ]  # fmt: skip
    write(tmp_path, "quality_needle", rows=[], needles_found_by_depth=found)
    choice = {"attention": "dense", "recall_early": 0.5, "found_early": None, "recall_end": 1.0, "found_end": None,
              "least_recall": 0.998}  # fmt: skip
    write(tmp_path, "choice_learning", rows=[], means=[choice])
    return tmp_path


def test_the_page_is_what_the_script_writes(quality: ModuleType) -> None:
    text = quality.PAGE.read_text(encoding="utf-8")
    assert quality.page(text) == text, "a result has been added: make docs"


def test_tables_come_from_the_results(quality: ModuleType, results: Path) -> None:
    text = quality.page(quality.PAGE.read_text(encoding="utf-8"), results)
    assert "Not measured yet" not in text
    assert text.count("| sparse | 2 | 1.5000 ± 0.0100 | 0.0200 |") == 2
    assert text.count("| 0.0200 | 1,002 |") == 4, "tokens/s of a shared GPU are not shown"
    assert "| sparse | 2 | 0.1250 | 1.5000 ± 0.0100 | 0.0200 | 1,002 |" in text
    assert "| dense | 2 | 1.5000 ± 0.0100 |  |" in text
    assert "After 20 steps, 4.0 M bytes each" in text
    assert "| sparse | 100.0% | 50.0% |" in text
    assert "| window | 4,096 | 8 | 25% | 100% |" in text
    assert "| dense | 50.0% |  | 100.0% |  | 99.8% |" in text
    assert "benchmarks/results/quality_seeds_h200_2026-12-01.md" in text and "commit `abc`" in text
    assert quality.page(text, results) == text, "written twice, it is the same"
    empty = quality.page(text, results / "nothing")
    assert empty.count("Not measured yet.") == 6


def test_every_part_has_a_figure(quality: ModuleType, results: Path) -> None:
    figures = quality.figures(results)
    assert set(figures) == {f"quality_{part}.svg" for part in quality.PARTS}
    for draw in figures.values():
        assert draw().axes
    assert quality.figures(results / "nothing") == {}
    assert len(figures["quality_needle.svg"]().axes) == 3 + 1, "a panel for each variant, and the scale"


def test_positions_are_compared_with_dense_attention_of_the_same_seed(quality: ModuleType, results: Path) -> None:
    axes = quality.figures(results)["quality_long.svg"]().axes[1]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["sparse"] == [0.0, 0.0] and drawn["window"] == [1.0, 0.0]


def test_a_result_without_positions_is_drawn(quality: ModuleType, results: Path) -> None:
    (file,) = results.glob("quality_long_*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"loss_by_position": []}))
    axes = quality.figures(results)["quality_long.svg"]().axes
    assert len(axes[0].lines) == 6 and len(axes[1].lines) == 1


def test_the_page_names_the_parts_of_the_script(quality: ModuleType) -> None:
    script = (ROOT / "benchmarks" / "lib" / "quality_parts.py").read_text(encoding="utf-8")
    assert set(quality.PARTS) == set(re.findall(r'^    "(\w+)": Part\(', script, re.MULTILINE))


def test_every_variant_has_a_colour(quality: ModuleType) -> None:
    script = (ROOT / "benchmarks" / "lib" / "quality_parts.py").read_text(encoding="utf-8")
    (names,) = re.findall(r"^VARIANTS: [^\n]* = \{\n(.*?)^\}", script, re.MULTILINE | re.DOTALL)
    assert list(quality.COLOURS) == re.findall(r'^    "([\w-]+)":', names, re.MULTILINE)
