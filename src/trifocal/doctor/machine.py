"""Findings about software and hardware, each with the command that fixes a fault; all take a second or two at most."""

import contextlib
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from trifocal.errors import one_line
from trifocal.ops.support import OLDEST_CAPABILITY
from trifocal.runlog.environment import environment
from trifocal.train.config.check import compilers

GIB = 2**30
COMPILER_COMMAND = "sudo apt-get install -y g++"

# The oldest Linux driver that runs programs of each major version of CUDA, by NVIDIA's table of compatibility.
_DRIVERS = {"12": 525, "13": 580}

Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Finding:
    """A finding about this machine: "broken" stops training, "note" costs speed or a feature; the remedy, a command."""

    name: str
    status: Status
    text: str
    remedy: str = ""


def check_software() -> Finding:
    """Versions of PyTorch, and of the driver and the libraries of GPUs."""
    text = f"PyTorch {torch.__version__}"
    if torch.cuda.is_available():
        found = environment()
        versions = {"driver": found["gpu_driver"], **found["torch"]}
        text += "".join(f", {name} {versions[name]}" for name in ("driver", "cuda", "cudnn", "nccl"))
    return Finding("torch", "ok", text)


def check_gpus() -> list[Finding]:
    """Every GPU, by a product computed on it; or why there is none."""
    if not torch.cuda.is_available():
        return [_no_gpu()]
    return [_check_gpu(index) for index in range(torch.cuda.device_count())]


def _no_gpu() -> Finding:
    if not _nvidia_devices():
        return Finding("gpu", "ok", "none: training runs on the CPU, with the reference")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("gpu", "note", "hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        text = "there is an NVIDIA GPU, but this PyTorch was built without CUDA"
        return Finding("gpu", "broken", text, "pip install --force-reinstall 'torch>=2.11,<2.16'")
    text = "there is an NVIDIA GPU, but PyTorch sees none"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        text = f"there is an NVIDIA GPU, but PyTorch cannot use it: {one_line(error)}"
    newest = _DRIVERS.get(torch.version.cuda.split(".")[0], max(_DRIVERS.values()))
    return Finding("gpu", "broken", text, f"sudo apt-get install -y nvidia-driver-{newest} && sudo reboot")


def _nvidia_devices() -> list[Path]:
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def _check_gpu(index: int) -> Finding:
    name = f"gpu {index}"
    try:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        right = bool((ones @ ones == 64).all())
    except RuntimeError as error:
        text = f"it does not compute: {one_line(error)}"
        return Finding(name, "broken", text, "nvidia-smi -q -d ECC,PAGE_RETIREMENT && sudo nvidia-smi --gpu-reset")
    capability = (properties.major, properties.minor)
    text = f"{properties.name}, {total / GIB:.0f} GiB, compute capability {capability[0]}.{capability[1]}"
    if not right:
        remedy = f"export CUDA_VISIBLE_DEVICES=  # without {index}"
        return Finding(name, "broken", f"{text}: it computes wrongly", remedy)
    if capability < OLDEST_CAPABILITY:
        return Finding(name, "note", f"{text}: too old for the kernels and for bf16; the reference runs")
    if total - free > 0.1 * total:
        return Finding(name, "note", f"{text}, {(total - free) / GIB:.0f} GiB of them taken already", "nvidia-smi")
    return Finding(name, "ok", text)


def check_cpu() -> Finding:
    """Cores and memory of the host."""
    cpu = environment()["cpu"]
    cores, threads = cpu["usable_cores"] or 1, torch.get_num_threads()
    available = available_memory()
    memory = "" if available is None else f", {available / GIB:.1f} of {cpu['memory_bytes'] / GIB:.0f} GiB available"
    text = f"{cpu['name']}, {cores} cores{memory}"
    if threads < cores // 2 and not torch.cuda.is_available():
        return Finding("cpu", "note", f"{text}; PyTorch uses {threads} of the cores", "unset OMP_NUM_THREADS")
    if available is not None and available < GIB:
        return Finding("cpu", "broken", f"{text}: too little to train anything", "ps aux --sort=-rss | head")
    return Finding("cpu", "ok", text)


def available_memory() -> int | None:
    """Bytes that a process may still take, by the system and by the container; None if neither is known."""
    bounds = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                bounds.append(int(line.split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")
    # Fails without a container, and in one without a bound ("max").
    with contextlib.suppress(OSError, ValueError):
        bounds.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(bounds)) if bounds else None


def check_compiler() -> Finding:
    """A C compiler: for torch.compile, and on a GPU for every kernel."""
    if found := compilers():
        return Finding("compiler", "ok", found[0])
    if torch.cuda.is_available() and find_spec("triton"):
        return Finding("compiler", "broken", "no C compiler: Triton cannot build its kernels", COMPILER_COMMAND)
    return Finding("compiler", "note", "no C++ compiler: train.compile cannot be used", COMPILER_COMMAND)
