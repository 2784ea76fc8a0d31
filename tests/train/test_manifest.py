"""The hashes of a manifest: by their definition, in files of any size, and those of an older format."""

import hashlib
import json
from pathlib import Path

import pytest

from trifocal.distributed import Processes
from trifocal.train import manifest
from trifocal.train.manifest import MANIFEST, CheckpointDamaged, describe_files, verify_checkpoint, write_manifest


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 27])
def test_a_file_is_hashed_in_parts(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_PART_BYTES", 8)
    monkeypatch.setattr(manifest, "_READ_BYTES", 3)
    content = bytes(range(size))
    (tmp_path / "file").write_bytes(content)
    parts = [hashlib.sha256(content[begin : begin + 8]).digest() for begin in range(0, size, 8)]
    expected = {"bytes": size, "sha256": hashlib.sha256(b"".join(parts)).hexdigest()}
    assert describe_files(tmp_path, Processes()) == {"file": expected}


@pytest.mark.parametrize("place", [0, 7, 8, 19])
def test_a_changed_byte_of_any_part_is_found(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_PART_BYTES", 8)
    content = bytearray(range(20))
    (tmp_path / "file").write_bytes(content)
    write_manifest(tmp_path, {"format": 2, "files": describe_files(tmp_path, Processes())})
    assert verify_checkpoint(tmp_path)["format"] == 2
    content[place] ^= 1
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="file has changed"):
        verify_checkpoint(tmp_path)


def test_a_checkpoint_of_the_first_format_is_verified(tmp_path: Path) -> None:
    content = b"weights of before"
    (tmp_path / "file").write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    written = {"format": 1, "files": {"file": entry}}
    digest = hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps({"content": written, "sha256": digest}))
    assert verify_checkpoint(tmp_path) == written
    (tmp_path / "file").write_bytes(content.upper())
    with pytest.raises(CheckpointDamaged, match="file has changed"):
        verify_checkpoint(tmp_path)
