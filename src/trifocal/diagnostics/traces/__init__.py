"""Traces on demand; see `tracer.py`."""

from trifocal.diagnostics.traces.anomalies import AnomalyFound
from trifocal.diagnostics.traces.tracer import HOOKED, INSIDE_LAYERS, TRACES, UNBOUNDED, Tracer

__all__ = ["HOOKED", "INSIDE_LAYERS", "TRACES", "UNBOUNDED", "AnomalyFound", "Tracer"]
