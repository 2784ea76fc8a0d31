"""The manifest of a checkpoint: size and SHA-256 of each file, to refuse files that are cut or changed.

A file is hashed in parts, by several threads, and its SHA-256 is that of the parts' ones behind each other: one thread
takes a second for a gigabyte.
"""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trifocal.errors import UserError

if TYPE_CHECKING:
    from trifocal.distributed import Processes

FORMAT = 2
_WITH_WHOLE_FILES_HASHED = 1
MANIFEST = "manifest.json"
_PART_BYTES = 64 * 2**20
# Much at a time: between reads a thread waits for the others of the program.
_READ_BYTES = 8 * 2**20
_MOST_THREADS = 16


class CheckpointDamaged(UserError):
    """A file of a checkpoint is missing or differs from the manifest."""


def describe_files(folder: Path, processes: "Processes") -> dict[str, dict[str, Any]]:
    """Flush every file to the disk, and compute its size and SHA-256; the processes share the files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    mine = paths[processes.rank :: processes.size]

    def describe() -> dict[str, dict[str, Any]]:
        return {path.relative_to(folder).as_posix(): _describe(path) for path in mine}

    found = {name: entry for part in processes.gather(processes.run_on_all(describe)) for name, entry in part.items()}
    return dict(sorted(found.items()))


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint with its own hash, and flush it to the disk."""
    (folder / MANIFEST).write_text(json.dumps({"content": manifest, "sha256": _hash_json(manifest)}, indent=1))
    _flush(folder / MANIFEST)


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
    if manifest["format"] not in (FORMAT, _WITH_WHOLE_FILES_HASHED):
        raise UserError(f"{path} has checkpoint format {manifest['format']}, this version reads formats up to {FORMAT}")
    hash_file = _hash if manifest["format"] == FORMAT else _hash_whole
    for name, expected in manifest["files"].items():
        try:
            _verify_file(path / name, expected, hash_file)
        except OSError as error:
            raise UserError(f"cannot read {path / name}: {error.strerror}") from error
    return dict(manifest)


def _verify_file(file: Path, expected: dict[str, Any], hash_file: Callable[[Path], str]) -> None:
    if not file.is_file():
        raise CheckpointDamaged(f"{file} is missing")
    if file.stat().st_size != expected["bytes"]:
        raise CheckpointDamaged(f"{file} has {file.stat().st_size} bytes instead of {expected['bytes']}")
    if hash_file(file) != expected["sha256"]:
        raise CheckpointDamaged(f"{file} has changed since it was written (SHA-256 differs)")


def is_intact(path: Path) -> bool:
    """Whether `verify_checkpoint` accepts the checkpoint."""
    try:
        verify_checkpoint(path)
    except UserError:
        return False
    return True


def _describe(path: Path) -> dict[str, Any]:
    _flush(path)
    return {"bytes": path.stat().st_size, "sha256": _hash(path)}


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _hash(path: Path) -> str:
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with path.open("rb") as file, ThreadPoolExecutor(threads) as pool:
        parts = pool.map(partial(_hash_part, file.fileno()), range(0, path.stat().st_size, _PART_BYTES))
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _hash_part(file: int, begin: int) -> bytes:
    digest, place, end = hashlib.sha256(), begin, begin + _PART_BYTES
    while place < end and (read := os.pread(file, min(_READ_BYTES, end - place), place)):
        digest.update(read)
        place += len(read)
    return digest.digest()


def _hash_whole(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_json(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
