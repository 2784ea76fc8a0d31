"""Window attention: query `t` sees the keys `t - w < s <= t` of its document. Kernels: `interval.common`."""

from torch import Tensor

from trifocal.ops.layout import Documents
from trifocal.ops.triton.combine import row_sums
from trifocal.ops.triton.interval.common import Branch, IntervalProblem
from trifocal.ops.triton.interval.dkdv import launch_backward
from trifocal.ops.triton.interval.forward import launch_forward


def window_forward(
    q: Tensor, k: Tensor, v: Tensor, window_size: int, scale: float, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    """Attend to the last `window_size` keys, the query's own included; arguments and results as of `launch_forward`."""
    return launch_forward(q, k, v, scale, _branch(q, k, window_size, documents))


def window_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None,
    lse: Tensor,
    window_size: int,
    scale: float,
    documents: Documents | None,
    delta: Tensor | None = None,
    gate: Tensor | None = None,
    d_q: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of window attention: d_q, d_k, d_v; `d_o`, `delta`, `gate` and `d_q` as in `compressed_backward`."""
    if delta is None:
        delta = row_sums(d_o, o)
    branch = _branch(q, k, window_size, documents)
    problem = IntervalProblem(d_o, q, k, v, lse, delta, gate, scale, branch)
    return launch_backward(problem, d_q)


def _branch(q: Tensor, k: Tensor, window_size: int, documents: Documents | None) -> Branch:
    num_keys = k.shape[1]
    branch = Branch(window_size=min(window_size, num_keys), query_shift=num_keys - q.shape[1])
    if documents is None:
        return branch
    return branch._replace(
        ids=documents.ids, positions=documents.positions, query_begin=documents.ids, query_end=documents.cu_seqlens
    )
