"""The software, hardware and settings of a run: `env.json`."""

import hashlib
import json
import os
import platform
import re
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trifocal._version import __version__
from trifocal.ops import backend_choices
from trifocal.runlog.hardware import peak_bf16_flops
from trifocal.runlog.whole_files import write_whole

_PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "datasets", "pyarrow"),
    *("tokenizers", "transformers", "tensorboard", "wandb", "plotly"),
)
# Beginnings of the names of variables that are written down: libraries, networks, the ranks.
_VARIABLES = (
    *("NCCL_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_", "TRITON_", "OMP_", "KMP_", "MKL_"),
    *("GLOO_", "UCX_", "FI_", "PYTHONHASHSEED"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
)

# What is left out: names as NVIDIA_API_KEY or TORCH_HUB_TOKEN, and addresses, which may have a password in them.
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def environment(config_text: str | None = None) -> dict[str, Any]:
    """This process's software, hardware and settings, in JSON types, and the hash of the run's resolved config."""
    commit, changed = _git_state(Path(__file__).parent)
    return {
        "trifocal": {"version": __version__, "git_commit": commit, "git_changed": changed},
        "config_sha256": hashlib.sha256(config_text.encode()).hexdigest() if config_text is not None else None,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": {
            "name": _cpu_name(),
            "logical_cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "memory_bytes": host_memory_bytes(),
        },
        "torch": {
            "threads": torch.get_num_threads(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and _gpus() else None,
        },
        "gpus": _gpus(),
        "gpu_driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0") or None,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not _SECRET.search(name) and "://" not in value
        },
    }


def usable_cores() -> int | None:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def write_environment(path: str | os.PathLike[str], config_text: str | None = None) -> dict[str, Any]:
    """Write `environment(config_text)` to a file as indented JSON, and return it."""
    description = environment(config_text)
    write_whole(Path(path), json.dumps(description, indent=2) + "\n")
    return description


def write_backends(path: str | os.PathLike[str]) -> None:
    """Write the backend of each operation, the reason and the calls so far; compiled code and graphs count once."""
    rows = [
        {"operation": operation, "backend": backend, "reason": reason, "calls": calls}
        for (operation, backend, reason), calls in sorted(backend_choices().items())
    ]
    write_whole(Path(path), json.dumps(rows, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    # The package may be installed inside another repository: its files must be tracked there.
    if _run("git", "-C", str(folder), "ls-files", "--error-unmatch", str(folder.parent / "_version.py")) is None:
        return None, None
    status = _run("git", "-C", str(folder), "status", "--porcelain", "--", str(folder.parent))
    return _run("git", "-C", str(folder), "rev-parse", "HEAD"), None if status is None else bool(status)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def host_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gpus() -> list[dict[str, Any]]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "peak_bf16_flops": peak_bf16_flops(properties.name),
        }
        for properties in map(torch.cuda.get_device_properties, range(count))
    ]
