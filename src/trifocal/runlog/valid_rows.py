"""The usable rows of a run's files, which may be of another version, or edited by hand.

A row that lacks a required field is left out and counted. Any other value of a wrong type is left out of its row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from trifocal.runlog.jsonl import Row

_Test = Callable[[object], bool]
# The calendar functions of the system fail beyond it.
_LAST_MOMENT = 1e11
_LARGEST = 1e100
_NOT_FINITE = (math.inf, -math.inf)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number, not a bool, and small enough for sums of squares to be finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_moment(value: object) -> bool:
    return is_number(value) and 0 <= value <= _LAST_MOMENT


def _is_age(value: object) -> bool:
    return is_number(value) and abs(value) <= _LAST_MOMENT


def _or_null(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _are_ages(value: object) -> bool:
    return isinstance(value, dict) and all(_is_age(part) for part in value.values())


def _is_figure(value: object) -> bool:
    """Whether a value is null or a number, which may be non-finite, as a loss may be."""
    return value is None or is_number(value) or isinstance(value, float)


def _are_shares(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(is_number(part) for part in value))


_METRICS: Mapping[str, _Test] = {"step": _is_count, "unix_time_seconds": _is_moment}
KIND_FIELDS: Mapping[str, Mapping[str, _Test]] = {
    "train": {},
    "evaluation": {},
    "telemetry": {"layer": _is_count},
    "event": {"name": _is_text, "severity": _is_text, "message": _is_text},
}

HEARTBEAT_FIELDS: Mapping[str, _Test] = {
    "unix_time_seconds": _is_moment,
    "host": _is_text,
    "pid": _is_count,
    "status": _is_text,
    "step": _is_count,
    "phase": _is_text,
    "total_seconds": _are_ages,
}
# The test of each other field, and the value in place of one that is missing or fails it.
_REST_OF_BEAT: Mapping[str, tuple[_Test, Any]] = {
    "interval_seconds": (lambda value: is_number(value) and 0 < value <= _LAST_MOMENT, 5.0),
    "phase_seconds": (_is_age, 0.0),
    "expected_phase_seconds": (_or_null(_is_age), None),
    "stall_limit_seconds": (_or_null(_is_age), None),
    "typical_seconds": (_are_ages, {}),
    "recent_seconds": (_are_ages, {}),
    "compiling": (lambda value: isinstance(value, bool), False),
    "compile_seconds": (_is_age, 0.0),
    "where": (_is_text, ""),
    "process_start": (_or_null(_is_count), None),
    "memory_allocated_bytes": (_or_null(is_number), None),
    "memory_reserved_bytes": (_or_null(is_number), None),
    "loss": (_or_null(_is_figure), None),
    "tokens_per_second": (_or_null(is_number), None),
}


def valid_metrics(rows: Sequence[Row]) -> list[Row]:
    """The metric rows that have the required fields, without values of a wrong type."""
    kept = []
    for row in rows:
        needed = {**_METRICS, **KIND_FIELDS.get(row["kind"], {})} if _is_text(row["kind"]) else None
        if needed is None or not _has(row, needed):
            continue
        if row["kind"] in ("train", "evaluation", "telemetry"):
            tests = {"kind": _is_text, "selected_distance_shares": _are_shares, **needed}
            row = {name: value for name, value in row.items() if tests.get(name, _is_figure)(value)}
        if row["kind"] == "telemetry":
            # Charts of layers cannot show non-finite values.
            row = {name: None if value in _NOT_FINITE or value != value else value for name, value in row.items()}
        kept.append(row)
    return kept


def valid_heartbeats(rows: Sequence[Row]) -> list[Row]:
    """The heartbeat rows that have the required fields, with defaults in the others."""
    rest = _REST_OF_BEAT.items()
    return [
        row | {name: row[name] if name in row and test(row[name]) else default for name, (test, default) in rest}
        for row in rows
        if _has(row, HEARTBEAT_FIELDS)
    ]


def _has(row: Row, needed: Mapping[str, _Test]) -> bool:
    return all(name in row and test(row[name]) for name, test in needed.items())
