"""One tiny model for all tests of this package."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # As in tests.settings, which may be read after this file; transformers imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("transformers")

from trifocal.hf import TrifocalForCausalLM
from trifocal.testing.small_models import make_model, small_config


@pytest.fixture(scope="session")
def decoder():
    """In float64, so that another order of a sum is told from another result."""
    return make_model(small_config(), torch.device("cpu"), torch.float64)


@pytest.fixture(scope="session")
def model(decoder):
    """The same for transformers, with the same weights."""
    return TrifocalForCausalLM.from_decoder(decoder, eos_token_id=1, pad_token_id=0).eval()


@pytest.fixture(scope="session")
def rows():
    """Sequences of many lengths: one token, shorter than a compressed block, longer than a window."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, 64, (length,), generator=generator) for length in (41, 1, 3, 26)]
