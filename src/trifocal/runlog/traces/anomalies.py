"""The operation that made a NaN in backward, by autograd's anomaly detection: `anomaly_step_*_rank*.txt`."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from trifocal.runlog.traces.base import Moment, Trace

_TRACEBACK = "Traceback of forward call"


class AnomalyFound(RuntimeError):
    """An operation's gradient is NaN. The message names the operation, the step and where it was called."""


class AnomalyTrace(Trace):
    """Checks every operation of every backward pass, which makes steps a good deal slower.

    Args:
        moment: The place within the traced step.
        directory: The run; the report goes into its `traces` folder, as a NaN ends the run before the window ends.
        rank: Rank of this process.
    """

    def __init__(self, moment: Moment, directory: Path, rank: int) -> None:
        super().__init__(moment)
        self._directory, self._rank = directory, rank
        self._was_on = torch.is_anomaly_enabled()
        torch.autograd.set_detect_anomaly(True)

    def end(self) -> None:
        """Restore the detection's state."""
        torch.autograd.set_detect_anomaly(self._was_on)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Write a report of a NaN found in backward, and raise one error.

        Raises:
            AnomalyFound: If an operation's gradient is NaN.
        """
        if name != "backward":
            yield
            return
        with warnings.catch_warnings(record=True) as caught:
            # PyTorch first warns, with the place of the call, and then raises.
            warnings.simplefilter("always")
            try:
                yield
                found = None
            except RuntimeError as error:
                if "returned nan values" not in str(error):
                    raise
                found = error
        place = ""
        for warning in caught:
            if _TRACEBACK in str(warning.message):
                place = str(warning.message)
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if found is not None:
            raise self._report(found, place) from found

    def _report(self, error: RuntimeError, place: str) -> AnomalyFound:
        what = str(error).split(". ")[0].rstrip(".")
        frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', place)
        own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
        called = ""
        if own:
            file, line, function = own[-1]
            called = f", which was called at {function} ({Path(file).name}:{line})"
        step = self._moment.step
        message = f"step {step}, micro-batch {self._moment.micro_batch}: {what}{called}; the update was not applied"
        path = self._directory / "traces" / f"anomaly_step_{step:08}_rank{self._rank}.txt"
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{message}\n\n{error}\n\n{place}\n", encoding="utf-8")
        except OSError as failure:
            return AnomalyFound(f"{message}; the report could not be written: {failure}")
        return AnomalyFound(f"{message}; see {path}")
