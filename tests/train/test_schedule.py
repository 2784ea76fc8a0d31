"""The learning rate at the places that matter."""

import itertools

import pytest

from trifocal.train.run_config import ScheduleSection
from trifocal.train.schedule import learning_rate


def rates(warmup_steps: int, total_steps: int, minimum_factor: float = 0.1, **more: int) -> list[float]:
    schedule = ScheduleSection(warmup_steps=warmup_steps, minimum_factor=minimum_factor, **more)
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


def test_a_single_step_has_the_peak() -> None:
    assert rates(1, 1) == [2.0]


def test_a_floor_of_one_is_a_constant_rate() -> None:
    assert rates(0, 5, minimum_factor=1.0) == [2.0] * 5


def test_a_second_warm_up_leads_from_the_floor_to_the_stretched_cosine() -> None:
    short, plain = rates(4, 20), rates(4, 40)
    # Twice the steps, and the rate would leap from the floor to half-way up.
    assert plain[20] > 5 * short[-1]
    values = rates(4, 40, rewarmup_start=20, rewarmup_steps=8)
    assert values[:20] == plain[:20]
    assert values[27:] == plain[27:]
    rise = [later - earlier for earlier, later in itertools.pairwise([short[-1], *values[20:28]])]
    assert rise == pytest.approx([(plain[27] - short[-1]) / 8] * 8)


def test_a_second_warm_up_past_the_end_stays_near_the_floor() -> None:
    assert rates(0, 10, rewarmup_start=8, rewarmup_steps=100)[-2:] == pytest.approx([0.2, 0.2])


def test_a_second_warm_up_may_not_begin_in_the_first() -> None:
    with pytest.raises(ValueError, match="rewarmup_start 3 lies in the first warm-up of 4 steps"):
        ScheduleSection(warmup_steps=4, rewarmup_start=3, rewarmup_steps=2)
