"""A kernel is asked for once for arguments of a kind, and launched as the compiler's launch would be."""

import dataclasses

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: E402
from triton.runtime import JITFunction  # noqa: E402

from trifocal.ops.triton.launch import Kernel, cdiv, describe_tiles, next_power_of_2  # noqa: E402


def scaled(x, tiles, stride, length, factor, SIZE: triton.language.constexpr, GATED: triton.language.constexpr):
    """Never compiled."""


class Compiled:
    """What Triton gives for a compiled kernel."""

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((grid, args))


@pytest.fixture
def kernel(monkeypatch):
    """A kernel with the arguments that Triton was asked about, and the launches without it."""
    asked, launches = [], []

    def run(self, *args, grid, warmup, **constants):
        asked.append((grid, args, constants))
        return Compiled(launches)

    monkeypatch.setattr(JITFunction, "run", run)
    kernel = Kernel(JITFunction(scaled, do_not_specialize=["length"]))
    kernel.asked, kernel.launches = asked, launches
    return kernel


MEMORY = torch.empty(64, dtype=torch.bfloat16)
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
CONSTANTS = {"SIZE": 64, "GATED": True, "num_warps": 4}


def tiles(x=MEMORY, tile=(1, 64), layout=LAYOUT):
    return describe_tiles(x, (1, 64), (64, 1), tile, layout)


def arguments(x=MEMORY, tiles=None, stride=64, length=1000, factor=0.5):
    return x, tiles or globals()["tiles"](), stride, length, factor


def test_the_second_launch_of_a_kind_goes_to_the_compiled_kernel(kernel):
    first, second = arguments(length=1000), arguments(length=1024)
    kernel[3, 2](*first, **CONSTANTS)
    assert kernel.asked == [((3, 2), first, {**CONSTANTS})]
    assert kernel.launches == []
    kernel[(7,)](*second, **CONSTANTS)
    assert len(kernel.asked) == 1
    assert kernel.launches == [((7, 1, 1), (*second, 64, True))]


OTHERS = {
    "another type": (arguments(x=MEMORY.float()), CONSTANTS),
    "an unaligned pointer": (arguments(x=MEMORY[1:]), CONSTANTS),
    "a stride that is specialized on": (arguments(stride=63), CONSTANTS),
    "no number": (arguments(stride=None), CONSTANTS),
    "a length of more than 32 bits": (arguments(length=2**31), CONSTANTS),
    "another factor": (arguments(factor=2.0), CONSTANTS),
    "an integer factor": (arguments(factor=2), CONSTANTS),
    "tiles of another size": (arguments(tiles=tiles(tile=(1, 32))), CONSTANTS),
    "tiles of another type": (arguments(tiles=tiles(MEMORY.float())), CONSTANTS),
    "tiles in another layout": (arguments(tiles=tiles(layout=NVMMASharedLayout(0, 16, 2))), CONSTANTS),
    "tiles for Triton": (arguments(tiles=tiles(layout=None)), CONSTANTS),
    "no tiles": ((MEMORY, None, 64, 1000, 0.5), CONSTANTS),
    "another constant": (arguments(), {**CONSTANTS, "SIZE": 128}),
    "more warps": (arguments(), {**CONSTANTS, "num_warps": 8}),
}


def test_every_other_kind_is_asked_about_once(kernel):
    """One by one, so that none is taken for another."""
    kernel[(1,)](*arguments(), **CONSTANTS)
    for count, (args, constants) in enumerate(OTHERS.values(), start=2):
        for _ in range(2):
            kernel[(1,)](*args, **constants)
        assert len(kernel.asked) == count
        assert len(kernel.launches) == count - 1


def test_kinds_are_forgotten_when_there_are_too_many(kernel, monkeypatch):
    monkeypatch.setattr("trifocal.ops.triton.launch._MOST_KINDS", 2)
    for stride in (1, 2, 3, 1):
        kernel[(1,)](*arguments(stride=stride), **CONSTANTS)
    assert len(kernel.asked) == 4
    assert kernel.launches == []


def test_descriptors_are_what_their_constructors_make():
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Gluon
    from triton.tools.tensor_descriptor import TensorDescriptor

    for kind, layout in ((Gluon, (LAYOUT,)), (TensorDescriptor, ())):
        made = kind(MEMORY, [1, 64], [64, 1], [1, 64], *layout)
        quick = describe_tiles(MEMORY, [1, 64], [64, 1], [1, 64], *layout)
        assert type(quick) is kind
        for field in dataclasses.fields(kind):
            assert getattr(quick, field.name) is getattr(made, field.name) or (
                getattr(quick, field.name) == getattr(made, field.name)
            )


def test_whole_numbers_are_as_triton_has_them():
    for number in range(1, 70):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert cdiv(number, 7) == triton.cdiv(number, 7)
