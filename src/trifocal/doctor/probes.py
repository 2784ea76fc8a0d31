"""Probes: try out kernels, the compiler, collectives and the disk."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trifocal.doctor.machine import COMPILER_COMMAND, GIB, Finding, Status, installed
from trifocal.errors import one_line
from trifocal.ops import Geometry
from trifocal.train.config.check import compilers, existing_folder

_WRITTEN_BYTES = 64 * 2**20
_SPARE_DISK_BYTES = GIB
# Everything else takes a few seconds; together they stay under half a minute.
COMPILE_SECONDS = 17.0
_ROOM = "du -xhd1 {} | sort -h, or --run.directory OTHER_FOLDER"
_PYTHON_HEADERS_COMMAND = "sudo apt-get install -y python3-dev"


def check_triton() -> Finding:
    """Whether a kernel compiles, runs and is right."""
    if not torch.cuda.is_available():
        return Finding("triton", "ok", "not needed without a GPU")
    if not installed("triton"):
        text = "Triton is not installed: the reference runs instead of the kernels, slower and in more memory"
        return Finding("triton", "note", text, "pip install triton")
    try:
        right = _run_small_kernel(torch.device("cuda"))
    except Exception as error:  # A broken installation may raise anything.
        return Finding("triton", "broken", f"a kernel does not compile or run: {one_line(error)}", _mend(str(error)))
    if not right:
        text = "a kernel computes wrongly"
        return Finding("triton", "broken", text, "pip install --force-reinstall triton && rm -r ~/.triton/cache")
    import triton

    return Finding("triton", "ok", f"Triton {triton.__version__}: a kernel compiles, runs and is right")


def _run_small_kernel(device: torch.device) -> bool:
    """Compile a small kernel, run it, and say whether its result is right; raises Triton's errors."""
    from trifocal.ops.triton.mean_compression import mean_compress_forward

    geometry = Geometry(2, 2, 4, num_selected_blocks=2, num_initial_blocks=0, num_local_blocks=1, window_size=2)
    x = torch.arange(1024, device=device, dtype=torch.float32).view(1, 1024, 1, 1)
    means = mean_compress_forward(x, geometry, num_blocks=512, documents=None)
    return bool(torch.equal(means, x[:, ::2] + 0.5))


def _mend(message: str) -> str:
    if "Python.h" in message:
        return _PYTHON_HEADERS_COMMAND
    if not compilers() or "compiler" in message.lower():
        return COMPILER_COMMAND
    return "pip install --force-reinstall triton && rm -r ~/.triton/cache"


_COMPILED = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
function = torch.compile(lambda x: (x * 2 + 1).sum())
assert function(torch.ones(8, device=device)).item() == 24
"""


def check_compile(code: str = _COMPILED, *, needed: bool = False, seconds: float = COMPILE_SECONDS) -> Finding:
    """Whether torch.compile works: runs code in its own process with empty caches, and waits for it up to `seconds`.

    `needed` says whether a configuration that was asked for compiles.
    """
    name, failure, begin = "torch.compile", _status(needed), time.monotonic()
    if not compilers():
        return Finding(name, failure, "it needs a C++ compiler", COMPILER_COMMAND)
    with tempfile.TemporaryDirectory(prefix="trifocal-doctor-", ignore_cleanup_errors=True) as cache:
        # Its own group, so that the compilers that it starts end with it; and no pool of them, which would take
        # longer to start than to use.
        own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **own},
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            text = f"a small function was not compiled within {seconds:.0f} s, so it is not known whether it works"
            return Finding(name, "note", f"{text}; the machine is slow or busy")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    if process.returncode:
        last = (errors.strip().splitlines() or [""])[-1]
        remedy = _PYTHON_HEADERS_COMMAND if "Python.h" in errors else "--train.compile false"
        return Finding(name, failure, f"it does not work: {one_line(RuntimeError(last))}", remedy)
    return Finding(name, "ok", f"works; a small function took {time.monotonic() - begin:.0f} s")


def _status(needed: bool) -> Status:
    return "broken" if needed else "note"


def check_collectives() -> list[Finding]:
    """Whether processes could exchange: gloo for hosts, NCCL for GPUs, each tried with one process."""
    # Without it one process trains all the same; several GPUs would not.
    status = _status(torch.cuda.device_count() > 1)
    remedies = {"gloo": 'echo "127.0.1.1 $(hostname)" | sudo tee -a /etc/hosts', "nccl": "export NCCL_DEBUG=INFO"}
    findings = []
    for name, reduce in (("gloo", _gloo), ("nccl", _nccl))[: 1 + torch.cuda.is_available()]:
        try:
            text = "" if bool((reduce() == 1).all()) else "a sum over one process is wrong"
        except (RuntimeError, AttributeError) as error:
            # AttributeError: this PyTorch was built without it.
            text = f"it does not work: {one_line(error)}"
        broken = Finding(name, status, text, remedies[name])
        findings.append(broken if text else Finding(name, "ok", "works in one process"))
    return findings


def _gloo() -> torch.Tensor:
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    value = torch.ones(4)
    group.allreduce([value]).wait()
    group.shutdown()
    return value


def _nccl() -> torch.Tensor:
    group: Any = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    value = torch.ones(4, device="cuda")
    group.allreduce([value]).wait()
    result = value.cpu()
    group.shutdown()
    return result


def check_disk(run_directory: Path) -> Finding:
    """Room and speed where runs are written, by writing a file and deleting it."""
    name, folder = "disk", existing_folder(run_directory)
    if not folder.is_dir():
        return Finding(name, "broken", f"{folder} is not a folder", "--run.directory OTHER_FOLDER")
    free = shutil.disk_usage(folder).free
    try:
        speed = _write_speed(folder)
    except OSError as error:
        remedy = _ROOM if error.errno in (errno.ENOSPC, errno.EDQUOT) else "--run.directory OTHER_FOLDER"
        return Finding(name, "broken", f"{folder} cannot be written: {error.strerror}", remedy.format(folder))
    text = f"{free / 1e9:.0f} GB free in {folder}, written at {speed / 1e6:,.0f} MB/s"
    if free < _SPARE_DISK_BYTES:
        return Finding(name, "note", text, _ROOM.format(folder))
    return Finding(name, "ok", text)


def _write_speed(folder: Path) -> float:
    """Bytes a second, to the disk itself."""
    # Not zeros: some file systems keep none of them.
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".trifocal-doctor-") as file:
        begin = time.perf_counter()
        for _ in range(_WRITTEN_BYTES // len(block)):
            file.write(block)
            if time.perf_counter() - begin > 2:
                break
        file.flush()
        os.fsync(file.fileno())
        return file.tell() / (time.perf_counter() - begin)
