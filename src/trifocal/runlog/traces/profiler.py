"""`torch.profiler` over the window: `profile_rank*.json.gz` and `operations_rank*.txt`.

The first opens in Perfetto (ui.perfetto.dev) or chrome://tracing, the second in any editor.
"""

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trifocal.runlog.traces.base import Moment, Trace

_ROWS = 50


class ProfilerTrace(Trace):
    """Profiles all steps of the window, with the phases as ranges.

    Args:
        moment: The place within the traced step.
        device: Device of the work.
    """

    def __init__(self, moment: Moment, device: torch.device) -> None:
        super().__init__(moment)
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        # A window is one profiler cycle. Without `acc_events` PyTorch warns that other cycles would be dropped.
        self._profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()

    def phase(self, name: str) -> AbstractContextManager[None]:
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
