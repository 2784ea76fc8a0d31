"""FineWeb-Edu: from a local copy of its repository, from a stand-in for the hub, and without any."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trifocal.data import DataConfig, make_loader, make_tokenizer
from trifocal.data.hub import open_fineweb
from trifocal.data.parquet import ParquetSource
from trifocal.data.retry import Activity, DataError, Retry
from trifocal.errors import UserError

datasets = pytest.importorskip("datasets")
huggingface_hub = pytest.importorskip("huggingface_hub")

CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
  - split: held
    path: sample/held/*
---
"""
REVISION = "0123456789abcdef0123456789abcdef01234567"
FILES = (
    "data/CC-MAIN-2024-10/000.parquet",
    "sample/10BT/000.parquet",
    "sample/10BT/001.parquet",
    "sample/held/0.parquet",
)


@pytest.fixture
def repository(write_parquet: Callable[..., Path], texts: Callable[..., list[str]], tmp_path: Path) -> Path:
    for number, name in enumerate(FILES):
        write_parquet(f"repository/{name}", texts(60, seed=number))
    (tmp_path / "repository" / "README.md").write_text(CARD)
    return tmp_path / "repository"


def open_source(**settings: Any) -> ParquetSource:
    activity = Activity()
    config = DataConfig(source="fineweb-edu", **settings)
    return open_fineweb(config, "text", Retry(2, 0.01, 0.02, activity), activity)


def first_batches(config: DataConfig) -> list[list[list[int]]]:
    with make_loader(
        config, tokenizer=make_tokenizer("bytes"), sequence_length=128, batch_size=4, vocab_size=257
    ) as loader:
        return [next(loader).tokens.tolist() for _ in range(20)]


def test_a_local_copy_of_the_repository(repository: Path) -> None:
    source = open_source(fineweb_repository=str(repository))
    assert source.shards == ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
    assert open_source(fineweb_repository=str(repository), fineweb_split="held").shards == ["sample/held/0.parquet"]
    default = open_source(fineweb_repository=str(repository), fineweb_name="default")
    assert default.shards == ["data/CC-MAIN-2024-10/000.parquet"]
    assert len({source.fingerprint, default.fingerprint}) == 2


def test_it_reads_what_datasets_streams(repository: Path) -> None:
    source = open_source(fineweb_repository=str(repository))
    streamed = datasets.load_dataset(str(repository), name="sample-10BT", split="train", streaming=True)
    ours = [document.text for shard in range(2) for document, _ in source.read(shard, None)]
    assert ours == [row["text"] for row in streamed]
    assert len(ours) == 120


def test_a_folder_of_its_files_gives_the_same_rows(repository: Path) -> None:
    config = DataConfig(source="fineweb-edu", fineweb_repository=str(repository))
    folder = DataConfig(source=f"fineweb-edu:{repository}/sample/10BT")
    assert first_batches(config) == first_batches(folder)


def test_unknown_names(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fineweb_name 'sample-10B' is not in .*; the nearest is sample-10BT"):
        open_source(fineweb_repository=str(repository), fineweb_name="sample-10B")
    with pytest.raises(UserError, match=r"fineweb_split 'test' .* the nearest is \w+ \(it has train, held\)"):
        open_source(fineweb_repository=str(repository), fineweb_split="test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^fineweb-edu: .*empty sample-10BT cannot be opened: "):
        open_source(fineweb_repository=str(tmp_path / "empty"))


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def unreachable(*args: object, **kwargs: object) -> None:
        calls.append(args)
        raise ConnectionError("Couldn't reach 'HuggingFaceFW/fineweb-edu' on the Hub (ConnectTimeout)")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(DataError, match=r"gave up after 2 attempts .* the hub cannot be reached: Couldn't reach"):
        open_source()
    assert len(calls) == 2


@pytest.mark.parametrize(("status", "kind"), [(429, DataError), (503, DataError), (401, UserError), (404, UserError)])
def test_what_the_hub_answers(monkeypatch: pytest.MonkeyPatch, status: int, kind: type) -> None:
    class HubError(OSError):
        response = type("Response", (), {"status_code": status})()

    def failing(*args: object, **kwargs: object) -> None:
        raise HubError("an answer\nof two lines")

    monkeypatch.setattr(datasets, "load_dataset_builder", failing)
    with pytest.raises(UserError, match="an answer of two lines") as info:
        open_source()
    assert type(info.value) is kind


def test_other_kinds_of_files(repository: Path) -> None:
    (repository / "sample" / "10BT" / "002.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=r"002\.jsonl is not a parquet file|cannot be opened"):
        open_source(fineweb_repository=str(repository))


def test_the_hub_switched_off_is_a_clear_error(tmp_path: Path) -> None:
    code = (
        "from trifocal.data import *\n"
        "make_loader(DataConfig(source='fineweb-edu'), tokenizer=make_tokenizer('bytes'),"
        " sequence_length=8, batch_size=1, vocab_size=257)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert "UserError: fineweb-edu: the hub is switched off (HF_HUB_OFFLINE is set); unset it, or read" in last
    assert done.returncode == 1


def test_files_on_the_hub_are_read_by_their_pinned_address(
    repository: Path, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `datasets` answers online: `hf://` paths at a commit, served here at the address that they stand for."""
    prefix = f"datasets/HuggingFaceFW/fineweb-edu/resolve/{REVISION}"
    server = serve({f"{prefix}/{name}": (repository / name).read_bytes() for name in FILES})
    server.faults = {2: 429, 5: 500, 7: "cut"}

    files = [f"hf://datasets/HuggingFaceFW/fineweb-edu@{REVISION}/{name}" for name in FILES[1:3]]
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": files}))
    asked: list[dict[str, object]] = []

    def load_dataset_builder(path: str, **settings: object) -> SimpleNamespace:
        asked.append({"path": path, **settings})
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "example")
    address = huggingface_hub.hf_hub_url

    def local_address(*args: Any, **settings: Any) -> str:
        return re.sub(r"^https?://[^/]+", server.url, address(*args, **settings))

    monkeypatch.setattr(huggingface_hub, "hf_hub_url", local_address)
    ours = first_batches(DataConfig(source="fineweb-edu", retry_base_seconds=0.01))
    assert ours == first_batches(DataConfig(source=f"fineweb-edu:{repository}/sample/10BT"))
    assert asked == [{"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "revision": "main"}]
    assert set(server.authorizations) == {"Bearer example"}
    assert REVISION in open_source().name
