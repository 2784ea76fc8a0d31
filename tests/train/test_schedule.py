"""The learning rate at the places that matter."""

import itertools

import pytest

from trifocal.train.config.sections import ScheduleSection
from trifocal.train.step.schedule import learning_rate


def rates(warmup_steps: int, total_steps: int, minimum_factor: float = 0.1) -> list[float]:
    schedule = ScheduleSection(warmup_steps=warmup_steps, minimum_factor=minimum_factor)
    return [
        learning_rate(step, peak=2.0, total_steps=total_steps, schedule=schedule) for step in range(1, total_steps + 1)
    ]


def test_warms_up_linearly_to_the_peak_and_ends_on_the_floor() -> None:
    values = rates(4, 20)
    assert values[:4] == [0.5, 1.0, 1.5, 2.0]
    assert values[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(values[3:]))
    # Half-way between step 4 and step 20 a cosine stands half-way between peak and floor.
    assert values[11] == pytest.approx((2.0 + 0.2) / 2)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    values = rates(0, 10)
    assert values[0] == 2.0
    assert values[-1] == pytest.approx(0.2)


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert rates(20, 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_floor_of_one_is_a_constant_rate() -> None:
    assert rates(0, 5, minimum_factor=1.0) == [2.0] * 5
