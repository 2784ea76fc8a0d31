"""The GPU's driver is started for the command that answers at once, and never where it is not wanted."""

import ctypes
import threading

import pytest

from trifocal import cli
from trifocal.cli import gpu_driver


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        (["generate", "run", "--prompt", "x"], True),
        (["generate", "run", "--prompt", "x", "--device", "cpu"], False),
        (["generate", "run", "--prompt", "x", "--device=cpu"], False),
        (["report", "run"], False),
    ],
)
def test_only_generate_on_a_gpu_starts_it(
    arguments: list[str], starts: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(gpu_driver, "start_driver", lambda: started.append(True))
    assert cli.main(arguments) == 2
    assert started == [True] * starts


def test_without_a_gpu_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    gpu_driver.start_driver()
    for thread in threading.enumerate():
        if thread.name == "GPU driver":
            thread.join()
    assert not failures
