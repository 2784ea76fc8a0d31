"""The notes of a run that goes on."""

from pathlib import Path

from tests.train.tiny import make_config
from trifocal.train.launch import differences, resume_notes

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


def test_more_steps_are_a_jump(tmp_path: Path) -> None:
    said = note(tmp_path, 1000, "--train.steps", "2000")
    assert said.startswith("learning rate: 0.001 in step 1,000, 0.00556 in step 1,001; it jumps to 5.56 times; ")
    assert "begin a new run with --model.from" in said


def test_a_lower_peak_is_a_fall(tmp_path: Path) -> None:
    assert "it falls to 0.0997 times" in note(tmp_path, 500, "--optimizer.learning_rate", "1e-3")
