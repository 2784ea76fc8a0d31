"""A kernel is asked for once for arguments of a kind, and launched as the compiler's launch would be."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.compiler import CompiledKernel  # noqa: E402
from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402

from trifocal.ops.triton.launch import Kernel, _load, describe_tiles  # noqa: E402


def scaled(x, tiles, stride, length, factor, SIZE, GATED):
    """Never compiled."""


class Driver:
    """A driver whose current device is 3, with stream 103."""

    def get_current_device(self):
        return 3

    def get_current_stream(self, device):
        return 100 + device


class OnNoDevice(CompiledKernel):
    def __del__(self):
        """There is nothing to unload, as Triton 3.8 would."""


def loaded(launches):
    """A compiled kernel of Triton's as it is after its first launch; its launcher notes its arguments."""
    compiled = object.__new__(OnNoDevice)
    compiled._run = lambda *args: launches.append(args)
    compiled.src, compiled.name, compiled.module, compiled.function = None, "scaled", "module", "function"
    compiled.packed_metadata = (4, 1, 0)
    return compiled


@pytest.fixture
def kernel(monkeypatch):
    """A kernel with the arguments that Triton was asked about, and the launches without it, made by Triton's code."""
    asked, launches = [], []

    def run(self, *args, grid, warmup, **constants):
        asked.append((grid, args, constants))
        return loaded(launches)

    monkeypatch.setattr(driver, "_active", Driver())
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
    # Triton 3.9 warns of a default that it does not find here, and 3.10 has another.
    assert kernel.asked == [((3, 2), first, {**CONSTANTS, "enable_fp_fusion": True})]
    assert kernel.launches == []
    kernel[(7,)](*second, **CONSTANTS)
    assert len(kernel.asked) == 1
    # As Triton's own launch of the compiled kernel, but for hooks and pointers.
    loaded(kernel.launches)[7, 1, 1](*second, 64, True)
    ours, tritons = kernel.launches
    runtime = triton.knobs.runtime
    assert tritons[7:9] == (runtime.launch_enter_hook, runtime.launch_exit_hook)
    assert ours[:6] == (7, 1, 1, 103, "function", (4, 1, 0))
    assert ours == (*tritons[:6], None, None, None, second[0].data_ptr(), *tritons[10:])


def hear(*args):
    """A hook."""


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_while_a_hook_listens_launches_are_tritons_own(kernel, name):
    hooks = getattr(triton.knobs.runtime, name)
    kernel[(1,)](*arguments(), **CONSTANTS)
    hooks.add(hear)
    try:
        kernel[(1,)](*arguments(), **CONSTANTS)
    finally:
        hooks.remove(hear)
    assert (len(kernel.asked), len(kernel.launches)) == (2, 0)
    with triton.knobs.runtime.scope():
        setattr(triton.knobs.runtime, name, hear)
        kernel[(1,)](*arguments(), **CONSTANTS)
    assert (len(kernel.asked), len(kernel.launches)) == (3, 0)
    kernel[(1,)](*arguments(), **CONSTANTS)
    assert (len(kernel.asked), len(kernel.launches)) == (3, 1)


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
    "a dependent launch": (arguments(), {**CONSTANTS, "launch_pdl": True}),
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
    monkeypatch.setattr("trifocal.ops.triton.launch._MAX_KINDS", 2)
    for stride in (1, 2, 3, 1):
        kernel[(1,)](*arguments(stride=stride), **CONSTANTS)
    assert len(kernel.asked) == 4
    assert kernel.launches == []


class Launcher:
    """As Triton's launchers in C: it takes its function from the one module that all of them are loaded into."""

    module = SimpleNamespace(launch=None, made=[])

    def __init__(self, src, metadata):
        self.module.made.append((src, metadata))
        self.module.launch = src
        time.sleep(0.002)  # Other threads have their turn.
        self.launch = self.module.launch


class Compiled:
    """A kernel that makes its launcher when it is first looked for."""

    def __init__(self, src):
        self.src, self.metadata, self.launcher = src, f"of {src}", None

    @property
    def run(self):
        if self.launcher is None:
            self.launcher = driver.active.launcher_cls(self.src, self.metadata)
        return self.launcher


def test_each_kernel_that_is_compiled_beside_others_gets_its_own_launcher(monkeypatch):
    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=Launcher))
    kernels = [Compiled(f"kernel {n}") for n in range(24)]
    with ThreadPoolExecutor(8) as pool:
        _load(kernels, pool)
    # All at the same time first, so that those that are kept are in the cache.
    assert sorted(Launcher.module.made[:24]) == sorted((kernel.src, kernel.metadata) for kernel in kernels)
    assert [kernel.launcher and kernel.launcher.launch for kernel in kernels] == [kernel.src for kernel in kernels]


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
