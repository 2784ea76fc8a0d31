"""Stopping a run by signals: the first one saves and stops, the second ends the process.

A terminal, `timeout` and Slurm signal all processes of a group. The compiler's workers, gcc and ptxas must outlive
that: a step that waits for them could not end, nor be saved. So the training thread blocks the signals, which all that
it starts inherits, and a separate thread takes them. That thread also answers while training waits in a library.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_INTERRUPT = signal.SIGURG
"""Wakes the training thread; ignored by default, and not among the blocked ones."""
SAME_REQUEST_SECONDS = 2.0
"""One request may come twice: a scheduler signals every process, and torchrun forwards its own signal too."""
_AGAIN_SECONDS = 1.0
"""Longer than the way out of the first step takes. An exception may be lost: Python drops one in a weak reference's
callback, of which PyTorch's compiler has many, and a signal just before a system call does not end its wait."""


class StoppedBeforeFirstStep(KeyboardInterrupt):
    """A signal came before the first step had ended: nothing to save. The exit `status` is 128 and its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} came before the first step had ended")
        self.status = 128 + number


class StopSignals:
    """While active, SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal; unless `nohup` has it ignored) ask the run
    to stop at the end of its step; another one, at least two seconds later, ends the process at once. Before
    `something_to_save` is set, a signal raises `StoppedBeforeFirstStep` in the main thread. SIGUSR1 calls `on_usr1` in
    another thread, and stops nothing.

    Handlers can be set in the main thread only; elsewhere this does nothing. At the end the earlier handlers return.
    """

    def __init__(self, on_usr1: Callable[[], None] = lambda: None) -> None:
        self._on_usr1 = on_usr1
        self.received: str | None = None
        """Name of the signal that asked to stop; None before."""
        self.something_to_save = False
        """Whether a step has ended since the start; the trainer sets it."""
        self._number = 0
        self._received_at = 0.0
        self._ending = False
        self._before: dict[signal.Signals, Any] = {}
        self._blocked_before: set[signal.Signals] = set()
        self._pipe = (-1, -1)
        self._wakeup_before = -1
        self._thread = threading.Thread(target=self._listen, name="trifocal-signals", daemon=True)

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        poll = select.poll()
        poll.register(self._pipe[0], select.POLLIN)
        while True:
            if not poll.poll(_AGAIN_SECONDS * 1000 if self._ends_at_once() else None):
                self._interrupt()
                continue
            number = os.read(self._pipe[0], 1)[0]
            if number == 0:
                return
            if number == signal.SIGUSR1:
                self._on_usr1()
            elif number in self._before and number != _INTERRUPT:
                self._handle(number)

    def _handle(self, number: int) -> None:
        if self.received is not None:
            if time.monotonic() - self._received_at >= SAME_REQUEST_SECONDS:
                os._exit(128 + number)
            return
        self._number, self._received_at = number, time.monotonic()
        self.received = name = signal.Signals(number).name
        again = f"again after {SAME_REQUEST_SECONDS:.0f} s to quit at once"
        what = (
            f"saving at the end of this step; {again}"
            if self.something_to_save
            else "stops before its first step, with nothing to save"
        )
        with contextlib.suppress(OSError):  # The terminal may be gone.
            os.write(2, f"\n{name}: {what}\n".encode())
        self._interrupt()

    def _ends_at_once(self) -> bool:
        return bool(self._number) and not (self.something_to_save or self._ending)

    def _interrupt(self) -> None:
        if self._ends_at_once():
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        # In the main thread, the only one that sets `something_to_save`.
        if self._ends_at_once():
            raise StoppedBeforeFirstStep(self._number)

    @contextlib.contextmanager
    def as_stop_request(self) -> Iterator[None]:
        """Around what a signal may interrupt before the first step has ended: StoppedBeforeFirstStep, also where a
        library has made its own error of it, as Dynamo does while it traces a function of autograd.
        """
        try:
            yield
        except (Exception, StoppedBeforeFirstStep) as error:
            if not self._ends_at_once():
                raise
            self._ending = True
            raise StoppedBeforeFirstStep(self._number) from error

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for number in _SIGNALS:
                if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):
                    # Python writes the signal's number to the pipe; the function has nothing to do.
                    self._before[number] = signal.signal(number, lambda *_: None)
            self._before[_INTERRUPT] = signal.signal(_INTERRUPT, self._raise)
            self._thread.start()
            self._blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        self._ending = True
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked_before)
        for end in self._pipe:
            os.close(end)
