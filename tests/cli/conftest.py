"""A finished tiny run for all tests of this folder, which leave it as it is but for evaluations."""

import pytest

from tests.train.tiny import write_config
from trifocal.cli import main


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", str(write_config(folder))]) == 0
    return folder / "run"
