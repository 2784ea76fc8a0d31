"""The attention once more, in float64, query by query, as the definition reads: slow, plain, and shared with nothing.

It judges `trifocal.ops` and therefore uses nothing of it but the numbers of a `Geometry`.
"""

import torch
from torch import Tensor

from trifocal.ops import Geometry


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    geometry: Geometry,
    *,
    document_lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Native Sparse Attention of packed documents, B = 1, T = S; differentiable.

    Returns:
        o, [1, S, H, V], and the chosen blocks, [1, S, G, N], -1 pads.
    """
    num_heads, num_groups = q.shape[2], k_cmp.shape[2]
    heads_per_group = num_heads // num_groups
    outputs, choices = [], []
    start = first_slot = 0
    for length in document_lengths:
        num_blocks = len(_block_starts(geometry, length))
        for position in range(length):
            visible = [
                first_slot + i
                for i, first in enumerate(_block_starts(geometry, length))
                if first + geometry.compression_block_size - 1 <= position
            ]
            near = [start + s for s in range(position + 1) if s > position - geometry.window_size]
            for group in range(num_groups):
                heads = slice(group * heads_per_group, (group + 1) * heads_per_group)
                query = q[0, start + position, heads]
                o_cmp, p_cmp = _attend(query, k_cmp[0, visible, group], v_cmp[0, visible, group])
                chosen = _choose(p_cmp.sum(0).tolist(), position, geometry)
                full = [start + s for s in range(position + 1) if s // geometry.selection_block_size in chosen]
                o_slc, _ = _attend(query, k_slc[0, full, group], v_slc[0, full, group])
                o_win, _ = _attend(query, k_win[0, near, group], v_win[0, near, group])
                gate = gates[0, start + position, heads, :, None]
                outputs.append(gate[:, 0] * o_cmp + gate[:, 1] * o_slc + gate[:, 2] * o_win)
                choices.append(chosen + [-1] * (geometry.num_selected_blocks - len(chosen)))
        start += length
        first_slot += num_blocks
    o = torch.stack(outputs).view(1, start, num_heads, -1)
    return o, torch.tensor(choices, dtype=torch.int32).view(1, start, num_groups, -1)


def _block_starts(geometry: Geometry, length: int) -> range:
    return range(0, length - geometry.compression_block_size + 1, geometry.compression_stride)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention of a group's heads at one position; zeros where there is no key."""
    if not len(keys):
        return query.new_zeros(len(query), values.shape[-1]), query.new_zeros(len(query), 0)
    p = torch.softmax(query @ keys.T / query.shape[-1] ** 0.5, dim=-1)
    return p @ values, p


def _choose(p_cmp: list[float], position: int, geometry: Geometry) -> list[int]:
    """Blocks that a query attends to in full, ascending, from the probabilities of the compressed blocks it sees."""
    size, stride = geometry.selection_block_size, geometry.compression_stride
    own = position // size
    importance = [0.0] * (own + 1)
    for i, p in enumerate(p_cmp):
        for token in range(i * stride, i * stride + geometry.compression_block_size):
            importance[token // size] += p / stride
    forced = {j for j in range(geometry.num_initial_blocks) if j <= own}
    forced |= {own - back for back in range(geometry.num_local_blocks) if own >= back}
    free = sorted(set(range(own + 1)) - forced, key=lambda j: (-importance[j], j))
    return sorted(forced | set(free[: geometry.num_selected_blocks - len(forced)]))
