"""Back-off: how long, how often, and that nothing is lost or doubled when reading goes on."""

from collections.abc import Iterator

import pytest

from trifocal.data.retry import Activity, DataError, Retry, Stopped, TransientError


class Paused(Activity):
    """Notes the pauses instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def fail_times(count: int, retry_after: float | None = None):
    calls = []

    def action() -> str:
        calls.append(None)
        if len(calls) <= count:
            raise TransientError("HTTP 503", retry_after)
        return "done"

    return action


def test_pauses_double_up_to_the_longest_less_a_random_part() -> None:
    pauses = []
    for _ in range(50):
        activity = Paused()
        assert Retry(8, 1.0, 10.0, activity).call("x", fail_times(7)) == "done"
        pauses.append(activity.pauses)
    for index, full in enumerate((1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0)):
        column = [row[index] for row in pauses]
        assert all(full / 2 <= pause <= full for pause in column)
        # Jitter: processes that failed together come back apart.
        assert len(set(column)) > 40
        assert max(column) - min(column) > full / 4


@pytest.mark.parametrize(("asked", "expected"), [(7.0, 7.0), (1000.0, 10.0)])
def test_retry_after_is_waited_for_up_to_the_longest(asked: float, expected: float) -> None:
    activity = Paused()
    Retry(3, 0.1, 10.0, activity).call("x", fail_times(1, asked))
    assert activity.pauses == [expected]


def test_gives_up_naming_source_attempts_and_last_error() -> None:
    activity = Paused()
    action = fail_times(100)
    with pytest.raises(DataError, match=r"the hub: gave up after 4 attempts in 0 s; the last error: HTTP 503") as info:
        Retry(4, 1.0, 10.0, activity).call("the hub", action)
    assert isinstance(info.value.__cause__, TransientError)
    assert len(activity.pauses) == 3


def test_other_errors_are_raised_at_once() -> None:
    activity = Paused()

    def action() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        Retry(4, 1.0, 10.0, activity).call("x", action)
    assert activity.pauses == []


def test_iterate_goes_on_where_it_broke_off() -> None:
    failures = iter([3, 3, 0, 2, 1, 100])

    def read(place: int | None) -> Iterator[tuple[int, int]]:
        budget = next(failures)
        for number in range(place or 0, 12):
            if budget == 0:
                raise TransientError("cut")
            budget -= 1
            yield number, number + 1

    # Five failures in all, but never three in a row without progress.
    activity = Paused()
    assert [item for item, _ in Retry(3, 1.0, 8.0, activity).iterate("x", read, None)] == list(range(12))
    assert len(activity.pauses) == 5


def test_iterate_gives_up_without_progress() -> None:
    def read(place: int | None) -> Iterator[tuple[int, int]]:
        if place is None:
            yield 0, 1
        raise TransientError("cut")

    got = []
    with pytest.raises(DataError, match="gave up after 3 attempts"):
        for item, _ in Retry(3, 1.0, 8.0, Paused()).iterate("x", read, None):
            got.append(item)
    assert got == [0]


def test_a_pause_ends_when_the_loader_closes() -> None:
    activity = Activity()
    activity.stop.set()
    with pytest.raises(Stopped):
        activity.pause(60.0)
    with pytest.raises(Stopped):
        Retry(3, 60.0, 60.0, activity).call("x", fail_times(1))
