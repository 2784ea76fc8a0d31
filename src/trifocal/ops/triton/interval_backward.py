"""The backward kernels of interval attention; see `interval`.

No atomics: every sum has one order, so two runs give equal bits. The compressed branch has few key tiles, and they are
seen by very different numbers of queries: the rows of each are split into `parts` programs, whose sums a small kernel
adds in order.

Backward takes the gradient of the mixed output and the branch's gate instead of their product `gate * d_o`, which
would be one more tensor a branch.
"""

from typing import Any

from torch import Tensor

from trifocal.ops.triton.common import Tile, unit_stride
from trifocal.ops.triton.interval import IntervalProblem
from trifocal.ops.triton.interval_d_q import launch_d_q
from trifocal.ops.triton.interval_dkdv import launch_d_k_d_v


def launch_backward(
    problem: IntervalProblem,
    d_q: Tensor | None = None,
    d_q_tile: Tile | None = None,
    d_k_d_v_tile: Tile | None = None,
    parts: int | None = None,
    tma: bool | None = None,
    hopper_d_q: dict[str, Any] | None = None,
    hopper_d_k_d_v: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention.

    Args:
        problem: Inputs, in any strides.
        d_q: Gradient of the queries from elsewhere, contiguous, [B, T, H, D], that this one is added to in place.
        d_q_tile, d_k_d_v_tile, parts, tma: Configuration instead of the table's, for measurements.
        hopper_d_q, hopper_d_k_d_v: Configurations of the Hopper kernels, to take them.

    Returns:
        d_q, d_k, d_v, contiguous, in the types of q, k, v.
    """
    problem = problem._replace(**{name: unit_stride(getattr(problem, name)) for name in ("d_o", "q", "k", "v")})
    d_q = launch_d_q(problem, d_q, d_q_tile, tma, hopper_d_q)
    return d_q, *launch_d_k_d_v(problem, d_k_d_v_tile, parts, tma, hopper_d_k_d_v)
