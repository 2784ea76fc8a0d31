"""Problems for the kernels, with why each is there, and the errors that they may make.

One suite for two devices: without a GPU, small problems in Triton's interpreter, in fp32; with one, the same and large
ones on it, in bf16, fp16 and fp32.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.devices import NEEDS_GPU
from tests.ops import cases
from tests.ops.cases import USUAL, Case, geometry
from trifocal import Geometry
from trifocal.ops import Documents, compressed_attention, select_blocks, selected_attention, window_attention
from trifocal.testing import tolerances
from trifocal.testing.inputs import Inputs, cotangent
from trifocal.testing.tolerances import assert_close, error

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# On a GPU, PyTorch's own attention may err half as much.
FACTOR = 2.0

PAPER = Geometry()
SMALL = geometry(8, 4, 16, 3, 1, 1, 40)


def large(why, rules, queries, heads, groups, dim, value_dim, **rest):
    """A case with as many tokens as a GPU is needed for."""
    return Case(why, rules, queries, heads=heads, groups=groups, dim=dim, value_dim=value_dim, **rest)


LARGE = (
    large("16 heads a group, two batch entries", PAPER, 333, 32, 2, 128, 128, batch=2),
    large("packed: 1 token, around l, long", PAPER, 900, 12, 2, 64, 64, lengths=(1, 31, 32, 33, 500, 2, 301)),
    large("packed: short blocks", SMALL, 600, 12, 2, 64, 64, lengths=(200, 7, 8, 1, 384)),
    large("one head a group, D in two parts", SMALL, 257, 3, 3, 192, 128),
    large("64 heads a group, least dims", SMALL, 129, 64, 1, 16, 16),
    large("rows that no copy engine takes", SMALL, 300, 4, 2, 100, 36),
    large("odd dims, 3 heads a group", PAPER, 131, 6, 2, 71, 41, keys=300, batch=2),
    large("widest", SMALL, 300, 4, 2, 256, 256),
    large("fewer queries than keys", PAPER, 77, 16, 1, 128, 128, keys=900, batch=2),
    large("one query", PAPER, 1, 16, 1, 128, 64, keys=700, batch=2),
    large("block-major: many more blocks than chosen", SMALL, 1500, 8, 2, 64, 64),
    large("few programs: a block's rows in parts", PAPER, 1100, 12, 2, 64, 64, batch=2),
    large("in parts, packed: a document that they cut", PAPER, 1300, 32, 2, 128, 128, lengths=(65, 1100, 1, 134)),
    large("packed, the last queries", PAPER, 700, 12, 2, 64, 64, keys=1300, lengths=(65, 735, 1, 499)),
    large("in parts, fewer queries than keys", PAPER, 500, 16, 1, 128, 64, keys=1500),
)
INTERVALS = (
    Case("several tiles, 3 heads a group, odd dims", USUAL, 37, batch=2, heads=6, groups=2, dim=8, value_dim=5),
    Case("4 heads a group, two parts of D and one of V", USUAL, 45, heads=8, groups=2, dim=24, value_dim=48),
    Case("one head a group, two parts of V", USUAL, 50, heads=2, groups=2, dim=16, value_dim=40),
    Case("16 heads a group, fewer queries than keys", USUAL, 9, keys=52, batch=2, heads=16, dim=16, value_dim=16),
    Case("decoding", USUAL, 1, keys=47, batch=2, heads=8),
    Case("packed: 1 token, under l, exactly l, l + 1, long", USUAL, 71, lengths=(1, 5, 8, 9, 16, 1, 31), heads=4),
    Case("packed: long first, 1-token last", USUAL, 42, lengths=(40, 1, 1), heads=6, groups=2, value_dim=5),
    Case("packed: the last queries", USUAL, 37, keys=75, lengths=(5, 38, 1, 31), heads=4, groups=2),
    Case("nothing to compress", USUAL, 7, heads=2),
)
"""For the kernels of window and compressed attention in small tiles."""


def problems(small, big, *, fewer=()):
    """Parametrise a test by `case` and `dtype`: each case in bf16 on a GPU, in fp32 elsewhere.

    Args:
        small: On any device; on a GPU in fp16 and fp32 too.
        big: For a GPU alone.
        fewer: Those of `big` that run in fp16 and fp32 too.
    """
    half, single = (torch.bfloat16, torch.float16), (torch.float32,)
    rows = [(case, dtype, ()) for case in small for dtype in ((*half, *single) if ON_GPU else single)]
    rows += [(case, torch.bfloat16, NEEDS_GPU) for case in big]
    rows += [(case, dtype, NEEDS_GPU) for case in fewer for dtype in (torch.float16, torch.float32)]
    named = [
        pytest.param(case, dtype, marks=marks, id=f"{case.why}, {str(dtype).removeprefix('torch.')}")
        for case, dtype, marks in rows
    ]
    return pytest.mark.parametrize(("case", "dtype"), named)


def suits_copy_engine(case):
    """Whether rows of 4-byte floats lie at multiples of 16 bytes, and heads divide a tile."""
    heads = case.heads // case.groups
    return case.dim % 4 == 0 and case.value_dim % 4 == 0 and heads & (heads - 1) == 0


def documents_of(case, device=DEVICE):
    return None if case.cu_seqlens is None else Documents.from_cu_seqlens(case.cu_seqlens.to(device), case.num_keys)


def compare(names, actual, exact):
    """Compare tensors, named in one string, with exact ones at float32's tolerance."""
    for name, a, e in zip(names.split(), actual, exact, strict=True):
        assert_close(name, a, e, torch.float32)


def draw(case, dtype, seed=0):
    """Inputs for a case, rounded to `dtype`; the window's keys are as few as will do."""
    reach = case.num_keys
    if case.lengths is None:
        reach = min(case.num_keys, case.queries + case.geometry.window_size - 1)
    return cases.draw(case, dtype, seed, DEVICE, num_window_keys=reach)


def padded(case, inputs):
    """As nn has it for documents: S // d compressed slots, NaN in those that no document fills."""
    if case.lengths is None:
        return inputs
    spare = case.num_keys // case.geometry.compression_stride - inputs.k_cmp.shape[1]
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare), value=torch.nan) for x in inputs[1:3])
    return inputs._replace(k_cmp=k, v_cmp=v)


def choice(case, inputs):
    """The blocks that float64 chooses, for both sides of a comparison."""
    q, k_cmp, v_cmp = (x.detach().double() for x in inputs[:3])
    rules = {"num_keys": case.num_keys, "cu_seqlens": documents_of(case), "backend": "reference"}
    _, lse = compressed_attention(q, k_cmp, v_cmp, case.geometry, **rules)
    return select_blocks(q, k_cmp, lse, case.geometry, **rules)


def allowed(case, inputs, chosen, branch=None):
    """The largest error of an output or a gradient.

    On a GPU, twice the worst error of PyTorch's attention on the same problem; in the interpreter, that of fp32.

    Args:
        case: The problem.
        inputs: Its inputs.
        chosen: The chosen blocks.
        branch: One branch alone; None for the gated mixture of the three.
    """
    if not ON_GPU:
        return tolerances.allowed(torch.float32)
    masks = _branch_masks(case, inputs, chosen)

    def results(leaves):
        pairs = [(leaves.k_cmp, leaves.v_cmp), (leaves.k_slc, leaves.v_slc), (leaves.k_win, leaves.v_win)]
        if branch is not None:
            o = _masked(leaves.q, *pairs[branch], masks[branch])
            wanted = [leaves.q, *pairs[branch]]
        else:
            exact = torch.promote_types(leaves.q.dtype, torch.float32)
            total = torch.zeros((), device=DEVICE, dtype=exact)
            for number, (k, v) in enumerate(pairs):
                total = total + leaves.gates[..., number, None].to(exact) * _masked(leaves.q, k, v, masks[number])
            o, wanted = total.to(leaves.q.dtype), list(leaves)
        d_o = cotangent(o if o.dtype != torch.float64 else o.to(inputs.q.dtype)).to(o.dtype)
        return [o, *torch.autograd.grad(o, wanted, d_o, allow_unused=True, materialize_grads=True)]

    got, exact = results(inputs.leaves()), results(inputs.leaves(torch.float64))
    found = FACTOR * max(error(a, e) for a, e in zip(got, exact, strict=True))
    # Few keys round to almost nothing in PyTorch too: the least bound is a rounding of the type.
    return max(found, torch.finfo(inputs.q.dtype).eps) if case.num_keys < 128 else found


def _branch_masks(case, inputs, chosen):
    """Which keys each head of each query sees in each branch, [B, H, T, keys], bool.

    Read off the reference: with the identity for values, an output is its probabilities.
    """
    x = Inputs(*(leaf.detach().double() for leaf in inputs))
    rules = {"cu_seqlens": documents_of(case), "backend": "reference"}

    def identity(k):
        size = k.shape[1]
        return torch.eye(size, device=DEVICE, dtype=torch.float64)[:, None].expand(case.batch, size, case.groups, size)

    p_cmp, _ = compressed_attention(x.q, x.k_cmp, identity(x.k_cmp), case.geometry, num_keys=case.num_keys, **rules)
    p_slc = selected_attention(x.q, x.k_slc, identity(x.k_slc), chosen, case.geometry, **rules)
    p_win = window_attention(x.q, x.k_win, identity(x.k_win), case.geometry.window_size, **rules)
    return p_cmp.transpose(1, 2) > 0, p_slc.transpose(1, 2) > 0, p_win.transpose(1, 2) > 0


def _masked(q, k, v, mask):
    """PyTorch's attention; zeros, without gradients, for queries that see nothing."""
    if k.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]) + 0.0 * q.sum()
    heads = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(heads, 2).transpose(1, 2) for x in (k, v))
    sees = mask.any(-1, keepdim=True)
    o = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask | ~sees)
    return o.where(sees, 0.0).transpose(1, 2)
