"""A kernel that never ends must not hold up all other tests."""

import faulthandler

import pytest

# Several times what the longest test takes with as many workers as there are cores.
MOST_SECONDS = 300


@pytest.fixture(autouse=True)
def a_test_ends():
    """End the process of a test that takes too long: a wait for the GPU is interrupted by nothing less.

    With `-n` the test counts as failed, and another worker takes the rest.
    """
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
