"""The notes of a run that goes on."""

from pathlib import Path

import pytest
from tests.train.tiny import make_config

from trifocal.train.resuming import differences, resume_notes
from trifocal.train.schedule import learning_rate_of

LONG = ("--train.steps", "1000", "--schedule.warmup_steps", "20")


def note(folder: Path, step: int, *flags: str) -> str:
    """On the learning rate of a run of 1,000 steps that goes on with flags."""
    return resume_notes(make_config(folder, *LONG), make_config(folder, *LONG, *flags), step)[-1]


def test_every_key_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    saved = make_config(tmp_path)
    now = make_config(tmp_path, "--optimizer.beta2", "0.9", "--train.compile", "true", "--log.sinks", "wandb", name="x")
    assert differences(saved, now).keys() == {"train.compile", "optimizer.beta2", "log.sinks"}
    assert resume_notes(saved, now, 4)[0] == (
        "goes on from step 4 of 6; differs from the saved configuration: train.compile false -> true, "
        'optimizer.beta2 0.95 -> 0.9, log.sinks "" -> "wandb"'
    )


def test_a_schedule_that_is_followed_is_no_jump(tmp_path: Path) -> None:
    for step in (1, 10, 500):
        assert note(tmp_path, step).startswith("learning rate: ")
        assert "jump" not in note(tmp_path, step)
    assert len(resume_notes(make_config(tmp_path, *LONG), make_config(tmp_path, *LONG), 1000)) == 1


def test_a_jump_comes_with_the_flags_that_replace_it(tmp_path: Path) -> None:
    """And with these flags it is none."""
    more = ("--train.steps", "2000")
    said = note(tmp_path, 1000, *more)
    assert said.startswith("learning rate: 0.001 in step 1,000, 0.00556 in step 1,001; it jumps to 5.56 times; ")
    flags = said.partition(" add ")[2].split()
    assert flags == ["--schedule.rewarmup_start", "1000", "--schedule.rewarmup_steps", "20"]
    said = note(tmp_path, 1000, *more, *flags)
    assert said == "learning rate: 0.001 in step 1,000, 0.00122 in step 1,001, rising to 0.00543 in step 1,020"
    config = make_config(tmp_path, *LONG, *more, *flags)
    assert learning_rate_of(config, 1001) == pytest.approx(0.00122, rel=0.01)


def test_a_lower_peak_is_a_fall(tmp_path: Path) -> None:
    assert "it falls to 0.0997 times" in note(tmp_path, 500, "--optimizer.learning_rate", "1e-3")
