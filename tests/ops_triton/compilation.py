"""Compile the kernels of a call for a GPU that need not be there, and read the compiler's figures.

Run as a program it needs an environment without TRITON_INTERPRET: interpreted kernels cannot be compiled.

    python -m tests.ops_triton.compilation [--record] PART …

makes the calls of parts of test_compile.py, all of them by default, and prints one line of JSON for each kernel that a
call launches; with --record it compiles none. Tensors are on the meta device: only shapes, strides and types matter.
"""

import contextlib
import gc
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests import warm
from tests.children import environment, wait_for_end

CAPABILITIES = {"hopper": 90, "ampere": 80, "small": 86}
# Shared memory that one program may have, in bytes.
SHARED_MEMORY = {"hopper": 227 * 1024, "ampere": 163 * 1024, "small": 99 * 1024}


class Call(NamedTuple):
    """A call whose kernels are compiled: those that no call before it had for the architecture, and more if asked for.

    Args:
        again: A pattern: kernels that are compiled once for this call too.
        each: A pattern: kernels of which each launch is compiled.
    """

    name: str
    architecture: str
    function: Callable[[], Any]
    again: str = "$^"
    each: str = "$^"


def compile_in_subprocess(*parts, folder, only_record=False):
    """Rows of the kernels that parts of test_compile.py launch; see `compile_launches`. Output goes to the folder."""
    return run_module("tests.ops_triton.compilation", *["--record"] * only_record, *parts, folder=folder)


def run_module(*command, folder):
    """What a module prints, each line JSON, in a process that interprets no kernels. Output goes to the folder."""
    with (folder / "out").open("wb") as out, (folder / "error").open("wb") as error:
        variables = environment(OMP_NUM_THREADS=1)
        process = warm.popen([sys.executable, "-m", *command], stdout=out, stderr=error, env=variables)
    assert wait_for_end(process, 240) == 0, (folder / "error").read_text()[-2000:]
    return [json.loads(line) for line in (folder / "out").read_text().splitlines()]


def compile_launches(calls, *, only_record=False):
    """Make calls with every launch recorded instead of made, and compile their kernels, unless `only_record`.

    Yields:
        call, kernel, architecture; and of a kernel that is compiled for this call, registers (a thread), spill_bytes (a
        thread), shared_bytes (a program), loads (in Triton's first form of it) and operand_widths (neighbours along a
        sum that a thread passes to matrix instructions together, which decide the order of the sum).
    """
    compiled = set()
    for call in calls:
        of_call = set()
        for kernel, arguments, options in _record(call.architecture, call.function):
            row = {"call": call.name, "kernel": kernel.__name__, "architecture": call.architecture}
            key = kernel.__name__, call.architecture
            again = call.each if key in of_call else f"{call.again}|{call.each}"
            if not only_record and (key not in compiled or re.match(again, kernel.__name__)):
                code = _compile(kernel, arguments, options, CAPABILITIES[call.architecture])
                row |= {"shared_bytes": code.metadata.shared, **_usage(code.asm["cubin"])}
                row["loads"] = code.asm.get("ttir", "").count("tt.load")
                row["operand_widths"] = sorted(set(re.findall(r"kWidth = \d+", code.asm.get("ttgir", ""))))
            compiled.add(key)
            of_call.add(key)
            yield row


def _record(architecture, call):
    from triton.runtime.jit import JITFunction

    from trifocal.ops import devices

    launches = []

    def run(self, *args, grid, warmup, **kwargs):
        names = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
        options = {key: kwargs.pop(key) for key in names if key in kwargs}
        arguments = inspect.signature(self.fn).bind(*args, **kwargs).arguments
        launches.append((self, dict(arguments), options))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.object(devices, "architecture", lambda device: architecture))
        for name in ("has_copy_engine", "has_dependent_launch", "is_hopper"):
            stack.enter_context(mock.patch.object(devices, name, lambda device: architecture == "hopper"))
        call()
    return launches


def _compile(kernel, arguments, options, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {}
    constants = {}
    attributes = {}
    for parameter in kernel.params:
        value = arguments[parameter.name]
        plain = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not plain):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        aligned = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0 and not plain)
        if aligned:
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type_of(value):
    names = {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float32: "fp32",
        torch.float64: "fp64",
        torch.int8: "i8",
        torch.int16: "i16",
        torch.int32: "i32",
        torch.int64: "i64",
        torch.uint8: "u8",
        torch.bool: "i1",
    }
    if isinstance(value, torch.Tensor):
        return "*" + names[value.dtype]
    if hasattr(value, "block_shape"):
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{names[value.base.dtype]}{json.dumps(value.block_shape).replace(' ', '')}{layout}>"
    if isinstance(value, float):
        return "fp32"
    assert type(value) is int, value
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _usage(cubin):
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    return {"registers": int(found[1]), "spill_bytes": int(found[2])}


if __name__ == "__main__":
    from tests.ops_triton import test_compile

    parts = [part for part in sys.argv[1:] if part != "--record"] or test_compile.EACH_PART
    # What is imported stays, and the compiler leaves little to collect: looks for it would take a tenth of the time.
    gc.disable()
    for part in parts:
        for row in compile_launches(test_compile.calls(part), only_record="--record" in sys.argv):
            print(json.dumps(row), flush=True)
