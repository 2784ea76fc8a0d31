"""Runs checks one after the other and reports; a check that raises has failed, and the others still run."""

import time
from collections.abc import Callable, Sequence

import torch

from trifocal.checks.measurement import CheckResult, Measurement, Report, Skipped, Status
from trifocal.checks.registry import Check, choose
from trifocal.errors import one_line
from trifocal.runlog import environment
from trifocal.train.checkpoint.random_state import random_state, restore_random_state
from trifocal.train.config.check import choose_device

Started = Callable[[Check, int, int], None]
Finished = Callable[[CheckResult], None]


def run(
    *,
    device: str = "auto",
    only: Sequence[str] = (),
    on_start: Started | None = None,
    on_result: Finished | None = None,
) -> Report:
    """Run checks on this machine.

    Args:
        device: `"auto"`, `"cpu"` or `"cuda"`; auto takes a GPU if there is one.
        only: Names of checks; all if there are none.
        on_start: Called before each check with it, its number from 1 and how many there are.
        on_result: Called after each check.

    Returns:
        The report; a command should exit with its `exit_status`.

    Raises:
        UserError: If a name is unknown, or there is no such device.
    """
    checks = choose(only)
    chosen = choose_device(device)
    results = []
    for number, check in enumerate(checks, 1):
        if on_start is not None:
            on_start(check, number, len(checks))
        result = run_check(check, chosen)
        results.append(result)
        if on_result is not None:
            on_result(result)
    return Report(_describe(chosen), tuple(results), environment())


def run_check(check: Check, device: torch.device) -> CheckResult:
    """Run one check; the random generators are left as they were."""
    state = random_state()
    begin = time.perf_counter()
    found: Measurement | Skipped | Exception
    try:
        found = check.measure(device)
    except Exception as error:
        found = error
    finally:
        restore_random_state(state)
    seconds = time.perf_counter() - begin
    identity = (check.name, check.guards, check.what)
    if isinstance(found, Measurement):
        status: Status = "passed" if found.passed else "failed"
        return CheckResult(*identity, status, found.figure, found.bound, found.unit, found.details, seconds)
    if isinstance(found, Skipped):
        return CheckResult(*identity, "skipped", None, None, "", (found.reason,), seconds)
    detail = f"{type(found).__name__}: {one_line(found, 1000)}"
    return CheckResult(*identity, "failed", None, None, "", (detail,), seconds)


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
