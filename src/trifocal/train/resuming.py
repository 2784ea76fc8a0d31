"""Notes for the user of a resumed run: its step, changed settings, jumps of the learning rate."""

from typing import Any

from trifocal.fields import dotted_fields, value_of
from trifocal.train.run_config import RunConfig
from trifocal.train.schedule import learning_rate_of
from trifocal.train.toml import to_literal

# `--resume` names the folder, which may have been moved.
_NOT_COMPARED = frozenset({"run.directory"})
# The schedule itself changes by less from step to step.
_JUMP = 1.1


def differences(saved: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The keys in which two configurations differ, with both values."""
    found = {}
    for name in dotted_fields(RunConfig):
        before, after = value_of(saved, name), value_of(now, name)
        if name not in _NOT_COMPARED and before != after:
            found[name] = before, after
    return found


def resume_notes(saved: RunConfig, now: RunConfig, step: int) -> list[str]:
    """Sentences for the start of a run that goes on.

    Args:
        saved: The configuration that the run had.
        now: The one that it has now.
        step: Of the checkpoint.
    """
    changed = _shown(differences(saved, now))
    how = f"; differs from the saved configuration: {changed}" if changed else ", with the saved configuration"
    notes = [f"goes on from step {step:,} of {now.train.steps:,}{how}"]
    if step < now.train.steps:
        notes.append(_learning_rate_note(saved, now, step))
    return notes


def _shown(changed: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} {to_literal(before)} -> {to_literal(after)}" for name, (before, after) in changed.items())


def _learning_rate_note(saved: RunConfig, now: RunConfig, step: int) -> str:
    before, after = learning_rate_of(saved, step), learning_rate_of(now, step + 1)
    note = f"learning rate: {before:.3g} in step {step:,}, {after:.3g} in step {step + 1:,}"
    expected = learning_rate_of(saved, step + 1)
    if after > _JUMP * max(before, expected):
        note += f"; it jumps to {after / before:.3g} times" if before else "; it jumps"
        note += "; for a schedule with a warm-up of its own, begin a new run with --model.from this one"
    elif after * _JUMP < min(before, expected):
        note += f"; it falls to {after / before:.3g} times"
    return note
