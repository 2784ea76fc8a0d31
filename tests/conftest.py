"""Loads `tests.settings`, but for xdist's process that only deals tests out: it needs no PyTorch."""


def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.settings")
