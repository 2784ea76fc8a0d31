"""The script that trains the choice of blocks: it asks for the right block, and its table adds up."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.children import ROOT


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("choice_learning", ROOT / "benchmarks" / "choice_learning.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The processes of the pool look its functions up.
    sys.modules["choice_learning"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["choice_learning"]


def test_the_place_of_a_key_is_that_of_its_answer(script: ModuleType) -> None:
    tokens, targets = script.draw(1, 4, 0)
    asked = targets >= 0
    assert int(asked.sum()) == 4 * script.PAIRS
    assert torch.equal(tokens.gather(1, script.value_places(tokens))[asked], targets[asked])


def test_a_choice_of_everything_finds_all_and_one_of_the_forced_blocks_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = script.make("sparse", 1)
    chosen = torch.arange(script.TOKENS // script.GEOMETRY.selection_block_size).expand(
        script.ROWS, script.TOKENS, 1, -1
    )
    for given, found in ((chosen, 1.0), (chosen[..., :1], 0.0)):
        monkeypatch.setattr(script.Choices, "__enter__", lambda self, given=given: self.found.append(given) or self)
        monkeypatch.setattr(script.Choices, "__exit__", lambda *raised: None)
        figures = script.measure(model, 1)
        assert figures["found"] == found and 0.3 < figures["chance"] < 0.4


def test_the_table_has_every_seed(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {1: script.run("sparse, dropout 0.2", 1, 2, 3, 1e-3), 2: script.run("dense", 1, 2, 3, 1e-3)}
    assert 0 <= rows[1]["found_end"] <= 1 and rows[2]["found_end"] is None
    two = [rows[1], rows[1] | {"recall_end": 1.0}, rows[2]]
    table = script.means(two)
    assert [(row["attention"], row["seeds"]) for row in table] == [("sparse, dropout 0.2", 2), ("dense", 1)]
    assert table[0]["least_recall"] == rows[1]["recall_end"]
    assert table[0]["recall_end"] == pytest.approx((1 + rows[1]["recall_end"]) / 2)
    assert json.dumps(table)
