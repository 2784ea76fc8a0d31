"""Window attention: query `t` sees the keys `t - w < s <= t` of its document. Kernels: `interval.common`.

Per tile of 128 rows at 16 heads a group, 8 queries: 519 keys are seen, 505 of them by every row.
FLOPs: forward `2 * T * w * H * (D + V)`, backward 2.5 times as many, and 7/5 of that executed, since d_q and d_k, d_v
make the scores each for itself.
"""

from torch import Tensor

from trifocal.ops.layout import Documents
from trifocal.ops.triton.combine import row_sums
from trifocal.ops.triton.interval.common import Branch, IntervalProblem
from trifocal.ops.triton.interval.dkdv import launch_backward
from trifocal.ops.triton.interval.forward import launch_forward


def window_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: int,
    scale: float,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """Attend to the last `window_size` keys.

    Args:
        q: Queries, [B, T, H, D]; the last T positions of the keys.
        k: Keys, [B, S, G, D].
        v: Values, [B, S, G, V].
        window_size: Keys that a query sees, its own included.
        scale: Factor on the scores.
        documents: Packed documents, or None.

    Returns:
        o, [B, T, H, V], in q's type, and lse, [B, T, H], fp32, natural log.
    """
    return launch_forward(q, k, v, scale, window_branch(q, k, window_size, documents))


def window_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    window_size: int,
    scale: float,
    documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of window attention.

    Args:
        d_o: Gradient of o, [B, T, H, V].
        q, k, v, window_size, scale, documents: Arguments of forward.
        o, lse: From forward.

    Returns:
        d_q, d_k, d_v in the types of q, k, v.
    """
    branch = window_branch(q, k, window_size, documents)
    problem = IntervalProblem(d_o, q, k, v, lse, row_sums(d_o, o), None, scale, branch)
    d_q, d_k, d_v = launch_backward(problem)
    return d_q, d_k, d_v


def window_branch(q: Tensor, k: Tensor, window_size: int, documents: Documents | None) -> Branch:
    """The interval of keys of each query; arguments of `window_forward`."""
    num_keys = k.shape[1]
    branch = Branch(window_size=min(window_size, num_keys), query_shift=num_keys - q.shape[1])
    if documents is None:
        return branch
    return branch._replace(
        ids=documents.ids, positions=documents.positions, query_begin=documents.ids, query_end=documents.cu_seqlens
    )
