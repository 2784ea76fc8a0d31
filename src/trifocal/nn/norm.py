"""The norm of the residual stream, and of queries and keys."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale each token, or head, to a root mean square of 1, then by a learned weight.

    Computed in fp32 at least. Under autocast the result is cast once, here, to the type of the products that
    follow; otherwise each of them would keep its own copy.

    Args:
        dim: Width of the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Set the weight to 1, also where the norm was made on the meta device."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim], in autocast's type where it is on, else in the type of `x`."""
        exact = torch.promote_types(x.dtype, torch.float32)
        normed = nn.functional.rms_norm(x.to(exact), self.weight.shape, self.weight.to(exact), self.eps)
        return normed.to(product_dtype(x))


class AllHeadsRMSNorm(RMSNorm):
    """One `RMSNorm` over all heads of a token together."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, D] -> [..., heads, D], with dim = heads * D."""
        return super().forward(x.flatten(-2)).unflatten(-1, x.shape[-2:])


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for products that read x."""
    # The meta device has no autocast to ask for, and none lowers fp64.
    return x.device.type != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)


def product_dtype(x: Tensor) -> torch.dtype:
    """Type in which products read x: autocast's where it is on, else that of x."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype
