"""Files that are there whole or not at all."""

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trifocal.runlog.environment import write_environment
from trifocal.runlog.whole_files import write_output, write_whole


def test_a_full_disk_leaves_the_earlier_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "env.json"
    write_environment(path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=r"env\.json"):
            write_environment(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_must_outlive_a_power_cut_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, found = tmp_path / "config.toml", []
    flush = os.fsync

    def seen(descriptor):
        found.append((os.fstat(descriptor).st_size, path.exists()))
        return flush(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    write_whole(path, "seed = 1", flush=True)
    write_whole(path, b"seed = 22")
    assert found == [(8, False)] and path.read_text() == "seed = 22"


def test_two_writers_of_one_file_leave_one_of_two_whole_files(tmp_path):
    path, contents = tmp_path / "report.html", ["a" * 100_000, "b" * 100_000]
    write_whole(path, contents[0])
    stop = threading.Event()

    def write(content):
        while not stop.is_set():
            write_whole(path, content)

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, content) for content in contents]
        seen = {path.read_text() for _ in range(200)}
        stop.set()
        for writer in writers:
            writer.result()
    assert seen <= set(contents)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_the_user_keeps_its_link_and_a_device_stays_a_device(tmp_path):
    target, link = tmp_path / "there" / "page.html", tmp_path / "page.html"
    link.symlink_to(target)
    write_output(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    write_output(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()
    with pytest.raises(OSError, match="No space left"):
        write_output(Path("/dev/full"), "lost")
