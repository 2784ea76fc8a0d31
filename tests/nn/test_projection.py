"""Joint projections: the same as one by one."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from trifocal.nn.projection import project


@pytest.mark.parametrize("parts", [None, [1, 3, 1], [1, 3, 2]], ids=str)
@pytest.mark.parametrize("biased", [(4,), (6, 4)], ids=str)
def test_one_product_is_the_several(parts, biased):
    torch.manual_seed(0)
    linears = [nn.Linear(5, size, bias=size in biased, dtype=torch.float64) for size in (7, 6, 4)]
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    parameters = [parameter for linear in linears for parameter in linear.parameters()]
    apart = [
        part
        for linear, count in zip(linears, parts or [1, 1, 1], strict=True)
        for part in linear(x).chunk(count, dim=-1)
    ]
    together = project(x, linears, parts)
    torch.testing.assert_close(together, apart, rtol=1e-14, atol=1e-14)
    directions = [torch.randn_like(output) for output in apart]
    expected = torch.autograd.grad(apart, [x, *parameters], directions)
    given = torch.autograd.grad(together, [x, *parameters], directions)
    torch.testing.assert_close(given, expected, rtol=1e-13, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(project(x, linears, parts), list(apart), rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
def test_maps_apart_give_the_input_no_gradient(frozen):
    torch.manual_seed(0)
    linears = [nn.Linear(5, size, bias=size == 6, dtype=torch.float64) for size in (7, 6)]
    apart = [nn.Linear(5, size, bias=False, dtype=torch.float64) for size in (4, 2)]
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    linears[1].weight.requires_grad_(not frozen)
    expected = [linears[0](x), *linears[1](x).chunk(2, -1), torch.cat([linear(x.detach()) for linear in apart], -1)]
    given = project(x, linears, [1, 2], apart)
    torch.testing.assert_close(given, expected, rtol=1e-14, atol=1e-14)
    directions = [torch.randn_like(output) for output in expected]
    parameters = [one for linear in (*linears, *apart) for one in linear.parameters() if one.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(given, [x, *parameters], directions),
        torch.autograd.grad(expected, [x, *parameters], directions),
        rtol=1e-13,
        atol=1e-14,
    )
    with torch.no_grad():
        torch.testing.assert_close(project(x, linears, [1, 2], apart), expected, rtol=0, atol=0)


def test_gradients_of_maps_apart_keep_autocasts_type():
    linear, apart = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = project(x, [linear], apart=[apart])
    assert [output.dtype for output in outputs] == [torch.bfloat16] * 2
    torch.cat(outputs, -1).sum().backward()
    columns = x.detach().bfloat16().sum(0).float()
    torch.testing.assert_close(apart.weight.grad, columns.expand(4, -1), rtol=0.02, atol=0.02)
    torch.testing.assert_close(x.grad, linear.weight.bfloat16().sum(0).float().expand(3, -1), rtol=0.02, atol=0.02)


def test_a_map_with_an_adapter_is_applied_as_it_is():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    linears = [nn.Linear(3, 3), Adapted(3, 3)]
    x = torch.randn(2, 3)
    torch.testing.assert_close(project(x, linears), [linear(x) for linear in linears])


def test_hooks_of_a_map_run_in_training_too():
    """Pruning makes the weight anew in a hook at each call."""
    linears, x = [nn.Linear(3, 4), nn.Linear(3, 2)], torch.randn(2, 3, requires_grad=True)
    prune.l1_unstructured(linears[0], "weight", amount=4)
    called = []
    linears[1].register_full_backward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        linears[0].weight_orig.mul_(2)
        expected = project(x, linears)
    outputs = project(x, linears)
    torch.testing.assert_close(outputs, expected)
    torch.cat(outputs, -1).sum().backward()
    assert called and int((linears[0].weight_orig.grad == 0).sum()) == 4
    linears[1].forward = lambda x: x
    assert torch.equal(project(x, linears)[1], x)


def test_a_map_without_a_weight_tensor_is_applied_as_it_is():
    """As quantised modules are: dynamic int8 has a method of this name, GPTQ has none."""

    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    x, linear = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 2)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            doubled, plain, apart = project(x, [Doubled(), linear], apart=[Doubled()])
        assert torch.equal(doubled, 2 * x) and torch.equal(plain, linear(x)) and torch.equal(apart, 2 * x)
        assert plain.requires_grad == grad and not apart.requires_grad


def test_a_weight_of_a_class_of_its_own_makes_its_product():
    """As torchao's quantized weights do, in an ordinary `Linear`; some of them cannot be joined with others."""

    class Doubled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.cat:
                raise NotImplementedError
            result = super().__torch_function__(func, types, args, kwargs or {})
            return 2 * result if func is nn.functional.linear else result

    linears, x = [nn.Linear(4, size, bias=False) for size in (3, 2, 5)], torch.randn(3, 4, requires_grad=True)
    first, second, apart = (linear(x).detach() for linear in linears)
    linears[0].weight = nn.Parameter(linears[0].weight.detach().as_subclass(Doubled))
    outputs = project(x, linears[:2], apart=linears[2:])
    assert isinstance(outputs[0], Doubled)
    torch.testing.assert_close([output.as_subclass(torch.Tensor) for output in outputs], [2 * first, second, apart])
