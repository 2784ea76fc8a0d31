"""Traces of some steps of a run, off by default.

TRACES names them; docs/runs.md has a table with the question that each answers, and its files. Hooks are installed
in the traced steps only: every other step runs without them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from trifocal.distributed.parallel import Parallel
from trifocal.runlog.heartbeat import Phases
from trifocal.runlog.traces.base import Moment, Trace
from trifocal.runlog.traces.layers import DtypeTrace, ExchangeTrace, GradientTrace, MemoryTrace, ModuleTrace

TRACES = ("gradients", "modules", "exchange", "dtypes", "memory", "profiler")
HOOKED = ("gradients", "modules", "exchange", "dtypes", "memory")
"""Traces with Python hooks, which a replayed CUDA graph does not call."""
INSIDE_LAYERS = ("modules", "dtypes", "memory")
"""Traces with hooks inside layers, which a compiled layer does not call."""

Window = tuple[int, int]
_ROWS = 50


class ProfilerTrace(Trace):
    """Profiles all steps of the window, for Perfetto (ui.perfetto.dev) or chrome://tracing, and as a table of text."""

    def __init__(self, moment: Moment, device: torch.device) -> None:
        super().__init__(moment)
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        # A window is one profiler cycle. Without `acc_events` PyTorch warns that other cycles would be dropped.
        self._profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A range in the profile."""
        return record_function(f"step {self.moment.steps[-1]}: {name}")

    def end(self) -> None:
        """Stop profiling."""
        self._profiler.stop()

    def write(self, folder: Path, rank: int) -> None:
        """Write the trace and the table."""
        self._profiler.export_chrome_trace(str(folder / f"profile_rank{rank}.json.gz"))
        by = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        table = self._profiler.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=80)
        (folder / f"operations_rank{rank}.txt").write_text(table + "\n", encoding="utf-8")


class Tracer(contextlib.AbstractContextManager["Tracer"]):
    """Traces the steps of some windows, half-open ranges in order, into `traces/` of the run; a context manager around
    training. Each multiple of `interval_steps` outside of them is a window of one step.

    `phases` is the heartbeat, which gets the phases of every step. `report` is called with a name and a sentence:
    `traced` when files were written, `trace_failed` when they could not be.
    """

    def __init__(
        self,
        directory: Path,
        what: Sequence[str],
        windows: Sequence[Window],
        *,
        interval_steps: int = 0,
        model: nn.Module,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        rank: int,
        phases: Phases,
        report: Callable[[str, str], None],
    ) -> None:
        self._directory, self._rank, self._device = directory / "traces", rank, device
        self._windows, self._interval_steps = windows, interval_steps
        self._phases, self._report = phases, report
        moment = self._moment = Moment(device)
        makers: dict[str, Callable[[], Trace]] = {
            "gradients": lambda: GradientTrace(moment, model),
            "modules": lambda: ModuleTrace(moment, model),
            "dtypes": lambda: DtypeTrace(moment, model, optimizer),
            "memory": lambda: MemoryTrace(moment, model, optimizer, device),
            "profiler": lambda: ProfilerTrace(moment, device),
        }
        watch = parallel.watch
        if watch is not None:
            makers["exchange"] = lambda: ExchangeTrace(moment, model, parallel.module, watch)
        # A single process exchanges nothing.
        self._makers = [makers[name] for name in what if name in makers]
        self._traces: list[Trace] = []
        """Traces of the open window."""

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[Phases]:
        """Around a step; yields the receiver of its phases: this tracer in a traced step, else the heartbeat."""
        end = next((end for first, end in self._windows if first <= step < end), None)
        if end is None and self._interval_steps and step % self._interval_steps == 0:
            end = step + 1
        if end is None or not self._makers:
            yield self._phases
            return
        if not self._traces:
            self._moment.steps = []
            self._traces = [make() for make in self._makers]
        self._moment.steps.append(step)
        self._moment.micro_batch = 0
        yield self
        if step + 1 == end:
            self._close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager around a phase of a traced step, for the heartbeat and every trace."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._phases.phase(name))
            self._moment.enter_phase(name)
            for trace in self._traces:
                stack.enter_context(trace.phase(name))
            yield
            # Work until the next phase (an evaluation, for example) is not part of the step.
            self._moment.phase = ""

    def _close(self) -> None:
        """End the window and write its files."""
        traces, self._traces = self._traces, []
        if not traces:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for trace in traces:
            trace.end()
        first, last = self._moment.steps[0], self._moment.steps[-1]
        folder = self._directory / f"steps_{first}-{last}"
        failed: OSError | None = None
        for trace in traces:
            try:
                folder.parent.mkdir(exist_ok=True)
                folder.mkdir(exist_ok=True)
                trace.write(folder, self._rank)
            except OSError as error:
                failed = error
        if failed is not None:
            self._report("trace_failed", f"traces in {folder} could not be written: {failed}; training continues")
        else:
            self._report("traced", f"steps {first} to {last} are traced in {folder}")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._close()
        except Exception as failure:
            # An error of a failed device must not hide the first error.
            if error is None:
                raise
            self._report("trace_failed", f"the open traces are lost: {failure}")
