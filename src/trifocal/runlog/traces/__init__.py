"""Traces of some steps; see `tracer.py`."""

from trifocal.runlog.traces.anomalies import AnomalyFound
from trifocal.runlog.traces.tracer import HOOKED, INSIDE_LAYERS, TRACES, UNBOUNDED, Tracer

__all__ = ["HOOKED", "INSIDE_LAYERS", "TRACES", "UNBOUNDED", "AnomalyFound", "Tracer"]
