"""Checks of arguments: every message has the given and the expected value."""

import math
import numbers

import torch
from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, num_compressed_slots, num_packed_compressed_blocks

FLOAT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_rank(name: str, x: Tensor, pattern: str) -> None:
    """Raise ValueError unless x has as many dimensions as the pattern, `"[B, T, H]"`, names."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor {pattern}, got {type(x).__name__}")
    if x.ndim != pattern.count(",") + 1:
        raise ValueError(f"{name} must have the shape {pattern}, got {list(x.shape)}")
    if x.layout != torch.strided:
        raise ValueError(f"{name} must be a plain (strided) tensor, got one of layout {x.layout}")


def check_floats(name: str, x: Tensor) -> None:
    """Raise ValueError unless x has one of the types that attention is computed in."""
    if x.dtype not in FLOAT_TYPES:
        raise ValueError(f"{name} must be of float64, float32, bfloat16 or float16, got {x.dtype}")


def check_same_kind(name: str, x: Tensor, other: Tensor, of: str = "q") -> None:
    """Raise ValueError unless x has the dtype and the device of another tensor, called `of`."""
    if x.dtype != other.dtype:
        raise ValueError(f"{name} must have the dtype of {of}, {other.dtype}, got {x.dtype}")
    if x.device != other.device:
        raise ValueError(f"{name} must be on the device of {of}, {other.device}, got {x.device}")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Raise ValueError unless tensors, by their names, are contiguous."""
    for name, x in tensors.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides of {list(x.stride())}")


def check_type(name: str, value: object, *types: type) -> None:
    """Raise ValueError unless the value has one of these types, which checked it when it was made."""
    if not isinstance(value, types):
        expected = " or ".join(one.__name__ for one in types)
        raise ValueError(f"{name} must be a {expected}, got {type(value).__name__}")


def check_geometry(geometry: object) -> None:
    """Raise ValueError unless this is a Geometry."""
    check_type("geometry", geometry, Geometry)


def check_number(name: str, value: float) -> None:
    """Raise ValueError unless the value is a real number; its bounds are the caller's."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")


def check_whole_number(name: str, value: int, lowest: int, highest: int | None = None) -> None:
    """Raise ValueError unless the value is an integer within the bounds; a compiler's symbol counts as one."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {value}")
    if highest is not None and value > highest:
        raise ValueError(f"{name} may be at most {highest}, got {value}")


def check_queries_and_keys(q: Tensor, k: Tensor, *, name: str, keys: str) -> None:
    """Raise ValueError unless q [B, T, H, D] and k, called `name`, [B, `keys`, G, D] fit one another."""
    check_rank("q", q, "[B, T, H, D]")
    check_floats("q", q)
    if 0 in q.shape:
        raise ValueError(f"q [B, T, H, D] may have no empty dimension, got {list(q.shape)}")
    check_rank(name, k, f"[B, {keys}, G, D]")
    check_same_kind(name, k, q)
    batch, _, num_heads, dim = q.shape
    if k.shape[0] != batch or k.shape[3] != dim:
        raise ValueError(
            f"{name} [B, {keys}, G, D] must share B and D with q [B, T, H, D], got {list(k.shape)} and {list(q.shape)}"
        )
    num_groups = k.shape[2]
    if num_groups == 0 or num_heads % num_groups:
        raise ValueError(
            f"the heads of q must be a multiple of the groups of {name}, got H = {num_heads} and G = {num_groups}"
        )


def check_index_tensors(q_idx: Tensor, k_idx: Tensor) -> None:
    """Raise ValueError unless index queries [B, T, G, Di] and index keys [B, S, Di] fit one another."""
    check_rank("q_idx", q_idx, "[B, T, G, Di]")
    check_floats("q_idx", q_idx)
    check_rank("k_idx", k_idx, "[B, S, Di]")
    if 0 in q_idx.shape or q_idx.shape[::3] != k_idx.shape[::2]:
        raise ValueError(
            "k_idx [B, S, Di] must share B and Di with q_idx [B, T, G, Di], which may have no empty dimension, "
            f"got {list(k_idx.shape)} and {list(q_idx.shape)}"
        )
    check_same_kind("k_idx", k_idx, q_idx, of="q_idx")


def check_attention_arguments(q: Tensor, k: Tensor, v: Tensor, *, names: tuple[str, str], keys: str) -> None:
    """Raise ValueError unless q [B, T, H, D], and k and v, called `names`, [B, `keys`, G, *], fit one another."""
    k_name, v_name = names
    check_queries_and_keys(q, k, name=k_name, keys=keys)
    check_rank(v_name, v, f"[B, {keys}, G, V]")
    check_same_kind(v_name, v, q)
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{v_name} [B, {keys}, G, V] must share B, {keys} and G with {k_name} [B, {keys}, G, D], "
            f"got {list(v.shape)} and {list(k.shape)}"
        )


def resolve_documents(cu_seqlens: Tensor | Documents | None, q: Tensor, num_keys: int) -> Documents | None:
    """Check packed boundaries against q [B, T, ...] and the keys; a `Documents` was checked when it was made."""
    batch, num_queries = q.shape[:2]
    if num_queries > num_keys:
        raise ValueError(f"q may not have more positions than there are keys, got T = {num_queries} and S = {num_keys}")
    if cu_seqlens is None:
        return None
    if batch != 1:
        raise ValueError(f"cu_seqlens needs B = 1: pack the documents one after the other, got B = {batch}")
    documents = Documents.of(cu_seqlens, num_keys)
    if documents.ids.device != q.device:
        raise ValueError(f"cu_seqlens must be on the device of q, {q.device}, got {documents.ids.device}")
    return documents


def resolve_scale(scale: float | None, q: Tensor) -> float:
    """The factor on the scores as a number; 1/sqrt(D) where none is given."""
    if scale is None:
        return 1.0 / math.sqrt(q.shape[-1])
    try:
        factor = float(scale)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"scale must be a number, got {scale!r}") from error
    # Not `math.isfinite`, which a compiler with symbolic shapes cannot follow.
    if not abs(factor) < math.inf:
        raise ValueError(f"scale must be finite, got {scale!r}")
    return factor


def check_branches(v_cmp: Tensor, v_slc: Tensor, v_win: Tensor) -> None:
    """Raise ValueError unless the three branches share their groups and the width of their values."""
    shapes = [list(v.shape) for v in (v_cmp, v_slc, v_win)]
    if len({(groups, width) for _, _, groups, width in shapes}) > 1:
        raise ValueError(
            "v_cmp [B, C, G, V], v_slc [B, S, G, V] and v_win [B, S, G, V] must share G and V, "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )


def check_compressed_count(k_cmp: Tensor, geometry: Geometry, num_keys: int, documents: Documents | None) -> None:
    """Raise ValueError unless k_cmp holds the compressed blocks of `num_keys` tokens."""
    given, expected = k_cmp.shape[1], num_compressed_slots(num_keys, geometry, documents)
    if documents is not None and given != expected:
        expected = num_packed_compressed_blocks(documents, geometry)
    if given != expected:
        raise ValueError(
            f"k_cmp must hold C = {expected} compressed blocks for {num_keys} keys "
            f"(block {geometry.compression_block_size}, stride {geometry.compression_stride}), got C = {given}"
        )


def check_selected_blocks(selected_blocks: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise ValueError unless selected_blocks is [B, T, G, N] of integers beside q and k."""
    name, integers = "selected_blocks", (torch.int32, torch.int64)
    check_beside(name, selected_blocks, "[B, T, G, N]", (*q.shape[:2], k.shape[2]), q, integers)


def check_beside(
    name: str, x: Tensor, pattern: str, sizes: tuple[int, ...], q: Tensor, types: tuple[torch.dtype, ...] = ()
) -> None:
    """Raise ValueError unless x has these first sizes and one of these types, or any of floats, beside q."""
    check_rank(name, x, pattern)
    if tuple(x.shape[: len(sizes)]) != sizes:
        known = ", ".join(pattern[1:-1].split(", ")[: len(sizes)])
        part = f"= {list(sizes)}" if len(sizes) == x.ndim else f"with [{known}] = {list(sizes)}"
        raise ValueError(f"{name} must have the shape {pattern} {part}, got {list(x.shape)}")
    if types and x.dtype not in types:
        raise ValueError(
            f"{name} must be of {' or '.join(str(t).removeprefix('torch.') for t in types)}, got {x.dtype}"
        )
    if not types:
        check_floats(name, x)
    if x.device != q.device:
        raise ValueError(f"{name} must be on {q.device}, as other tensors of this call are, got {x.device}")


def check_window_keys(q: Tensor, k_win: Tensor, num_keys: int, window_size: int, *, packed: bool) -> None:
    """Raise ValueError unless k_win holds every token that a window can reach, and none too many."""
    fewest = num_keys if packed else min(num_keys, q.shape[1] + window_size - 1)
    if not fewest <= k_win.shape[1] <= num_keys:
        raise ValueError(
            f"k_win must hold between {fewest} and {num_keys} keys (S = {num_keys}, T = {q.shape[1]}, "
            f"w = {window_size}), got {k_win.shape[1]}"
        )
