"""The learning rate as a pure function of the step, so that a resumed run needs no saved schedule."""

import math

from trifocal.train.config.sections import RunConfig, ScheduleSection


def learning_rate(step: int, *, peak: float, total_steps: int, schedule: ScheduleSection) -> float:
    """The learning rate of a step, from 1 to `total_steps`: linear warm-up, then a cosine from the peak to a floor.

    Step k of the warm-up has `peak * k / warmup_steps`; the peak is in step `max(warmup_steps, 1)`, the floor, a share
    of it, in the last one.
    """
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    first, floor = max(schedule.warmup_steps, 1), schedule.minimum_factor * peak
    if total_steps <= first:
        return peak
    progress = min(1.0, (step - first) / (total_steps - first))
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def learning_rate_of(config: RunConfig, step: int) -> float:
    """The learning rate of a run's step; of one past its last step, that of the last."""
    total = config.train.steps
    return learning_rate(
        min(step, total), peak=config.optimizer.learning_rate, total_steps=total, schedule=config.schedule
    )


def is_due(step: int, interval: int, last: bool) -> bool:
    """Whether something done every `interval` steps (0: never), and after the last one, is done after this one."""
    return interval > 0 and (last or step % interval == 0)
