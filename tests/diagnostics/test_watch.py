"""`trifocal watch` from the files of runs in every state."""

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.children import environment
from tests.diagnostics.conftest import set_last_beat
from trifocal.cli import main
from trifocal.diagnostics.run import read_run
from trifocal.diagnostics.watch import remaining_seconds, render, sparkline

MakeRun = Callable[..., Path]


def shown(run: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(read_run(run, whole_heartbeats=False), width=width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_one_look_shows_what_matters(make_run: MakeRun) -> None:
    run = make_run(steps=500, gpu=True, ranks=2)
    text = shown(run)
    for part in ("500/500", "loss", "▁", "validation", "tokens/s", "MFU (executed)", "cmp 0.35", "finished", "GiB"):
        assert part in text, part
    assert "saved checkpoints/step_500" in text


def test_every_rank_has_its_verdict(make_run: MakeRun) -> None:
    run = make_run(steps=500, ranks=4)
    now = time.time()
    set_last_beat(run, 0, unix_time_seconds=now)
    set_last_beat(run, 1, unix_time_seconds=now, phase="data", phase_seconds=9.0, expected_phase_seconds=0.5)
    set_last_beat(run, 2, unix_time_seconds=now, phase="backward", phase_seconds=500.0, where="hook (model.py:7)")
    set_last_beat(run, 3, unix_time_seconds=now - 100, host="elsewhere")
    lines = {line.split()[0]: line for line in shown(run, 160).splitlines() if line.strip()[:1].isdigit()}
    assert "running" in lines["0"]
    assert "slow" in lines["1"] and "18.0 times its median of 0.5 s" in lines["1"]
    assert "stalled" in lines["2"] and "hook (model.py:7)" in lines["2"]
    assert "dead" in lines["3"] and "elsewhere" in lines["3"]


def test_the_exit_status_tells_a_script(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(steps=100)
    assert main(["watch", str(run)]) == 0
    set_last_beat(run, 0, unix_time_seconds=time.time(), phase_seconds=500.0)
    assert main(["watch", str(run), "--interval-seconds", "0"]) == 1
    assert "stalled" in capsys.readouterr().out
    assert main(["watch", str(run / "nowhere")]) == 2
    assert main(["watch", str(run), "--interval-seconds", "-1"]) == 2
    assert "at least 0" in capsys.readouterr().err


def test_it_is_live_on_a_terminal_and_ends_with_the_run(make_run: MakeRun) -> None:
    run = make_run(steps=100)
    set_last_beat(run, 0, unix_time_seconds=time.time(), step=77, expected_phase_seconds=60.0)
    code = f"from trifocal.cli import main; main(['watch', {str(run)!r}, '--interval-seconds', '0.1'])"
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=child, env=environment(TERM="xterm-256color", COLUMNS=120)
    )
    os.close(child)
    seen, finished, deadline = "", False, time.time() + 40
    while process.poll() is None:
        assert time.time() < deadline, seen
        if select.select([parent], [], [], 0.1)[0]:
            try:
                seen += os.read(parent, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
        if not finished and "running" in seen:
            finished = True
            set_last_beat(run, 0, status="finished", step=100)
    os.close(parent)
    assert process.wait() == 0
    assert seen.index("running") < seen.rindex("finished")


def test_a_run_that_only_began(tmp_path: Path) -> None:
    (tmp_path / "run" / "heartbeat").mkdir(parents=True)
    assert "no rank has written a heartbeat yet" in shown(tmp_path / "run")


def test_the_time_left_follows_the_pace(make_run: MakeRun) -> None:
    path = make_run(steps=400)
    run = read_run(path)
    run.heartbeats = {}
    run.rows = [{"kind": "train", "step": step, "unix_time_seconds": 1e9 + 2.0 * step} for step in range(10, 101, 10)]
    assert remaining_seconds(run) == pytest.approx(600.0)
    run.rows = run.rows[:1]
    assert remaining_seconds(run) is None


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 5, ""),
        ([1.0], 5, "▁"),
        ([2.0, 2.0], 5, "▁▁"),
        ([0.0, 7.0, 3.0], 5, "▁█▄"),
        ([8.0, 6.0, 2.0, 0.0], 2, "█▁"),
    ],
)
def test_sparklines(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line
