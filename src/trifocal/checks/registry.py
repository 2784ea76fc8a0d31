"""The checks by name, in the order in which they run; docs/runs.md lists the failures that each guards against."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from trifocal.checks import attention_checks, cost_checks, model_checks, operation_checks, training_checks
from trifocal.checks.measurement import Measurement, Skipped
from trifocal.errors import one_line, unknown
from trifocal.runlog.environment import environment
from trifocal.train.checkpoint.random_state import random_state, restore_random_state

STATUSES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Check:
    """A named check of a property, `what`; it `guards` against the failures of these numbers in docs/runs.md."""

    name: str
    guards: tuple[int, ...]
    what: str
    measure: Callable[[torch.device], Measurement | Skipped]


CHECKS: tuple[Check, ...] = (
    Check("full-coverage", (8,), "attention to everything is dense", attention_checks.full_coverage),
    Check("oracle", (7, 8), "attention and gradients, in float64", attention_checks.float64_oracle),
    Check("backend-parity", (8,), "the kernels give the reference's results", attention_checks.backend_parity),
    Check("choice-loss", (), "loss of the choice, in float64, teaches nothing else", attention_checks.taught_choice),
    Check("index-in-any-loop", (), "an index learns in any training loop", model_checks.index_in_any_loop),
    Check("rope-distance", (11,), "scores depend only on distance", attention_checks.rope_distance),
    Check("future-leak", (7,), "no output depends on a later token", model_checks.future_leak),
    Check("decode-equals-prefill", (9, 10), "decoding gives the logits of one pass", model_checks.decode),
    Check("batch-invariance", (), "decoding gives the same bits in any company", model_checks.batch_invariance),
    Check("checkpointing-gradients", (3, 4, 5), "recomputing changes no gradient", model_checks.checkpointing),
    Check("parameter-gradients", (4,), "every parameter gets a gradient", model_checks.parameter_gradients),
    Check("operation-count", (1,), "nothing loops over the sequence", cost_checks.operation_count),
    Check("stored-memory", (6,), "stored memory is linear in length, without copies", cost_checks.stored_memory),
    Check("layer-sweep", (1, 2, 4, 5), "time and memory are linear in layers", cost_checks.layer_sweep),
    Check("random-token-floor", (7,), "random tokens cannot be predicted", training_checks.random_token_floor),
    Check("resume-bit-for-bit", (14,), "a resumed run is the uninterrupted one", training_checks.resume_bit_for_bit),
    Check("master-weights", (15,), "weights stay fp32 under bf16", training_checks.master_weights),
    Check("parallel-gradients", (3, 4, 5), "two processes, DDP or FSDP, compute the gradient of one",
          training_checks.parallel_gradients),
    Check("unknown-flags", (12,), "unknown flags and keys are refused", operation_checks.unknown_flags),
    Check("heartbeat", (2,), "the heartbeat outlives a long operation", operation_checks.heartbeat),
    Check("failing-source", (13,), "data that fail stop the run", operation_checks.failing_source),
)  # fmt: skip


@dataclass(frozen=True)
class CheckResult:
    """One row of the report: a `Check` and its `Measurement`; the details have the reason of a skip or an error."""

    name: str
    guards: tuple[int, ...]
    what: str
    status: Literal["passed", "failed", "skipped"]
    figure: float | None
    bound: float | None
    unit: str
    details: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Report:
    """The results of a run of checks, on one device."""

    on: torch.device
    results: tuple[CheckResult, ...]

    @property
    def device(self) -> str:
        """Its name; of a CPU, the number of threads."""
        gpu = self.on.type == "cuda"
        return torch.cuda.get_device_name(self.on) if gpu else f"cpu, {torch.get_num_threads()} threads"

    @property
    def exit_status(self) -> int:
        """0 if nothing failed, else 1."""
        return int(any(result.status == "failed" for result in self.results))

    def summary(self) -> str:
        """Numbers of passed, failed and skipped checks, in one line."""
        counts = [f"{sum(result.status == status for result in self.results)} {status}" for status in STATUSES]
        return f"{', '.join(counts)} in {sum(result.seconds for result in self.results):.0f} s on {self.device}"

    def to_json(self) -> str:
        """Everything, as JSON; figures that are not finite are strings."""
        rows = [
            {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(result).items()
            }
            for result in self.results
        ]
        content = {"device": self.device, "exit_status": self.exit_status, "results": rows}
        return json.dumps({**content, "environment": environment()}, indent=2, ensure_ascii=False) + "\n"


def chosen_checks(only: Sequence[str]) -> list[Check]:
    """The checks of these names, or all."""
    names = [check.name for check in CHECKS]
    for name in only:
        if name not in names:
            raise unknown("check", name, names)
    return [check for check in CHECKS if not only or check.name in only]


def run_check(check: Check, device: torch.device) -> CheckResult:
    """Run one check, and say what it raises; the random generators are left as they were."""
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
        status: Literal["passed", "failed"] = "passed" if found.passed else "failed"
        return CheckResult(*identity, status, found.figure, found.bound, found.unit, found.details, seconds)
    if isinstance(found, Skipped):
        return CheckResult(*identity, "skipped", None, None, "", (found.reason,), seconds)
    detail = f"{type(found).__name__}: {one_line(found, 1000)}"
    return CheckResult(*identity, "failed", None, None, "", (detail,), seconds)
