"""The heartbeat of a run whose steps are taken one by one."""

import pytest

from trifocal.runlog.heartbeat import Heartbeat


@pytest.fixture
def heartbeat(tmp_path):
    with Heartbeat(tmp_path / "heartbeat", interval_seconds=60) as heartbeat:
        yield heartbeat
