"""Native Sparse Attention on the kernels: the order of its stages, written once, and the one boundary of autograd.

The stages run without gradients, then `combine_branches` mixes their outputs. Its backward is that of all stages: the
combination gives d_gates and the branches' row sums `delta`, the selected branch d_q, and the others add to d_q in
place. A branch's own gradient, `gate * d_o`, is never written: its kernels multiply probabilities by the gate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifocal.ops import operators
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, longest_document

# Kinds of calls whose kernels were compiled.
_compiled: set[tuple[object, ...]] = set()


class Branches(NamedTuple):
    """Inputs of the branches and the results of forward; shapes as in `trifocal.ops.nsa_attention`."""

    k_cmp: Tensor
    v_cmp: Tensor
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    o_cmp: Tensor
    lse_cmp: Tensor
    o_slc: Tensor
    lse_slc: Tensor
    o_win: Tensor
    lse_win: Tensor
    selected_blocks: Tensor


class Stages(NamedTuple):
    """The code of the forward stages: the operators that torch sees, or the kernels themselves."""

    compressed: Callable[..., tuple[Tensor, Tensor]]
    select: Callable[..., Tensor]
    selected: Callable[..., tuple[Tensor, Tensor]]
    window: Callable[..., tuple[Tensor, Tensor]]


OPERATORS = Stages(
    operators.compressed_attention,
    lambda *args: operators.select_blocks(*args, "triton"),
    operators.selected_attention,
    operators.window_attention,
)


def nsa_attention(
    q: Tensor,
    inputs: tuple[Tensor, ...],
    gates: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
    selected_blocks: Tensor | None,
) -> Tensor:
    """The mixture of the three branches; see `trifocal.ops.nsa_attention`. `inputs` are k_cmp, v_cmp, k_slc, v_slc,
    k_win, v_win.
    """
    if documents is not None:
        # Placed once for all stages, forward and backward.
        documents = documents.with_blocks(geometry)
    call = (q, inputs, gates, geometry, scale, documents, selected_blocks)
    # A tensor of another class, a fake one for example, may have no kernels to run.
    if q.is_cuda and type(q) is Tensor and not torch.compiler.is_compiling():
        backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, *inputs, gates))
        precompile_kernels(*call, backward=backward)
    with torch.no_grad():
        branches = run_stages(OPERATORS, *call)
    return combine_branches(q, *branches, geometry, scale, documents)


def run_stages(
    stages: Stages,
    q: Tensor,
    inputs: tuple[Tensor, ...],
    gates: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
    selected_blocks: Tensor | None,
) -> Branches:
    """Run the stages in front of the combination; arguments as for `nsa_attention`."""
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = inputs
    num_keys = k_slc.shape[1]
    o_cmp, lse_cmp = stages.compressed(q, k_cmp, v_cmp, geometry, num_keys, scale, documents)
    if selected_blocks is None:
        selected_blocks = stages.select(q, k_cmp, lse_cmp, geometry, num_keys, scale, documents)
    o_slc, lse_slc = stages.selected(q, k_slc, v_slc, selected_blocks, geometry, scale, documents)
    o_win, lse_win = stages.window(q, k_win, v_win, geometry.window_size, scale, documents)
    made = (o_cmp, lse_cmp, o_slc, lse_slc, o_win, lse_win, selected_blocks)
    return Branches(k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, *made)


def run_backward(
    d_o: Tensor, q: Tensor, branches: Branches, geometry: Geometry, scale: float, documents: Documents | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the gated mixture for d_o [B, T, H, V], on the kernels: of q, the branches' k and v, and gates."""
    from trifocal.ops.triton.combine import combine_backward
    from trifocal.ops.triton.interval.compressed import compressed_backward
    from trifocal.ops.triton.interval.window import window_backward
    from trifocal.ops.triton.selected.backward import selected_backward

    b = branches
    d_gates, delta = combine_backward(d_o, b.o_cmp, b.o_slc, b.o_win, b.gates.dtype)
    gate_cmp, gate_slc, gate_win = b.gates.unbind(-1)
    d_q, d_k_slc, d_v_slc = selected_backward(
        d_o, q, b.k_slc, b.v_slc, b.o_slc, b.lse_slc, b.selected_blocks, geometry, scale, documents,
        gate=gate_slc, delta=delta[1],
    )  # fmt: skip
    num_keys = b.k_slc.shape[1]
    d_q, d_k_cmp, d_v_cmp = compressed_backward(
        d_o, q, b.k_cmp, b.v_cmp, None, b.lse_cmp, geometry, num_keys, scale, documents,
        delta=delta[0], gate=gate_cmp, d_q=d_q,
    )  # fmt: skip
    d_q, d_k_win, d_v_win = window_backward(
        d_o, q, b.k_win, b.v_win, None, b.lse_win, geometry.window_size, scale, documents,
        delta=delta[2], gate=gate_win, d_q=d_q,
    )  # fmt: skip
    return d_q, d_k_cmp, d_v_cmp, d_k_slc, d_v_slc, d_k_win, d_v_win, d_gates


def precompile_kernels(
    q: Tensor,
    inputs: tuple[Tensor, ...],
    gates: Tensor,
    geometry: Geometry,
    scale: float,
    documents: Documents | None,
    selected_blocks: Tensor | None,
    *,
    backward: bool,
) -> None:
    """Compile the kernels of a call of `nsa_attention` at the same time, by a call on the meta device, unless one of
    its kind was compiled: lengths are of one kind up to the next power of two.
    """
    from trifocal.ops.triton.launch import only_compile

    lengths = (*q.shape[:2], inputs[2].shape[1], longest_document(inputs[2].shape[1], documents))
    num_selected = None if selected_blocks is None else selected_blocks.shape[-1]
    widths = (*q.shape[2:], *inputs[2].shape[2:], inputs[3].shape[3])
    rules = (q.dtype, gates.dtype, widths, geometry, documents is None, num_selected, backward)
    kind = (q.device, *(length.bit_length() for length in lengths), *rules)
    if kind in _compiled:
        return
    with torch.no_grad(), only_compile(q.device):
        _run_kernels(backward, *_meta((q, inputs, gates, geometry, scale, documents, selected_blocks)))
    _compiled.add(kind)


def _run_kernels(backward: bool, *call: Any) -> None:
    """The kernels of a call of `nsa_attention` and its backward; results are dropped."""
    from trifocal.ops.triton.combine import combine_forward
    from trifocal.ops.triton.interval.compressed import compressed_forward
    from trifocal.ops.triton.interval.window import window_forward
    from trifocal.ops.triton.mean_compression import mean_compress_backward
    from trifocal.ops.triton.scoring import select_blocks_forward
    from trifocal.ops.triton.selected.forward import selected_forward

    kernels = Stages(compressed_forward, select_blocks_forward, selected_forward, window_forward)
    b = run_stages(kernels, *call)
    q, _, gates, geometry, scale, documents, _ = call
    o = combine_forward(b.o_cmp, b.o_slc, b.o_win, gates)
    if backward:
        _, d_k_cmp, d_v_cmp, *_ = run_backward(o, q, b, geometry, scale, documents)
        for gradient in (d_k_cmp, d_v_cmp):
            # The next step of backward, where blocks are means.
            mean_compress_backward(gradient, geometry, b.k_slc.shape[1], documents)


def _meta(x: Any) -> Any:
    """The same without memory."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, Documents):
        return Documents(*map(_meta, x))
    return tuple(map(_meta, x)) if isinstance(x, tuple) else x


def _combine(q: Tensor, *inputs: Any) -> Tensor:
    from trifocal.ops.triton.combine import combine_forward

    b = Branches(*inputs[:_NUM_BRANCHES])
    return combine_forward(b.o_cmp, b.o_slc, b.o_win, b.gates)


def _combine_backward(d_o: Tensor, q: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return run_backward(d_o, q, Branches(*inputs[:_NUM_BRANCHES]), *inputs[_NUM_BRANCHES:])


_NUM_BRANCHES = len(Branches._fields)
_ARGUMENTS = ", ".join(f"Tensor {name}" for name in ("q", *Branches._fields))
_ARGUMENTS += f", SymInt[] geometry, float scale, {operators.DOCUMENTS}"

combine_branches: operators.Operator[Tensor] = operators.Operator(
    "combine_branches",
    _ARGUMENTS,
    "Tensor",
    _combine,
    lambda q, *inputs: inputs[Branches._fields.index("o_cmp")].new_empty((*q.shape[:3], inputs[1].shape[3])),
)
"""Mix the branches' outputs. Tensors that only backward needs are arguments too, so that they get gradients."""
combine_branches_backward: operators.Operator[tuple[Tensor, ...]] = operators.Operator(
    "combine_branches_backward",
    f"Tensor d_o, {_ARGUMENTS}",
    f"({', '.join(['Tensor'] * 8)})",
    _combine_backward,
    lambda d_o, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:8]),
)
combine_branches.differentiate(combine_branches_backward, lambda inputs, _: inputs)
