"""Context parallelism: processes that share each sequence compute what one process does."""

import json
from pathlib import Path

from tests.distributed import context_worker
from tests.distributed.workers import Workers

# Sums in another order, in fp64, through two layers.
BOUND = 1e-11


def test_every_layer_is_one_process(tmp_path: Path) -> None:
    """Loss, every gradient, the choice and its loss: two processes a sequence, and four."""
    path = tmp_path / "found.json"
    ended = Workers([[str(Path(context_worker.__file__)), str(path)]] * 4, tmp_path).join(120)
    assert [end.status for end in ended] == [0] * 4, "".join(end.error for end in ended)
    found = json.loads(path.read_text())
    assert len(found) == 2 * len(context_worker.cases())
    for row in found:
        assert max(row["loss"], row["gradients"], row["figures"]) < BOUND, row
        assert not row["choices differ"], row
        # One process alone has not the whole loss.
        assert row["share"] > 0.1, row
    assert sum(row["choices"] for row in found) > 40
