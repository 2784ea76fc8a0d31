"""The notes of a run that goes on."""

from pathlib import Path

from tests.train.tiny import make_config
from trifocal.train.launch import resume_notes


def test_every_key_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    saved = make_config(tmp_path)
    now = make_config(tmp_path, "--optimizer.beta2", "0.9", "--train.compile", "true", "--log.sinks", "wandb", name="x")
    note = "learning rate: 0.0055 in step 4, 0.00232 in step 5"
    assert resume_notes(saved, now, 4)[1:] == [note] and resume_notes(saved, now, 6)[1:] == []
    assert resume_notes(saved, now, 4)[0] == (
        "goes on from step 4 of 6; differs from the saved configuration: train.compile false -> true, "
        'optimizer.beta2 0.95 -> 0.9, log.sinks "" -> "wandb"'
    )
