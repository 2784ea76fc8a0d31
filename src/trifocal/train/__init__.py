"""Training: configuration, preflight, the loop, checkpoints."""

from trifocal.train.arguments import load_config
from trifocal.train.launch import resume, train
from trifocal.train.nonfinite import NonFiniteError
from trifocal.train.result import TrainResult
from trifocal.train.run_config import RunConfig

__all__ = ["NonFiniteError", "RunConfig", "TrainResult", "load_config", "resume", "train"]
