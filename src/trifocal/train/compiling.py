"""Notes in the log when a step compiles: it is slow, and not stalled."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trifocal.train.run_logger import RunLogger

COMPILE_TIME = "about half a minute, less once its caches are filled"


class CompileNotes:
    """Remembers the kinds of micro-batches whose code is compiled.

    Args:
        compiles: Whether the run compiles or records graphs.
        log: Takes the events.
    """

    def __init__(self, compiles: bool, log: RunLogger) -> None:
        self._compiles, self._log = compiles, log
        self._known: set[bool] = set()

    @contextmanager
    def step(self, step: int, documents: Sequence[int]) -> Iterator[str]:
        """Around a step.

        Args:
            step: Its number.
            documents: Packed documents of each micro-batch; 0 for whole rows.

        Yields:
            The name of its forward phase: "compile" if the step compiles code for a kind of micro-batch, which is
            logged before and after; else "forward".
        """
        new = {number > 0 for number in documents} - self._known if self._compiles else set()
        if not new:
            yield "forward"
            return
        self._known |= new
        kinds = " and ".join("packed documents" if packed else "whole rows" for packed in sorted(new))
        self._log.log_event("compiling", f"step {step} compiles the model for {kinds}, which takes {COMPILE_TIME}")
        begin = time.perf_counter()
        yield "compile"
        self._log.log_event("compiled", f"step {step} compiled in {time.perf_counter() - begin:.0f} s")
