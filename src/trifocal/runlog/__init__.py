"""The files that a run writes: heartbeat, metrics, environment, stack dumps, traces."""

from trifocal.runlog.metrics import read_metrics

__all__ = ["read_metrics"]
