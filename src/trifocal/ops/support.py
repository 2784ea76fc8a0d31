"""What the kernels can take: devices, types, widths, geometries. `ops.dispatch` asks before it chooses."""

import functools
import importlib.util
import math
import os

import torch
from torch import Tensor

from trifocal.ops.geometry import Geometry

OLDEST_CAPABILITY = (8, 0)
WIDEST_HEAD = 256
MAX_HEADS_OF_A_GROUP = 64
BLOCK_MULTIPLE = 16
MAX_STRIDES_OF_BLOCK = 64
# PyTorch's FlashAttention takes 256, but the backward pass of wider heads than this needs the memory of some GPUs.
WIDEST_FLASH_HEAD = 192
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_reason(
    q: Tensor, v: Tensor | None, geometry: Geometry | None, scale: float | None = None, *, decoding: bool = False
) -> str | None:
    """Why the kernels cannot take these inputs, None when they can, by device, type and shape of q [B, T, H, D] and v
    [B, *, G, V]; v is None for an operation without heads.
    """
    if scale is not None and not 0.0 < scale < math.inf:
        return f"the scale must be positive and finite, got {scale}"
    obstacle = _device_reason(q.device.type, q.device.index, q.dtype)
    if obstacle or v is None:
        return obstacle
    # In a graph that is compiled for any size these are symbols, and each comparison is a guard.
    num_heads, dim, num_groups, value_dim = q.shape[2], q.shape[3], v.shape[2], v.shape[3]
    if dim > WIDEST_HEAD or value_dim > WIDEST_HEAD:
        return f"D and V may be at most {WIDEST_HEAD}, got {dim} and {value_dim}"
    if num_heads > MAX_HEADS_OF_A_GROUP * num_groups:
        return f"a group may have at most {MAX_HEADS_OF_A_GROUP} query heads, got {num_heads // num_groups}"
    if geometry is None:
        return None
    stride, selection_block = geometry.compression_stride, geometry.selection_block_size
    if stride & (stride - 1):
        return f"the compression stride must be a power of two, got {stride}"
    if selection_block % BLOCK_MULTIPLE:
        return f"the selection block must be a multiple of {BLOCK_MULTIPLE} tokens, got {selection_block}"
    if decoding and selection_block > MAX_STRIDES_OF_BLOCK * stride:
        return f"decoding takes selection blocks of at most {MAX_STRIDES_OF_BLOCK} strides, got {geometry}"
    return None


def _device_reason(device_type: str, device_index: int | None, dtype: torch.dtype) -> str | None:
    return _device_obstacle(device_type, device_index, dtype, os.environ.get("TRITON_INTERPRET") == "1")


# Compiled graphs take the answer as a constant: it depends only on the device and type. Setting this attribute is
# all that `torch.compiler.assume_constant_result` does, after importing the compiler.
_device_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _device_obstacle(device_type: str, device_index: int | None, dtype: torch.dtype, interpreted: bool) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device_type == "cpu" and interpreted:
        if dtype not in (torch.float32, torch.float16):
            return f"Triton's interpreter takes float32 and float16, got {dtype}"
        return None
    if device_type != "cuda" or torch.version.hip is not None:
        return f"the tensors are not on a CUDA device but on {device_type!r}"
    capability = torch.cuda.get_device_capability(device_index)
    if capability < OLDEST_CAPABILITY:
        return f"the device must have compute capability 8.0 or newer, it has {capability[0]}.{capability[1]}"
    if dtype not in FLOAT_TYPES:
        return f"the type must be bfloat16, float16 or float32, got {dtype}"
    return None


def flash_attention_obstacle(device_type: str, device_index: int | None, dtype: torch.dtype, width: int) -> str:
    """Why FlashAttention of PyTorch, for the dense baseline, cannot take heads of this width; empty when it can."""
    if device_type != "cuda" or torch.version.hip is not None:
        return "the tensors are not on a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention takes bfloat16 and float16, got {dtype}"
    if width > WIDEST_FLASH_HEAD:
        return f"FlashAttention takes D and V up to {WIDEST_FLASH_HEAD} here, got {width}"
    capability = torch.cuda.get_device_capability(device_index)
    if capability < OLDEST_CAPABILITY:
        return f"FlashAttention needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    return ""


flash_attention_obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]
