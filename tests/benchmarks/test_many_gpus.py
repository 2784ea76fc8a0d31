"""`benchmarks/many_gpus.py`: what the parts run, their limits, and the rows of all of them together."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.children import load_script

many_gpus = load_script("benchmarks/many_gpus.py")
SCRIPTS = {name: load_script(f"benchmarks/{name}.py") for name in ("context", "scale")}


def results(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("many_gpus_*.json")
    return dict(json.loads(file.read_text()))


def test_a_part_runs_and_its_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of the part starts two processes, which import PyTorch: seven seconds."""
    warm.take_the_place_of_subprocess(monkeypatch, many_gpus.__name__)
    flags = ["--device", "cpu", "--gpus", "2", "--tiny", "--output", str(tmp_path), "--commit", "abc"]
    assert many_gpus.main([*flags, "--parts", "layer"]) == 0, list(tmp_path.iterdir())
    found = results(tmp_path)
    (row,) = found["rows"]
    assert (row["part"], row["gpus"], row["status"]) == ("layer", 2, "ok")
    # Two calls of a tiny layer on a busy CPU: either may be the longer.
    assert row["ms"] > 0 and row["forward_ms"] > 0
    assert [(part["name"], part["status"]) for part in found["parts"]] == [("layer", "ok")]


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm.take_the_place_of_subprocess(monkeypatch, many_gpus.__name__)
    code = "import time; print('begun', flush=True); time.sleep(600)"
    assert many_gpus.run(["-c", code], tmp_path / "log", 1.0) == "stopped after 1 s"
    assert (tmp_path / "log").read_text() == "begun\n"
    assert many_gpus.run(["-c", "raise SystemExit(3)"], tmp_path / "log", 60.0) == "failed: exit status 3"


def test_every_part_is_a_command_of_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts' own arguments and results, without what they measure: eight GPUs; four can hold a long layer."""
    speeds = {1: 100.0, 8: 760.0}

    def layer(size: int, options: Any) -> dict[str, Any]:
        status = "ok" if options.tokens / size <= many_gpus.LONG / 4 else "left out: needs 81 GiB a GPU"
        head = {"part": "layer", "gpus": size, "tokens": options.tokens, "status": status}
        return head if status != "ok" else head | {"ms": options.tokens / size, "peak_gib": 1.0}

    def measure(case: Any, folder: Path, seconds: float) -> tuple[dict[str, Any], str]:
        assert case.flags["data.source"] == "builtin" and seconds > 60
        assert ("parallel.shards" in case.flags) == (case.mode == "hsdp")
        return {"outcome": "ended", "step_ms": 1.0, "tokens_per_second": speeds[case.gpus]}, ""

    def trained(size: int, steps: int, tokens: int, flags: Any, *others: Any) -> tuple[list[dict[str, Any]], str]:
        error = 0.0 if flags["train.precision"] == "fp32" else 0.01 * size
        return [{"loss": 5.0}] * (steps - 1) + [{"loss": 5.0 + error}], "ok"

    monkeypatch.setattr(SCRIPTS["context"], "layer_row", layer)
    monkeypatch.setattr(SCRIPTS["context"], "trained", trained)
    monkeypatch.setattr(SCRIPTS["scale"], "measure", measure)

    def run(arguments: list[str], log: Path, seconds: float) -> str:
        log.write_text("= 17 passed =\n")
        if arguments[0] == "-m":
            assert all(Path(path).exists() for path in many_gpus.TESTS) and "16" in arguments
            return "ok"
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", arguments)
            status = SCRIPTS[Path(arguments[0]).stem].main()
        return f"failed: exit status {status}" if status else "ok"

    monkeypatch.setattr(many_gpus, "run", run)
    assert many_gpus.main(["--gpus", "8", "--output", str(tmp_path), "--commit", "abc"]) == 1
    found = results(tmp_path)
    assert {part["name"]: part["status"] for part in found["parts"]} == {
        **dict.fromkeys(many_gpus.SECONDS, "ok"), "losses": "failed: exit status 1",
    }  # fmt: skip
    assert (tmp_path / "many_gpus_losses.log").exists()
    assert [part.get("output") for part in found["parts"] if part["name"] == "tests"] == ["17 passed"]
    layers = {(row["tokens"], row["gpus"]): row for row in found["rows"] if row["part"] == "layer"}
    longest = layers[many_gpus.LONG, 8]
    assert (longest["base_gpus"], longest["efficiency"], longest["sfnsa_backward_ms"]) == (4, 1.0, 1509.2)
    assert layers[many_gpus.SHORT, 8]["base_gpus"] == 1 and "sfnsa_backward_ms" not in layers[many_gpus.SHORT, 8]
    assert layers[many_gpus.LONG, 2]["status"].startswith("left out")
    speeds_found = [(row["mode"], row["efficiency"]) for row in found["rows"] if row["part"] == "speed"]
    assert speeds_found == [(mode, 0.95) for mode in ("ddp", "fsdp", "hsdp")]
    losses = [row for row in found["rows"] if row["part"] == "losses"]
    assert losses[2]["status"].startswith("failed: errs") and losses[1]["status"] == "ok"


def test_parts_without_time_are_left_out(tmp_path: Path) -> None:
    assert many_gpus.main(["--gpus", "8", "--seconds", "5", "--output", str(tmp_path), "--parts", "layer"]) == 1
    assert results(tmp_path)["parts"] == [{"name": "layer", "status": "left out: no time", "seconds": 0.0}]
    with pytest.raises(SystemExit):
        many_gpus.main(["--gpus", "1", "--output", str(tmp_path)])
