"""The parallel form of a model by a run's configuration."""

import pytest
import torch

from tests.train.tiny import make_config
from trifocal.distributed.processes import DistributedContext
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.train.setup import parallelize_model


@pytest.mark.parametrize(
    ("shards", "local_size", "says"),
    [(1, 2, r"^parallel\.shards is 1: hsdp would share nothing"), (0, 1, "^each machine has one process, and ")],
)
def test_hybrid_sharding_without_shards_is_refused(tmp_path, shards, local_size, says):
    """It would be a slower DDP, which could not name the process whose gradient is not finite."""
    config = make_config(tmp_path, "--parallel.mode", "hsdp", "--parallel.shards", str(shards))
    with torch.device("meta"):
        model = DecoderLM(config.model)
    with pytest.raises(UserError, match=says):
        parallelize_model(model, config, DistributedContext(0, 2, local_size))
