"""Training: configuration, preflight, the loop, checkpoints."""

from trifocal.train.config.load import load_config
from trifocal.train.config.sections import RunConfig
from trifocal.train.launch import resume, train
from trifocal.train.loop import TrainResult
from trifocal.train.nonfinite import NonFiniteError

__all__ = ["NonFiniteError", "RunConfig", "TrainResult", "load_config", "resume", "train"]
