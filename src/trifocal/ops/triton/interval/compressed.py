"""Compressed attention: query `t` sees the blocks that end at or before it. Kernels: `interval.common`."""

from torch import Tensor

from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, place_compressed_blocks
from trifocal.ops.triton.combine import row_sums
from trifocal.ops.triton.interval.common import Branch, IntervalProblem
from trifocal.ops.triton.interval.dkdv import launch_backward
from trifocal.ops.triton.interval.forward import launch_forward


def compressed_forward(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    geometry: Geometry,
    num_keys: int,
    scale: float,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """Attend to the compressed blocks in each query's past; arguments and results as of `launch_forward`."""
    branch = _branch(q, k_cmp, geometry, num_keys, documents)
    return launch_forward(q, k_cmp, v_cmp, scale, branch)


def compressed_backward(
    d_o: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    o: Tensor | None,
    lse: Tensor,
    geometry: Geometry,
    num_keys: int,
    scale: float,
    documents: Documents | None,
    d_lse: Tensor | None = None,
    delta: Tensor | None = None,
    gate: Tensor | None = None,
    d_q: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of compressed attention: d_q, d_k_cmp, d_v_cmp. `d_o` and `delta`, computed from o unless given, are as
    in `IntervalProblem`; a given d_q is added to.
    """
    if delta is None:
        delta = row_sums(d_o, o, d_lse)
    branch = _branch(q, k_cmp, geometry, num_keys, documents)
    problem = IntervalProblem(d_o, q, k_cmp, v_cmp, lse, delta, gate, scale, branch)
    return launch_backward(problem, d_q)


def _branch(q: Tensor, k_cmp: Tensor, geometry: Geometry, num_keys: int, documents: Documents | None) -> Branch:
    branch = Branch(
        block=geometry.compression_block_size, stride=geometry.compression_stride, query_shift=num_keys - q.shape[1]
    )
    if documents is None:
        return branch
    first_blocks, (begin, end) = place_compressed_blocks(documents, k_cmp.shape[1], geometry)
    return branch._replace(
        ids=documents.ids, positions=documents.positions, first_blocks=first_blocks, query_begin=begin, query_end=end
    )
