"""The checks of the machinery around training: healthy ones pass, each fault fails."""

import contextlib
import json
import time

import pytest
import torch

from trifocal.checks import operation_checks as operation
from trifocal.data import DataConfig
from trifocal.errors import UserError
from trifocal.runlog import Heartbeat
from trifocal.train import load_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", [operation.heartbeat, operation.unknown_flags, operation.failing_source])
def test_healthy(check):
    found = check(CPU)
    assert found.passed, found


def test_heartbeat_finds_beats_at_the_start_of_a_phase_only():
    """Written by the training thread when it enters a phase: silent while it is busy."""

    class AtPhaseStart:
        def __init__(self, path, rank, interval_seconds):
            self.path = path / f"rank{rank}.jsonl"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        @contextlib.contextmanager
        def phase(self, name):
            row = {"unix_time_seconds": time.time(), "phase": name, "phase_seconds": 0.0}
            self.path.write_text(json.dumps(row) + "\n")
            yield

    found = operation.heartbeat(CPU, make_heartbeat=AtPhaseStart)
    assert not found.passed
    assert found.figure > 0.9


def test_heartbeat_forgives_a_machine_that_was_busy_once():
    started = []

    class HeldUpOnce(Heartbeat):
        def _beat(self, writer, status):
            if len(started) > 1:
                super()._beat(writer, status)

        def __enter__(self):
            started.append(self)
            return super().__enter__()

    found = operation.heartbeat(CPU, make_heartbeat=HeldUpOnce)
    assert found.passed, found
    assert len(started) > 1


def test_heartbeat_finds_a_phase_that_is_not_named():
    class Mute(Heartbeat):
        def phase(self, name):
            return super().phase("other")

    assert not operation.heartbeat(CPU, make_heartbeat=Mute).passed


def test_heartbeat_finds_an_age_that_stands_still():
    class Frozen(Heartbeat):
        def snapshot(self, status="running"):
            return super().snapshot(status) | {"phase_seconds": 1.0}

    assert not operation.heartbeat(CPU, make_heartbeat=Frozen).passed


def test_unknown_flags_find_flags_that_are_swallowed():
    def swallow(path, overrides):
        try:
            return load_config(path, overrides)
        except UserError:
            return load_config(path)

    found = operation.unknown_flags(CPU, load=swallow)
    assert found.figure == len(operation.BAD_OVERRIDES)


def test_unknown_flags_find_keys_that_are_swallowed():
    def swallow(path, overrides):
        try:
            return load_config(path, overrides)
        except UserError:
            if overrides:
                raise

    assert operation.unknown_flags(CPU, load=swallow).figure == len(operation.BAD_TABLES)


def test_unknown_flags_find_a_refusal_that_does_not_say_what():
    def mumble(path, overrides):
        try:
            return load_config(path, overrides)
        except UserError:
            raise UserError("bad arguments") from None

    assert not operation.unknown_flags(CPU, load=mumble).passed


def test_failing_source_finds_a_silent_fallback():
    def fall_back(config):
        try:
            return operation.first_batch(config)
        except (UserError, OSError):
            return operation.first_batch(DataConfig(source="synthetic"))

    found = operation.failing_source(CPU, first_batch=fall_back)
    assert found.figure == 8


def test_failing_source_finds_one_that_reads_what_it_can():
    """A text that is not UTF-8, read with replacement characters."""

    def lenient(config):
        if "latin1" in config.source:
            return operation.first_batch(DataConfig(source="synthetic"))
        return operation.first_batch(config)

    found = operation.failing_source(CPU, first_batch=lenient)
    assert found.figure == 1
    assert "latin1" in found.details[1]
