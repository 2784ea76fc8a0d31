"""Decoding: caches that hold what the branches need, and sampling."""

from trifocal.generate.cache import DenseCache, NSACache, make_caches
from trifocal.generate.sampling import generate, sample, stream

__all__ = ["DenseCache", "NSACache", "generate", "make_caches", "sample", "stream"]
