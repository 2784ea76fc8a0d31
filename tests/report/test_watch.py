"""`trifocal watch` from the files of runs in every state."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.children import environment, wait_for_end
from tests.written_runs import set_last_beat
from trifocal.cli import main
from trifocal.cli.console import SafeConsole
from trifocal.report import live_view
from trifocal.report.charts import training_charts
from trifocal.report.live_view import remaining_seconds, render
from trifocal.runlog.metrics import MetricsWriter
from trifocal.runlog.run import read_run


def shown(run, width=100):
    console = SafeConsole(file=io.StringIO(), width=width)
    console.print(render(read_run(run, live=True)))
    return console.file.getvalue()


def test_one_look_shows_what_matters(make_run):
    run = make_run(steps=500, gpu=True, ranks=2)
    text = shown(run)
    for part in (
        "500/500",
        "loss",
        "validation",
        "tokens/s",
        "MFU (executed)",
        "cmp 0.35  slc",
        "recall 0.70",
        "finished",
    ):
        assert part in text, part
    assert "saved checkpoints/step_500" in text


def test_a_long_name_hides_no_step(make_run):
    run = make_run("base_125m_" * 12, steps=500)
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("steps = 500", "steps = 120000"))
    for width in (40, 80):
        assert "500/120,000" in shown(run, width)


def test_of_many_ranks_those_that_need_action_come_first(make_run):
    run = make_run(steps=100, ranks=12)
    for rank in (7, 10):
        set_last_beat(run, rank, unix_time_seconds=time.time(), phase_seconds=500.0)
    ranks = re.findall(r"^ *(\d+) +(?:finished|stalled)", shown(run), flags=re.MULTILINE)
    assert ranks == ["7", "10", *(str(rank) for rank in range(12) if rank not in (7, 10))]


def test_the_end_of_a_log_has_no_best_loss(make_run, monkeypatch):
    run = make_run(steps=500)
    with MetricsWriter(run / "metrics.jsonl", resume_step=0) as metrics:
        for step in range(1, 1001):
            metrics.write("evaluation", step, validation_loss=1.0 + step / 1000)
    assert "2.0000  (best 1.0010)" in shown(run)
    monkeypatch.setattr("trifocal.runlog.run._LIVE_BYTES", 2000)
    assert "2.0000" in shown(run) and "best" not in shown(run)


def test_each_source_has_its_loss_and_its_epochs(make_run):
    run, glob = make_run(steps=500), "text:book:[ab][/c]*.txt"
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.write("train", 500, **{"loss": 1.0, "epoch/builtin": 3, f"epoch/{glob}": 0})
        metrics.write(
            "evaluation", 500, **{"validation_loss": 1.5, "validation_loss/builtin": 1, f"validation_loss/{glob}": 2}
        )
    text = shown(run)
    assert f"builtin 1.0000, {glob} 2.0000" in text and f"epochs      builtin 3, {glob} 0" in text
    [chart] = [chart for chart in training_charts([read_run(run)]) if chart.key == "loss"]
    assert [trace["name"] for trace in chart.traces][-2:] == ["validation, builtin", f"validation, {glob}"]


def test_an_end_has_no_eta(make_run, monkeypatch):
    run = make_run(steps=500)
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("steps = 500", "steps = 900"))
    # The rows were written at once.
    monkeypatch.setattr(live_view, "remaining_seconds", lambda run: 60.0)
    set_last_beat(run, unix_time_seconds=time.time(), status="running", interval_seconds=600.0)
    assert "500/900  ETA" in shown(run)
    for status in ("stopped", "failed"):
        set_last_beat(run, unix_time_seconds=time.time(), status=status)
        assert "500/900" in shown(run) and "ETA" not in shown(run)


def test_nothing_in_a_file_moves_the_terminal(make_run):
    attack = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eharmless"
    run = make_run(steps=100)
    run = run.rename(run.with_name(f"a{attack}"))
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.event(100, "note", attack, severity="warning")
    set_last_beat(run, 0, unix_time_seconds=time.time(), phase=attack, where=attack, phase_seconds=500.0)
    console = SafeConsole(file=io.StringIO(), width=200, force_terminal=True)
    console.print(render(read_run(run, live=True)))
    text = console.file.getvalue()
    assert text.count("]0;title[2J31mharmless") >= 3
    # Rich's own colours remain.
    assert not set(re.sub(r"\x1b\[[0-9;]*m", "", text)) & set("\x1b\x07\x9b\u202e\r\b")


def test_what_is_no_file_is_passed_over(make_run):
    run = make_run(steps=100)
    # Opening one of these would wait for ever.
    os.mkfifo(run / "heartbeat" / "rank7.jsonl")
    os.mkfifo(run / "samples" / "step_00000009.txt")
    os.mkfifo(run / "attention" / "step_00000009.npz")
    for name in ("metrics.jsonl", "config.toml", "env.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert "finished" in shown(run)


def test_the_exit_status_tells_a_script(make_run, capsys):
    run = make_run(steps=100)
    assert main(["watch", str(run)]) == 0
    set_last_beat(run, 0, unix_time_seconds=time.time(), phase_seconds=500.0)
    assert main(["watch", str(run), "--interval-seconds", "0"]) == 1
    assert "stalled" in capsys.readouterr().out
    assert main(["watch", str(run / "nowhere")]) == 2
    assert main(["watch", str(run), "--interval-seconds", "-1"]) == 2
    assert "at least 0" in capsys.readouterr().err


@pytest.mark.parametrize(("terminal", "ends_by"), [("xterm-256color", "run"), ("xterm", "SIGTERM"), ("dumb", "itself")])
def test_it_is_live_on_a_terminal_and_ends_with_the_run(make_run, terminal, ends_by):
    run = make_run(steps=100)
    # Not late for as long as it takes to start.
    set_last_beat(run, 0, unix_time_seconds=time.time(), step=77, expected_phase_seconds=60.0, interval_seconds=600.0)
    arguments = ["watch", str(run), "--interval-seconds", "0.1"]
    code = f"from trifocal.cli import main; raise SystemExit(main({arguments}))"
    parent, child = pty.openpty()
    with Path(os.ttyname(child)).open("wb", buffering=0) as out:
        variables = environment(TERM=terminal, COLUMNS=120)
        process = warm.popen([sys.executable, "-c", code], stdout=out, stderr=subprocess.DEVNULL, env=variables)
    # However slow the machine is: nothing here is measured.
    seen, finished, deadline = "", False, time.monotonic() + 240
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, seen
            if select.select([parent], [], [], 0.1)[0]:
                seen += os.read(parent, 65536).decode(errors="replace")
            if not finished and "running" in seen:
                finished = True
                if ends_by == "run":
                    set_last_beat(run, 0, status="finished", step=100)
                elif ends_by == "SIGTERM":
                    process.send_signal(signal.SIGTERM)
        status = wait_for_end(process, 60)
        # What it wrote last may not be read yet.
        while select.select([parent], [], [], 0)[0]:
            seen += os.read(parent, 65536).decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(child)
        os.close(parent)
    assert status == (128 + signal.SIGTERM if ends_by == "SIGTERM" else 0)
    assert ends_by != "run" or seen.index("running") < seen.rindex("finished")
    # The terminal gets its cursor back.
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == (ends_by != "itself")


def test_the_time_left_follows_the_pace(make_run):
    path = make_run(steps=400)
    run = read_run(path)
    run.heartbeats = {}
    run.rows = [{"kind": "train", "step": step, "unix_time_seconds": 1e9 + 2.0 * step} for step in range(10, 101, 10)]
    assert remaining_seconds(run) == pytest.approx(600.0)
    # A day later it continues, three times as fast.
    day = 1e9 + 86400
    run.rows.append({"kind": "event", "name": "resumed", "step": 100, "unix_time_seconds": day})
    run.rows += [{"kind": "train", "step": 100 + n, "unix_time_seconds": day + 2 / 3 * n} for n in (1, 9)]
    assert remaining_seconds(run) == pytest.approx((400 - 109) * 2 / 3)
    run.rows = run.rows[:1]
    assert remaining_seconds(run) is None
