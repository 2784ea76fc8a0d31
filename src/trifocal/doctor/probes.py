"""Probes: try out a kernel and the disk."""

import errno
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from trifocal.doctor.machine import COMPILER_COMMAND, GIB, Finding
from trifocal.errors import one_line
from trifocal.ops import Geometry
from trifocal.train.config.check import compilers, existing_folder

_SPARE_DISK_BYTES = GIB
_ROOM = "du -xhd1 {} | sort -h, or --run.directory OTHER_FOLDER"


def check_triton() -> Finding:
    """Whether a kernel compiles, runs and is right."""
    if not torch.cuda.is_available():
        return Finding("triton", "ok", "not needed without a GPU")
    if find_spec("triton") is None:
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
        return "sudo apt-get install -y python3-dev"
    if not compilers() or "compiler" in message.lower():
        return COMPILER_COMMAND
    return "pip install --force-reinstall triton && rm -r ~/.triton/cache"


def check_disk(run_directory: Path) -> Finding:
    """Room where runs are written, by writing a file and deleting it."""
    name, folder = "disk", existing_folder(run_directory)
    if not folder.is_dir():
        return Finding(name, "broken", f"{folder} is not a folder", "--run.directory OTHER_FOLDER")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".trifocal-doctor-") as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = _ROOM if error.errno in (errno.ENOSPC, errno.EDQUOT) else "--run.directory OTHER_FOLDER"
        return Finding(name, "broken", f"{folder} cannot be written: {error.strerror}", remedy.format(folder))
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.0f} GB free in {folder}"
    if free < _SPARE_DISK_BYTES:
        return Finding(name, "note", text, _ROOM.format(folder))
    return Finding(name, "ok", text)
