"""The smallest kernel: whether Triton can compile for this GPU, and launch, and be right."""

import torch
import triton
import triton.language as tl

_SIZE = 1024


@triton.jit
def _double_kernel(x, y, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y + place, 2.0 * tl.load(x + place))


def run_smallest_kernel(device: torch.device) -> bool:
    """Compile a kernel, run it, and say whether its result is right; raises Triton's errors."""
    x = torch.arange(_SIZE, device=device, dtype=torch.float32)
    y = torch.empty_like(x)
    _double_kernel[(1,)](x, y, SIZE=_SIZE)
    return bool(torch.equal(y, 2 * x))
