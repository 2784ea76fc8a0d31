"""Whole models: the decoder, its configuration, its counts, its files."""

from trifocal.models.counts import Flops, flops_per_token, parameter_count
from trifocal.models.decoder import DecoderLM
from trifocal.models.io import load_weights, save_weights
from trifocal.models.model_config import ModelConfig

__all__ = [
    "DecoderLM",
    "Flops",
    "ModelConfig",
    "flops_per_token",
    "load_weights",
    "parameter_count",
    "save_weights",
]
