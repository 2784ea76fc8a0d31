"""Checks at the start of a run of several processes."""

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

from trifocal._version import __version__
from trifocal.distributed import Processes
from trifocal.errors import UserError
from trifocal.fields import dotted_fields, value_of
from trifocal.train.checkpoint_folders import list_checkpoints
from trifocal.train.run_config import RunConfig
from trifocal.train.run_files import CONFIG_FILE


def check_same_start(processes: Processes, config: RunConfig, **further: Any) -> None:
    """Refuse a start in which the processes differ in configuration, code or versions.

    Args:
        processes: Of the run.
        config: Of this process.
        further: Other values that must be the same everywhere.

    Raises:
        UserError: In every process, if one differs from rank 0; names both and the first difference.
    """
    mine = {name: value_of(config, name) for name in dotted_fields(RunConfig)} | further
    mine |= {"trifocal": f"{__version__} ({_code_hash()})", "torch": torch.__version__}
    mine["python"] = platform.python_version()
    starts = processes.gather(mine)
    for rank, other in enumerate(starts):
        for name, value in starts[0].items():
            if other[name] != value:
                raise UserError(
                    f"the processes were started differently: {name} is {value!r} in rank 0 and {other[name]!r} in "
                    f"rank {rank}; start all of them with the same command and the same code"
                )


def restarted_run(processes: Processes, directory: Path) -> str:
    """Find the run of a process that torchrun has restarted.

    Returns:
        "" after a first start; "resume" if the run has a checkpoint to go on from; "overwrite" if it has none.

    Raises:
        UserError: If the run was moved or deleted.
    """
    if not processes.restarted:
        return ""
    if not (directory / CONFIG_FILE).is_file():
        raise UserError(
            f"the run that torchrun began in {directory} is no longer there: it was moved or deleted; go on with it "
            "where it is now, or start torchrun again for a new one"
        )
    return "resume" if list_checkpoints(directory / "checkpoints") else "overwrite"


def _code_hash() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
