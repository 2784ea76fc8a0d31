"""Usable rows of a run's files, which may be damaged or edited by hand: a reader skips and counts the others."""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from trifocal.runlog.jsonl import Row

_Test = Callable[[object], bool]
# The calendar functions of the system fail beyond it.
_LAST_MOMENT = 1e11
_LARGEST = 1e100


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number, not a bool, and small enough for sums of squares to be finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_seconds(value: object) -> bool:
    return is_number(value) and abs(value) <= _LAST_MOMENT


def _are_seconds(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_seconds, value.values()))


def _or_null(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


_METRICS: Mapping[str, _Test] = {
    "kind": _is_text,
    "step": _is_count,
    "unix_time_seconds": lambda value: is_number(value) and 0 <= value <= _LAST_MOMENT,
}
_OF_KIND: Mapping[str, Mapping[str, _Test]] = {
    "telemetry": {"layer": _is_count},
    "event": {"name": _is_text, "severity": _is_text, "message": _is_text},
}
_HEARTBEAT: Mapping[str, _Test] = {
    "unix_time_seconds": _METRICS["unix_time_seconds"],
    "host": _is_text,
    "pid": _is_count,
    "process_start": _or_null(_is_count),
    "interval_seconds": lambda value: is_number(value) and 0 < value <= _LAST_MOMENT,
    "status": _is_text,
    "step": _is_count,
    "phase": _is_text,
    "phase_seconds": _is_seconds,
    "expected_phase_seconds": _or_null(_is_seconds),
    "stall_limit_seconds": _or_null(_is_seconds),
    "typical_seconds": _are_seconds,
    "recent_seconds": _are_seconds,
    "total_seconds": _are_seconds,
    "compiling": lambda value: isinstance(value, bool),
    "compile_seconds": _is_seconds,
    "where": _is_text,
    "memory_allocated_bytes": _or_null(is_number),
    "memory_reserved_bytes": _or_null(is_number),
    "loss": lambda value: value is None or is_number(value) or isinstance(value, float),
    "tokens_per_second": _or_null(is_number),
}


def is_metrics_row(row: Row) -> bool:
    """Whether a row of `metrics.jsonl` has kind, step and time, and the fields that its kind needs."""
    return _has(row, _METRICS) and _has(row, _OF_KIND.get(row["kind"], {}))


def is_heartbeat_row(row: Row) -> bool:
    """Whether a row of a heartbeat has every field, with a value of its type."""
    return _has(row, _HEARTBEAT)


def _has(row: Mapping[str, Any], needed: Mapping[str, _Test]) -> bool:
    return all(name in row and test(row[name]) for name, test in needed.items())
