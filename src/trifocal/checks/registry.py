"""The checks by name, in the order in which they run, and the failures of earlier systems that each guards against.

| # | failure |
|---|---|
| 1 | a step that took minutes and looked like a hang: loops over tokens |
| 2 | no means to tell a hang from slowness |
| 3 | checkpointing recomputed every layer as the last one |
| 4 | parameters without a gradient |
| 5 | checkpointing with sharded weights (as 1 and 3) |
| 6 | tens of gigabytes for a small model: a copy of keys and values per query |
| 7 | a loss near zero: queries that saw the token after them |
| 8 | a reference with the bugs of the code that it judged |
| 9 | a single query that saw only the first key |
| 10 | decoding that differed from training |
| 11 | scores that depended on absolute position |
| 12 | flags that did nothing |
| 13 | a failing data source replaced by random tokens |
| 14 | a resume that restored weights alone |
| 15 | 16-bit weights without a master copy |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trifocal.checks import (
    attention_checks,
    cost_checks,
    model_checks,
    operation_checks,
    positions,
    process_checks,
    training_checks,
)
from trifocal.checks.measurement import Measurement, Skipped
from trifocal.errors import unknown


@dataclass(frozen=True)
class Check:
    """A named check.

    Attributes:
        name: As `--only` takes it.
        guards: Numbers of the failures above; none for a promise that no earlier system made.
        what: The property that it proves, in a few words.
        measure: Takes the device; through its other arguments a test puts in a fault.
    """

    name: str
    guards: tuple[int, ...]
    what: str
    measure: Callable[[torch.device], Measurement | Skipped]


CHECKS: tuple[Check, ...] = (
    Check("full-coverage", (8,), "attention to everything is dense", attention_checks.full_coverage),
    Check("oracle", (7, 8), "attention and gradients, in float64", attention_checks.float64_oracle),
    Check("backend-parity", (8,), "the kernels give the reference's results", attention_checks.backend_parity),
    Check("choice-loss", (), "the loss of the choice, in float64, teaches it alone", attention_checks.taught_choice),
    Check("rope-distance", (11,), "scores depend on distance alone", positions.rope_distance),
    Check("future-leak", (7,), "no output depends on a later token", model_checks.future_leak),
    Check("decode-equals-prefill", (9, 10), "decoding gives the logits of one pass", model_checks.decode),
    Check("batch-invariance", (), "decoding gives the same bits in any company", model_checks.batch_invariance),
    Check("checkpointing-gradients", (3, 4, 5), "recomputing changes no gradient", model_checks.checkpointing),
    Check("parameter-gradients", (4,), "every parameter gets a gradient", model_checks.parameter_gradients),
    Check("operation-count", (1,), "nothing loops over the sequence", cost_checks.operation_count),
    Check("stored-memory-growth", (6,), "stored memory is linear in length", cost_checks.stored_memory_growth),
    Check("stored-memory-per-token", (6,), "no copy of keys per query", cost_checks.stored_memory_per_token),
    Check("layer-sweep", (1, 2, 4, 5), "time and memory are linear in layers", cost_checks.layer_sweep),
    Check("random-token-floor", (7,), "random tokens cannot be predicted", training_checks.random_token_floor),
    Check("resume-bit-for-bit", (14,), "a resumed run is the uninterrupted one", training_checks.resume_bit_for_bit),
    Check("master-weights", (15,), "weights stay fp32 under bf16", training_checks.master_weights),
    Check("ddp-gradients", (3, 4), "two processes compute the gradient of one", process_checks.ddp_gradients),
    Check("sharded-gradients", (3, 5), "the same with sharded weights", process_checks.sharded_gradients),
    Check("unknown-flags", (12,), "unknown flags and keys are refused", operation_checks.unknown_flags),
    Check("heartbeat", (2,), "the heartbeat outlives a long operation", operation_checks.heartbeat),
    Check("failing-source", (13,), "data that fail stop the run", operation_checks.failing_source),
)


def choose(only: Sequence[str] = ()) -> tuple[Check, ...]:
    """The checks of these names, in their usual order; all if there are none.

    Raises:
        UserError: If a name is unknown; names the nearest valid one.
    """
    names = [check.name for check in CHECKS]
    for name in only:
        if name not in names:
            raise unknown("check", name, names)
    return tuple(check for check in CHECKS if not only or check.name in only)
