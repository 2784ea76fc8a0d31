"""The display, on a real pseudo-terminal and on a plain stream."""

import io
import os
import pty
import re
import select

import pytest

from tests.written_runs import Clock
from trifocal.runlog.progress import Progress, duration


def test_plain_lines_have_the_figures_and_no_control_characters():
    stream = io.StringIO()
    with Progress(100, stream=stream, interval_seconds=0.0) as progress:
        for step in range(1, 101):
            progress.update(step, loss=3.0 / step, tokens_per_second=12345.6)
        progress.message("[saved] checkpoints/step_100")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 101
    assert re.fullmatch(r"step  50/100  loss 0\.0600  12,346 tokens/s  ETA 0:\d\d", lines[49])
    assert lines[-1] == "[saved] checkpoints/step_100"
    progress.update(101, loss=0.5, divergence=0.0123)
    assert "  loss 0.5000  divergence 0.0123  12,346 tokens/s" in stream.getvalue()
    assert stream.getvalue().isascii() and not re.search(r"[\x00-\x09\x0b-\x1f]", stream.getvalue())


def test_plain_lines_are_rare_but_the_last_step_always_shows():
    stream = io.StringIO()
    with Progress(1000, stream=stream, interval_seconds=60) as progress:
        for step in range(1, 1001):
            progress.update(step, loss=1.0)
        progress.update(1000, loss=1.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step    1/1000") and lines[1].startswith("step 1000/1000")


def test_a_long_evaluation_is_no_silence():
    stream, clock = io.StringIO(), Clock()
    with Progress(1000, stream=stream, interval_seconds=5, clock=clock) as progress:
        progress.update(1, loss=1.0)
        for done in range(1, 33):
            clock.pass_seconds(1.0)
            progress.activity("evaluating", done, 32)
    assert stream.getvalue().splitlines()[1:3] == ["evaluating 5/32", "evaluating 10/32"]


def shown_on_a_terminal():
    """What a run of ten steps with an evaluation shows on a pseudo-terminal."""
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as stream:
        with Progress(10, stream=stream, interval_seconds=0) as progress:
            for step in range(1, 11):
                progress.update(step, loss=1.5, tokens_per_second=2000)
            progress.activity("evaluating", 12, 32)
            progress.message("sample: [bold] is text, :book: too")
        stream.flush()
        shown = ""
        while select.select([parent], [], [], 0.2)[0]:
            shown += os.read(parent, 65536).decode()
    os.close(parent)
    return shown


def test_a_terminal_gets_a_live_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    shown = shown_on_a_terminal()
    assert "\x1b[" in shown
    assert re.search(r"ETA 0:00\S* .*elapsed\S* \S*0:00:\d\d", shown), "each time says which it is"
    assert "evaluating 12/32" in shown
    assert "10/10" in shown and "loss 1.5000" in shown and "2,000 tokens/s" in shown
    assert "sample: [bold] is text, :book: too" in shown


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    lines = shown_on_a_terminal().splitlines()
    assert [line[: len("step 10/10")] for line in lines[:10]] == [f"step {step:2}/10" for step in range(1, 11)]


def test_remaining_time_counts_without_the_first_step():
    """It compiles, and half a minute times all steps is no time left."""
    stream = io.StringIO()
    clock = Clock()
    progress = Progress(110, start_step=100, stream=stream, clock=clock)
    clock.pass_seconds(40.0)
    progress.update(101)
    assert progress.remaining_seconds() is None
    assert stream.getvalue() == "step 101/110  \n"
    clock.pass_seconds(2.0)
    progress.update(102)
    assert progress.remaining_seconds() == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (42.4, "0:42"), (187, "3:07"), (7500, "2:05:00"), (273600, "3d 04:00")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
