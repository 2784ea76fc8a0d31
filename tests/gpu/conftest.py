"""A kernel that never ends must not hold up all other tests."""

import faulthandler

import pytest

# Several times what the longest test takes with as many workers as there are cores.
MOST_SECONDS = 200


@pytest.fixture(autouse=True)
def a_test_ends():
    """End the process of a test that takes too long: no signal interrupts a wait for the GPU.

    With `-n` the test counts as failed, and another worker takes the rest.
    """
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
