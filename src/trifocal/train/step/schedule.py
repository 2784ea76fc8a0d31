"""The learning rate as a pure function of the step, so that a resumed run needs no saved schedule."""

import math

from trifocal.train.config.sections import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """The learning rate of a step, from 1: linear warm-up, then down from the peak to a floor.

    Step k of the warm-up has `peak * k / warmup_steps`; the peak is in step `max(warmup_steps, 1)`, the floor, a share
    of it, in the run's last step and after it.
    """
    schedule, total, peak = config.schedule, config.train.steps, config.optimizer.learning_rate
    step = min(step, total)
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    first, floor = max(schedule.warmup_steps, 1), schedule.minimum_factor * peak
    first = max(first, last_stable_step(config))
    if total <= first or step <= first:
        return peak
    progress = (step - first) / (total - first)
    if schedule.kind == "wsd":
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def last_stable_step(config: RunConfig) -> int:
    """The last step of "wsd" before the rate declines; 0 under a cosine."""
    if config.schedule.kind == "cosine":
        return 0
    return config.train.steps - max(1, round(config.schedule.decay_fraction * config.train.steps))


def change_step(config: RunConfig) -> int:
    """The last step with `data.weights`, before `data.weights_after`; 0: it is not known."""
    return config.data.change_step or last_stable_step(config)


def is_due(step: int, interval: int, last: bool) -> bool:
    """Whether something done every `interval` steps (0: never), and after the last one, is done after this one."""
    return interval > 0 and (last or step % interval == 0)
