"""Several linear maps of one input as one product."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# On a GPU the joint weight's rows are padded to a multiple of this: whole memory lines in every row of its output.
ALIGNMENT = 64


def project(
    x: Tensor, linears: Sequence[nn.Linear], parts: Sequence[int] | None = None, apart: Sequence[nn.Linear] = ()
) -> list[Tensor]:
    """Apply linear maps to the same input x [..., inputs].

    In training they are one product: it reads x once, and x has one gradient from it instead of a sum of several, each
    of them written and read again. The outputs are then columns of one tensor. Without gradients each map is applied by
    itself, because decoding would copy the weights for every token; and so is each if one of them computes more than a
    product with its weight, as an adapter around it does, or a hook. Beside maps `apart`, frozen ones are too: as
    columns of a product with a gradient they would ask for one.

    Returns the outputs, each map's cut into `parts` equal ones, map after map, [..., outputs / parts]; then, if there
    are any, the outputs of the maps `apart`, side by side as one. These have no biases, and x gets no gradient from
    them.
    """
    parts = parts or [1] * len(linears)
    # Modules of quantised weights have no such parameter: first the look at their kind.
    joint_product = torch.is_grad_enabled() and all(is_plain(linear) for linear in (*linears, *apart))
    if not joint_product or (apart and not all(linear.weight.requires_grad for linear in linears)):
        found = [part for linear, count in zip(linears, parts, strict=True) for part in linear(x).chunk(count, dim=-1)]
        return [*found, torch.cat([linear(x.detach()) for linear in apart], dim=-1)] if apart else found
    sizes = [linear.out_features // count for linear, count in zip(linears, parts, strict=True) for _ in range(count)]
    padding = -sum(sizes) % ALIGNMENT if x.is_cuda else 0
    # Autocast would do the same, after the copy.
    weights = [linear.weight.to(x.dtype) for linear in (*linears, *apart)]
    weights.insert(len(linears), x.new_zeros(padding, x.shape[-1]))
    if apart:
        joint = _PartlyDetached.apply(x, torch.cat(weights), sum(sizes) + padding)  # type: ignore[no-untyped-call]
    else:
        joint = nn.functional.linear(x, torch.cat(weights))
    *outputs, _, last = joint.split([*sizes, padding, sum(linear.out_features for linear in apart)], dim=-1)
    biases = [
        bias
        for linear, count in zip(linears, parts, strict=True)
        for bias in ([None] * count if linear.bias is None else linear.bias.chunk(count))
    ]
    found = [
        output if bias is None else output + bias.to(output.dtype) for output, bias in zip(outputs, biases, strict=True)
    ]
    return [*found, last] if apart else found


def is_plain(linear: nn.Module) -> bool:
    """Whether a call is that of PyTorch's `Linear` and nothing else: no other forward in its place, no hooks, and no
    weight of a class of its own, as torchao's quantized ones are.
    """
    hooks = (linear._forward_pre_hooks, linear._forward_hooks, linear._backward_pre_hooks, linear._backward_hooks)
    ordinary = type(linear) is nn.Linear and type(linear.weight) in (nn.Parameter, Tensor)
    return ordinary and "forward" not in linear.__dict__ and not any(hooks)


def whole(parameter: Tensor) -> Tensor:
    """A parameter's values, contiguous; of a sharded one in every process, which must all call this."""
    found = parameter.detach()
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).contiguous()


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter's values; of a sharded one in every process, those of the first."""
    if hasattr(parameter, "full_tensor"):
        # Imported here, as it takes long, and by then the caller has it.
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        values = distribute_tensor(
            values.to(parameter.device, parameter.dtype), parameter.device_mesh, parameter.placements
        )
    parameter.copy_(values)


class _PartlyDetached(torch.autograd.Function):
    """A linear map; its input gets the gradient of the first columns of the output only, its weight that of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, columns: int) -> Tensor:  # type: ignore[override]
        y = nn.functional.linear(x, weight)
        # Under autocast the product's own types.
        ctx.save_for_backward(x.to(y.dtype), weight.to(y.dtype))
        ctx.columns = columns
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        d_x = d_y[..., : ctx.columns] @ weight[: ctx.columns]
        return d_x, d_y.flatten(0, -2).T @ x.flatten(0, -2), None
