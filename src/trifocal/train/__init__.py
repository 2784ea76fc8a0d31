"""Training: configuration, preflight, the loop, checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trifocal.train.config.load import load_config
    from trifocal.train.config.sections import RunConfig
    from trifocal.train.launch import resume, train
    from trifocal.train.nonfinite import NonFiniteError
    from trifocal.train.result import TrainResult

__all__ = ["NonFiniteError", "RunConfig", "TrainResult", "load_config", "resume", "train"]

_FILES = {
    "NonFiniteError": "nonfinite",
    "RunConfig": "config.sections",
    "TrainResult": "result",
    "load_config": "config.load",
    "resume": "launch",
    "train": "launch",
}


def __getattr__(name: str) -> Any:
    # A command that only reads a run does not wait for the trainer and PyTorch's distributed packages.
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
