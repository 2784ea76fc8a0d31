"""The manifest of a checkpoint: size and SHA-256 of each file, to refuse files that are cut or changed."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from trifocal.errors import UserError
from trifocal.paths import parse_json, read_file, reading
from trifocal.train.run_folder import flush

if TYPE_CHECKING:
    from trifocal.distributed.processes import DistributedContext

FORMAT = 3
MANIFEST = "manifest.json"


class CheckpointDamaged(UserError):
    """A file of a checkpoint is missing or differs from the manifest."""


def describe_files(folder: Path, processes: "DistributedContext") -> dict[str, dict[str, Any]]:
    """Flush every file to the disk, and compute its size and SHA-256; the processes share the files."""
    mine = _files(folder)[processes.rank :: processes.size]

    def describe() -> dict[str, dict[str, Any]]:
        with ThreadPoolExecutor() as pool:
            return dict(zip(mine, pool.map(lambda name: describe_file(folder / name), mine), strict=True))

    found = {name: entry for part in processes.gather(processes.run_on_all(describe)) for name, entry in part.items()}
    return dict(sorted(found.items()))


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint with its own hash, and flush it to the disk."""
    (folder / MANIFEST).write_text(json.dumps({"content": manifest, "sha256": _hash_json(manifest)}, indent=1))
    flush(folder / MANIFEST)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint (`format`, `step`, `model`, `files`); refused if missing, damaged or too old."""
    file = path / MANIFEST
    if not file.exists():
        raise CheckpointDamaged(f"{file} is missing")
    content = read_file(file)
    try:
        wrapped = parse_json(content)
        manifest = dict(wrapped["content"])
        intact = wrapped["sha256"] == _hash_json(manifest)
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise CheckpointDamaged(f"{file} is damaged")
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {manifest['format']}, expected {FORMAT}; take the version that wrote it"
        )
    return manifest


def verify_checkpoint(path: Path, *, optimizer: bool = True) -> dict[str, Any]:
    """The manifest of a checkpoint; a file that is missing, cut, changed or too many is refused by its name. Without
    `optimizer`, the content of files that hold nothing else is not compared.
    """
    manifest = read_manifest(path)
    expected = manifest["files"]
    # All files of tensors in the folder are read.
    with reading(path):
        extra = sorted(name for name in set(_files(path)) - expected.keys() if name.endswith(".safetensors"))
    if extra:
        raise CheckpointDamaged(f"{path / extra[0]} does not belong to it")
    verify_files(path, expected, optimizer=optimizer)
    return manifest


def verify_files(folder: Path, expected: dict[str, dict[str, Any]], *, optimizer: bool = True) -> None:
    """Compare files with the sizes and SHA-256 of `describe_file`; see `verify_checkpoint`."""
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda name: _verify_file(folder / name, expected[name], optimizer), expected):
            pass


def _verify_file(file: Path, expected: dict[str, Any], optimizer: bool) -> None:
    with reading(file):
        if not file.is_file():
            raise CheckpointDamaged(f"{file} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointDamaged(f"{file} has {file.stat().st_size} bytes, expected {expected['bytes']}")
        if (optimizer or not _has_optimizer_only(file)) and _hash(file) != expected["sha256"]:
            raise CheckpointDamaged(f"{file} has changed since it was written (SHA-256 differs)")


def _has_optimizer_only(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt") as tensors:
            return all(name.startswith("optimizer.") for name in tensors.keys())  # noqa: SIM118
    except SafetensorError:
        return False


def is_intact(path: Path) -> bool:
    """Whether `verify_checkpoint` accepts the checkpoint."""
    try:
        verify_checkpoint(path)
    except UserError:
        return False
    return True


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def describe_file(path: Path) -> dict[str, Any]:
    """Flush a file to the disk, and compute its size and SHA-256."""
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": _hash(path)}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_json(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
