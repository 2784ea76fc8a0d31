"""Decoding: paged caches, continuous batching, sampling on the device.

`Engine` runs many requests at a time. `CachedModel` is the model with its caches, for your own loops.
"""

from trifocal.inference.cached_model import CachedModel, CachedSequence, OutOfRows
from trifocal.inference.engine import Engine, RequestTooLong
from trifocal.inference.pages import OutOfPages
from trifocal.inference.request import Completion, Request, TokenScore, Update
from trifocal.inference.sampler import Sampling

__all__ = [
    "CachedModel",
    "CachedSequence",
    "Completion",
    "Engine",
    "OutOfPages",
    "OutOfRows",
    "Request",
    "RequestTooLong",
    "Sampling",
    "TokenScore",
    "Update",
]
