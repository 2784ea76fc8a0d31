"""Seeing a run: heartbeat, metrics, progress, environment, memory, stacks."""

from trifocal.diagnostics.environment import environment, host_memory_bytes, write_backends, write_environment
from trifocal.diagnostics.hardware import peak_bf16_flops
from trifocal.diagnostics.heartbeat import Heartbeat
from trifocal.diagnostics.memory import MemoryStatistics, memory_statistics
from trifocal.diagnostics.metrics import MetricsWriter, read_metrics
from trifocal.diagnostics.progress import Progress
from trifocal.diagnostics.sinks import SINKS, check_sinks, make_sinks
from trifocal.diagnostics.stacks import StackDump
from trifocal.diagnostics.telemetry import AttentionTelemetry
from trifocal.diagnostics.watchdog import Watchdog

__all__ = [
    "SINKS",
    "AttentionTelemetry",
    "Heartbeat",
    "MemoryStatistics",
    "MetricsWriter",
    "Progress",
    "StackDump",
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
