"""The backward kernels of interval attention; see `interval`.

No atomics: every sum has one order, so two runs give equal bits. The compressed branch has few key tiles, and they are
seen by very different numbers of queries: the rows of each are split into `parts` programs, and a small kernel adds
their sums in order.

Backward takes the gradient of the mixed output and the branch's gate instead of their product `gate * d_o`, which
would be one more tensor a branch.
"""

from torch import Tensor

from trifocal.ops.triton.common import unit_stride
from trifocal.ops.triton.interval.common import IntervalProblem
from trifocal.ops.triton.interval.d_q import launch_d_q
from trifocal.ops.triton.interval.dkdv import launch_dkdv


def launch_backward(problem: IntervalProblem, d_q: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention.

    Args:
        problem: Inputs, in any strides.
        d_q: Gradient of the queries from elsewhere, contiguous, [B, T, H, D], that this one is added to in place.

    Returns:
        d_q, d_k, d_v, contiguous, in the types of q, k, v.
    """
    problem = problem._replace(**{name: unit_stride(getattr(problem, name)) for name in ("d_o", "q", "k", "v")})
    return launch_d_q(problem, d_q), *launch_dkdv(problem)
