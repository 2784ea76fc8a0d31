"""Files that are there whole or not at all."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from trifocal.runlog import write_environment
from trifocal.runlog.whole_files import write_whole


def test_a_full_disk_leaves_the_earlier_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    write_environment(path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError):
            write_environment(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_must_outlive_a_power_cut_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = tmp_path / "config.toml", []
    flush = os.fsync

    def seen(descriptor: int) -> Any:
        found.append((os.fstat(descriptor).st_size, path.exists()))
        return flush(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    write_whole(path, "seed = 1", flush=True)
    write_whole(path, b"seed = 22")
    assert found == [(8, False)] and path.read_text() == "seed = 22"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("env.json", ".env.json.partial"):
        (folder / name).symlink_to(outside)
    write_whole(folder / "env.json", "new")
    assert outside.read_text() == "mine"
    assert (folder / "env.json").read_text() == "new" and list(folder.iterdir()) == [folder / "env.json"]
