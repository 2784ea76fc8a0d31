"""Before a first call every kernel of it is compiled, and none is launched."""

import json
import os
import runpy
import subprocess
import sys

import pytest

from trifocal.ops import pipeline

CASES = {
    "in the mask's order": (512, False, False),
    "block-major": (16384, False, False),
    "packed documents": (1024, True, False),
    "a given choice": (512, False, True),
}


def asked_for(length: int, packed: bool, given: bool) -> list[tuple[str, bool]]:
    """Names of the kernels that are asked for on a Hopper GPU that need not be there, and whether to be compiled."""
    from unittest import mock

    import torch
    from triton.runtime.jit import JITFunction

    from tests.ops_triton.compilation import _record
    from trifocal.ops.geometry import Geometry
    from trifocal.ops.layout import Documents
    from trifocal.ops.pipeline import precompile_kernels

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, device="meta", dtype=dtype)

    geometry = Geometry()
    q, keys = empty(1, length, 32, 128), empty(1, length, 2, 128)
    size = length // geometry.compression_stride if packed else geometry.num_compressed_blocks(length)
    branches = (empty(1, size, 2, 128), empty(1, size, 2, 128), keys, keys, keys, keys)
    documents = Documents(*(empty(n, dtype=torch.int32) for n in (4, length, length))) if packed else None
    choice = empty(1, length, 2, 16, dtype=torch.int32) if given else None
    found = []

    def call():
        # The stand-in of `_record`, with a note of `warmup`, which it drops.
        recorded = JITFunction.run

        def run(self, *args, warmup, **options):
            found.append((self.__name__, warmup))
            return recorded(self, *args, warmup=warmup, **options)

        with mock.patch.object(JITFunction, "run", run):
            for _ in range(2):
                precompile_kernels(
                    q, branches, empty(1, length, 32, 3), geometry, 0.1, documents, choice, backward=True
                )

    _record("hopper", call)
    return found


@pytest.fixture(scope="module")
def found():
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops_triton.test_precompile"]
    run = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
def test_all_are_compiled_and_none_is_launched(found, case):
    names = [name for name, _ in found[case]]
    assert all(only_compiled for _, only_compiled in found[case])
    for part in ("interval_forward", "combine_forward", "combine_backward", "interval_d_q", "interval_dkdv"):
        assert any(part in name for name in names), (part, names)
    assert any(name.startswith("choice") for name in names) == (case != "a given choice")
    assert any("block_major" in name for name in names) == (case == "block-major")
    # The second call is of a kind that is ready.
    assert sum("combine_forward" in name for name in names) == 1


def test_a_pytorch_that_has_moved_is_fake_is_told_of_in_one_line(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    module = runpy.run_path(pipeline.__file__)
    assert module["is_fake"](None)
    (message,) = caplog.messages
    assert "kernels compile one by one" in message


if __name__ == "__main__":
    print(json.dumps({name: asked_for(*case) for name, case in CASES.items()}))
