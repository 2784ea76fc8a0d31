"""Traces of some steps; see `tracer.py`."""

from trifocal.runlog.traces.tracer import HOOKED, INSIDE_LAYERS, TRACES, Tracer

__all__ = ["HOOKED", "INSIDE_LAYERS", "TRACES", "Tracer"]
