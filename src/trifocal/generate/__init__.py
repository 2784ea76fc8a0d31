"""Decoding: paged caches, continuous batching, sampling on the device.

`generate` and `stream` continue a batch of prompts. `Engine` runs many requests at a time. `CachedModel` is the model
with its caches, for loops of one's own.
"""

from trifocal.generate.cached_model import CachedModel, CachedSequence, OutOfRows
from trifocal.generate.engine import Engine, RequestTooLong
from trifocal.generate.generation import generate, stream
from trifocal.generate.pages import OutOfPages
from trifocal.generate.request import Completion, Request, Update
from trifocal.generate.sampler import Sampling
from trifocal.generate.text_stream import TextStream

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
    "TextStream",
    "Update",
    "generate",
    "stream",
]
