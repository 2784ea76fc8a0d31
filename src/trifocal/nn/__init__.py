"""Modules that own parameters: attention, its compressor and gates, and the decoder block around it."""

from trifocal.nn.attention import DenseAttention, NSAttention, RotaryTables
from trifocal.nn.block import Block, RMSNorm, SwiGLU
from trifocal.nn.compressor import MeanCompressor, MLPCompressor
from trifocal.nn.gate import GroupSoftmaxGate, SigmoidGate
from trifocal.nn.rope import rotary_tables, rotate

__all__ = [
    "Block",
    "DenseAttention",
    "GroupSoftmaxGate",
    "MLPCompressor",
    "MeanCompressor",
    "NSAttention",
    "RMSNorm",
    "RotaryTables",
    "SigmoidGate",
    "SwiGLU",
    "rotary_tables",
    "rotate",
]
