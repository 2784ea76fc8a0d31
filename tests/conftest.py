"""Settings for all tests, made before Triton is imported: without a GPU, kernels run in Triton's interpreter."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Under nohup, or in the background of a shell, signals are ignored, and so they would be by the runs that tests start.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that only sleeps."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()
