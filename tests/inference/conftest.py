"""The small models of tests/models."""

from tests.models.conftest import make_config, make_model

__all__ = ["make_config", "make_model"]
