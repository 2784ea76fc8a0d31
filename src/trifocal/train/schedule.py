"""The learning rate as a pure function of the step, so that a resumed run needs no schedule state of its own."""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, minimum_factor: float) -> float:
    """Linear warm-up, then a cosine from the peak to a floor.

    Args:
        step: The step about to be taken, from 1 to total_steps.
        peak: Largest learning rate, taken in step `max(warmup_steps, 1)`.
        warmup_steps: Steps of warm-up; step k of them has `peak * k / warmup_steps`.
        total_steps: Steps of the run; the last one has the floor.
        minimum_factor: The floor, as a share of the peak.

    Returns:
        The learning rate of that step.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    first = max(warmup_steps, 1)
    if total_steps <= first:
        return peak
    progress = min(1.0, (step - first) / (total_steps - first))
    floor = minimum_factor * peak
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def is_due(step: int, interval: int, last: bool) -> bool:
    """Whether something that is done every so many steps (0: never), and after the last one, is done after this one."""
    return interval > 0 and (last or step % interval == 0)
