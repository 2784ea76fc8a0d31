"""A tiny model of bytes, and a server of it."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from tests.serve.servers import Served, serving
from trifocal.models import DecoderLM
from trifocal.testing.small_models import make_model, small_config


@pytest.fixture(scope="session")
def decoder() -> DecoderLM:
    return make_model(small_config(vocab_size=257), torch.device("cpu"), torch.float32).eval()


@pytest.fixture(scope="session")
def served(decoder: DecoderLM) -> Iterator[Served]:
    with serving(decoder) as served:
        yield served
