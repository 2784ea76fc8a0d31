"""A tiny model of bytes, and a server of it."""

import pytest
import torch

pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from tests.serve.servers import serving
from trifocal.testing.small_models import make_model, small_config


@pytest.fixture(scope="session")
def decoder():
    return make_model(small_config(vocab_size=257), torch.device("cpu"), torch.float32).eval()


@pytest.fixture(scope="session")
def served(decoder):
    with serving(decoder) as served:
        yield served
