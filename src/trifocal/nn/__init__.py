"""Modules that own parameters: attention, its compressor and gates, and the decoder block around it."""

from trifocal.nn.attention import DenseAttention, NSAttention, WindowAttention
from trifocal.nn.attention_base import RotaryTables
from trifocal.nn.block import Block, SwiGLU
from trifocal.nn.chooser import choice_recall
from trifocal.nn.compressor import MeanCompressor, MLPCompressor
from trifocal.nn.gate import SigmoidGate
from trifocal.nn.norm import RMSNorm
from trifocal.nn.rope import RopeScaling, rotary_frequencies, rotary_tables, rotate
from trifocal.nn.selected_attention import SelectedAttention

__all__ = [
    "Block",
    "DenseAttention",
    "MLPCompressor",
    "MeanCompressor",
    "NSAttention",
    "RMSNorm",
    "RopeScaling",
    "RotaryTables",
    "SelectedAttention",
    "SigmoidGate",
    "SwiGLU",
    "WindowAttention",
    "choice_recall",
    "rotary_frequencies",
    "rotary_tables",
    "rotate",
]
