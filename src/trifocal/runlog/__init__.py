"""The files that a run writes: heartbeat, metrics, environment, stack dumps, traces."""

from trifocal.runlog.environment import environment, host_memory_bytes, write_backends, write_environment
from trifocal.runlog.hardware import peak_bf16_flops
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.memory_statistics import memory_statistics
from trifocal.runlog.metrics import MetricsWriter, read_metrics
from trifocal.runlog.progress import Progress
from trifocal.runlog.sinks import SINKS, check_sinks, make_sinks
from trifocal.runlog.stalls.watchdog import Watchdog

__all__ = [
    "SINKS",
    "Heartbeat",
    "MetricsWriter",
    "Progress",
    "Watchdog",
    "check_sinks",
    "environment",
    "host_memory_bytes",
    "make_sinks",
    "memory_statistics",
    "peak_bf16_flops",
    "read_metrics",
    "write_backends",
    "write_environment",
]
