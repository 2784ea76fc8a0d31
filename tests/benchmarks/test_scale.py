"""The rows of `benchmarks/scale.py`, from the files of a run."""

from pathlib import Path

import pytest

from tests.children import load_script
from tests.train.tiny import make_config
from trifocal.runlog import MetricsWriter
from trifocal.train import train
from trifocal.train.run_folder import save_config

scale = load_script("benchmarks/scale.py")
ROW = scale.Row("speed", "none", 1, "none", "false", "m7c_shake.toml", {})


def test_the_figures_of_a_run_are_those_of_its_files(tmp_path: Path) -> None:
    train(make_config(tmp_path, "--evaluate.interval_steps", "0"))
    found = scale.figures(ROW, tmp_path / "run")
    assert found["outcome"] == "ended" and found["steps"] == 6
    assert found["tokens_per_second"] == pytest.approx(4 * 32 / found["step_ms"] * 1000)
    # There is nobody to wait for; but a busy machine may be elsewhere just then.
    assert found["host_ms"] > 0 and found["wait_ms"] < 20 and len(found["checkpoint_seconds"]) == 3
    # The production run saves every so many steps; this one waited for each of its checkpoints.
    assert 0 < found["checkpoint_share"] < 1
    assert found["checkpoint_ms"] == pytest.approx(1000 * found["checkpoint_blocked_seconds"])


def write_run(folder: Path, seconds: list[float], saves: list[tuple[int, int, float]]) -> None:
    """A run's files: rows of ten steps, and checkpoints, each with its step, the one at its end and seconds blocked."""
    config = make_config(folder, "--checkpoint.asynchronous", "true", "--train.steps", "100")
    (folder / "run" / "heartbeat").mkdir(parents=True)
    save_config(config, folder / "run")
    figures = {"loss": 1.0, "data_wait_seconds_p95": 0.0, "memory_peak_bytes": 0}
    rows = [
        ("train", step, {"step_seconds": each, **figures})
        for step, each in zip([1, *range(10, 101, 10)], seconds, strict=True)
    ]
    for begin, end, blocked in saves:
        values = {"name": "checkpoint_saved", "severity": "info", "message": f"step_{begin:08} saved in 2.0 s"}
        rows.append(("event", end, {**values, "save_seconds": 2.0, "blocked_seconds": blocked}))
    with MetricsWriter(folder / "run" / "metrics.jsonl") as writer:
        for kind, step, values in sorted(rows, key=lambda row: row[1]):
            writer.write(kind, step, **values)
    (folder / "run" / "heartbeat" / "rank0.jsonl").write_text('{"total_seconds": {}}\n')


def test_a_step_is_one_beside_which_no_checkpoint_is_written(tmp_path: Path) -> None:
    """Rows of four GPUs under FSDP2, in milliseconds."""
    rows = [21_860, 132, 44.0, 44.13, 44.06, 43.9, 178, 68, 90, 44.1, 44.0]
    write_run(tmp_path, [each / 1000 for each in rows], [(50, 74, 0.271), (100, 100, 2.6)])
    found = scale.figures(ROW, tmp_path / "run")
    assert found["step_ms"] == pytest.approx(44.03) and found["rows_step_ms"] == pytest.approx(rows)
    assert found["tokens_per_second"] == pytest.approx(4 * 32 / 0.04403)
    # Three rows of ten steps, and what training stood still for.
    assert found["checkpoint_ms"] == pytest.approx(10 * (178 + 68 + 90 - 3 * 44.03) + 271)
    assert found["checkpoint_blocked_seconds"] == 0.271


def test_where_a_checkpoint_is_always_being_written_the_second_half_counts(tmp_path: Path) -> None:
    write_run(tmp_path, [9.0, 8.0, *[7.0] * 4, *[1.0] * 5], [(1, 100, 0.0), (100, 100, 0.0)])
    assert scale.figures(ROW, tmp_path / "run")["step_ms"] == pytest.approx(1000)


def test_a_run_that_had_no_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "train", lambda *args: "its output")
    found, output = scale.measure(ROW, tmp_path, -1.0)
    assert found["outcome"] == "stopped after -1 s, before a checkpoint" and output == "its output"
    monkeypatch.setattr(scale, "figures", lambda *args: [][0])
    assert scale.measure(ROW, tmp_path, 60.0)[0]["outcome"] == "failed: IndexError: list index out of range"


def test_a_run_without_a_checkpoint_has_failed(tmp_path: Path) -> None:
    assert scale.figures(ROW, tmp_path / "run") == {"outcome": "failed"}


def test_speeds_are_multiples_of_one_gpus() -> None:
    head = {"checkpointing": "all", "graphs": "false", "step_ms": 1.0}
    one = {**head, "part": "one", "gpus": 1, "tokens_per_second": 10.0}
    two = {**head, "part": "speed", "gpus": 2, "tokens_per_second": 19.0}
    failed = {"part": "speed", "checkpointing": "all", "graphs": "false", "outcome": "failed"}
    assert [found.get("times_one_gpu") for found in scale.compared([one, two, failed])] == [1.0, 1.9, None]
    assert [found.get("efficiency") for found in scale.compared([one, two, failed])] == [1.0, 0.95, None]
