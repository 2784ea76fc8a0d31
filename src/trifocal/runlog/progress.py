"""Progress of the run on the terminal."""

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

# In the order of their line.
_FIGURES = {"loss": "loss {:.4f}", "divergence": "divergence {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}


def try_print(text: str, stream: TextIO | None = None) -> None:
    """Print a line; a stream that is lost (a closed pipe, a full disk) ends no run."""
    with suppress(OSError, ValueError):
        print(text, file=stream or sys.stdout, flush=True)


class Progress:
    """Shows step, loss, tokens/s and the time left, where `enabled`: a live bar on a terminal; elsewhere plain lines
    without control characters, every `interval_seconds` at most.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        stream: TextIO | None = None,
        interval_seconds: float = 5.0,
        enabled: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock, self._total_steps = clock, total_steps
        self._stream, self._interval_seconds, self._enabled = stream or sys.stdout, interval_seconds, enabled
        # From the end of the first step on, which loads and compiles what later ones have.
        self._history: deque[tuple[float, int]] = deque(maxlen=200)
        self._last_step = start_step
        self._last_line = float("-inf")
        self._figures: dict[str, float] = {}
        self._bar: RichProgress | None = None
        console = Console(file=self._stream, emoji=False)
        if enabled and self._stream.isatty() and not console.is_dumb_terminal:
            self._bar = RichProgress(
                # A narrow terminal cuts the end of this text, so the step comes first.
                TextColumn("[bold]{task.description}[/] {task.completed}/{task.total} {task.fields[numbers]}"),
                BarColumn(bar_width=None),
                TextColumn("elapsed"),
                TimeElapsedColumn(),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task("training", total=total_steps, completed=start_step, numbers="")

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        divergence: float | None = None,
    ) -> None:
        """Show a step; None keeps the last figure, of which a run without a frozen model has no divergence."""
        if step == self._last_step:
            return
        self._last_step = step
        self._history.append((self._clock(), step))
        given = {"loss": loss, "divergence": divergence, "tokens_per_second": tokens_per_second}
        self._figures |= {name: value for name, value in given.items() if value is not None}
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=self._numbers(), description="training")
        else:
            width = len(str(self._total_steps))
            text = f"step {step:{width}}/{self._total_steps}  {self._numbers()}"
            self._write_seldom(text, at_once=step == self._total_steps)

    def activity(self, name: str, done: int, total: int) -> None:
        """Show other work than steps, such as `evaluating 12/32`, until the next step."""
        text = f"{name} {done}/{total}"
        if self._bar is not None:
            self._bar.update(self._task, description="training" if done == total else text)
        else:
            self._write_seldom(text)

    def message(self, text: str) -> None:
        """Print a line above the bar, or among the plain lines."""
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.console.print(text, markup=False, highlight=False)
        elif self._enabled:
            try_print(text, self._stream)

    def _write_seldom(self, text: str, *, at_once: bool = False) -> None:
        if at_once or self._clock() - self._last_line >= self._interval_seconds:
            self._last_line = self._clock()
            self.message(text)

    def remaining_seconds(self) -> float | None:
        """Time left at the rate of the recent steps; None before the second one."""
        if len(self._history) < 2:
            return None
        (first_time, first_step), (last_time, last_step) = self._history[0], self._history[-1]
        return (self._total_steps - last_step) * (last_time - first_time) / (last_step - first_step)

    def _numbers(self) -> str:
        parts = [text.format(self._figures[name]) for name, text in _FIGURES.items() if name in self._figures]
        remaining = self.remaining_seconds()
        if remaining is not None:
            parts.append(f"ETA {duration(remaining)}")
        return "  ".join(parts)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()


def duration(seconds: float) -> str:
    """A duration as text: `0:42`, `3:07`, `2:05:00`, `3d 04:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"
