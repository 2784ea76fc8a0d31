"""The manifest of a checkpoint: size and SHA-256 of each file, to refuse files that are cut or changed."""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trifocal.errors import UserError

if TYPE_CHECKING:
    from trifocal.distributed import Processes

FORMAT = 1
MANIFEST = "manifest.json"
# Much at a time, as a thread that hashes beside another waits for it before each part.
_READ_BYTES = 16 * 2**20


class CheckpointDamaged(UserError):
    """A file of a checkpoint is missing or differs from the manifest."""


def describe_files(partial: Path, processes: "Processes") -> dict[str, dict[str, Any]]:
    """Flush every file to the disk, and compute its size and SHA-256; the processes share the files."""
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    mine = paths[processes.rank :: processes.size]

    def describe() -> dict[str, dict[str, Any]]:
        return {
            path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": _hash(path, flush=True)}
            for path in mine
        }

    found = {name: entry for part in processes.gather(processes.run_on_all(describe)) for name, entry in part.items()}
    return dict(sorted(found.items()))


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint with its own hash, and flush it to the disk."""
    (folder / MANIFEST).write_text(json.dumps({"content": manifest, "sha256": _hash_json(manifest)}, indent=1))
    _hash(folder / MANIFEST, flush=True)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Read the manifest and compare every file with it.

    Returns:
        The manifest: `format`, `step`, `model`, `files`.

    Raises:
        CheckpointDamaged: If a file is missing, cut or changed; names the file.
        UserError: If the checkpoint was written by another version of the format, or a file cannot be read.
    """
    try:
        wrapped = json.loads((path / MANIFEST).read_bytes())
        manifest = wrapped["content"]
        intact = wrapped["sha256"] == _hash_json(manifest)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path / MANIFEST} is missing") from None
    except IsADirectoryError:
        raise CheckpointDamaged(f"{path / MANIFEST} is a folder") from None
    except OSError as error:
        raise UserError(f"cannot read {path / MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise CheckpointDamaged(f"{path / MANIFEST} is damaged") from None
    if not intact:
        raise CheckpointDamaged(f"{path / MANIFEST} is damaged")
    if manifest["format"] != FORMAT:
        raise UserError(f"{path} has checkpoint format {manifest['format']}, this version reads {FORMAT}")
    for name, expected in manifest["files"].items():
        try:
            _verify_file(path / name, expected)
        except OSError as error:
            raise UserError(f"cannot read {path / name}: {error.strerror}") from error
    return dict(manifest)


def _verify_file(file: Path, expected: dict[str, Any]) -> None:
    if not file.is_file():
        raise CheckpointDamaged(f"{file} is missing")
    if file.stat().st_size != expected["bytes"]:
        raise CheckpointDamaged(f"{file} has {file.stat().st_size} bytes instead of {expected['bytes']}")
    if _hash(file) != expected["sha256"]:
        raise CheckpointDamaged(f"{file} has changed since it was written (SHA-256 differs)")


def is_intact(path: Path) -> bool:
    """Whether `verify_checkpoint` accepts the checkpoint."""
    try:
        verify_checkpoint(path)
    except UserError:
        return False
    return True


def _hash(path: Path, *, flush: bool = False) -> str:
    with path.open("rb", buffering=0) as file:
        if flush:
            os.fsync(file.fileno())
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_READ_BYTES, max(1, path.stat().st_size))))
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
        return digest.hexdigest()


def _hash_json(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
