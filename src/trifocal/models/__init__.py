"""Whole models: the decoder, its configuration, its counts, its files."""

from trifocal.models.counts import ComputedFlops, Flops, computed_flops_per_token, flops_per_token, parameter_count
from trifocal.models.decoder import DecoderLM
from trifocal.models.io import load_weights, save_weights
from trifocal.models.layer_memory import TrainingSetup
from trifocal.models.memory import Memory, training_memory
from trifocal.models.model_config import ModelConfig

__all__ = [
    "ComputedFlops",
    "DecoderLM",
    "Flops",
    "Memory",
    "ModelConfig",
    "TrainingSetup",
    "computed_flops_per_token",
    "flops_per_token",
    "load_weights",
    "parameter_count",
    "save_weights",
    "training_memory",
]
