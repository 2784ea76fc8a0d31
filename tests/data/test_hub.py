"""FineWeb-Edu: from a local copy of its repository, from a stand-in for the hub, and without any."""

import json
import re
import sys
from dataclasses import replace
from pathlib import PurePosixPath
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

from tests import warm
from tests.children import environment, wait_for_end
from tests.data.loaders import open_loader
from tests.data.server import FileServer
from trifocal.data import DataConfig
from trifocal.data.prefetch import Activity
from trifocal.data.sources.base import BadDocuments
from trifocal.data.sources.hub import open_dataset
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
NAME = "HuggingFaceFW/fineweb-edu"
FILES = (
    "data/CC-MAIN-2024-10/000.parquet",
    "sample/10BT/000.parquet",
    "sample/10BT/001.parquet",
    "sample/held/0.parquet",
)


@pytest.fixture
def repository(write_parquet, texts, tmp_path):
    for number, name in enumerate(FILES):
        write_parquet(f"repository/{name}", texts(60, seed=number))
    (tmp_path / "repository" / "README.md").write_text(CARD)
    return tmp_path / "repository"


def open_source(source="fineweb-edu", *, reads="train", **settings):
    config = DataConfig(source=source, **settings)
    return open_dataset(config, reads, Activity(), BadDocuments())[0]


def test_a_local_copy_of_the_repository(repository):
    source = open_source(f"hf:{repository}:sample-10BT")
    assert source.shards == ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
    assert open_source(f"hf:{repository}:sample-10BT", split="held").shards == ["sample/held/0.parquet"]
    default = open_source(f"hf:{repository}")
    assert default.shards == ["data/CC-MAIN-2024-10/000.parquet"]
    assert len({source.fingerprint, default.fingerprint}) == 2
    moved = repository.rename(repository.with_name("moved"))
    assert open_source(f"hf:{moved}:sample-10BT").fingerprint == source.fingerprint


def test_a_split_for_validation(repository):
    """The one named validation, or another by name; without one, a share of the documents."""
    source = f"hf:{repository}:sample-10BT"
    share = open_source(source, reads="validation")
    assert len(share.shards) == 2 and next(share.read(0, None))[0].held_out is None
    with pytest.raises(UserError, match=r"no split named validation; name one of train, held in"):
        open_source(source, reads="validation", validation_fraction=0.0)
    held = open_source(source, reads="validation", validation_split="held")
    assert held.shards == ["sample/held/0.parquet"]
    assert {document.held_out for document, _ in held.read(0, None)} == {True}
    train = open_source(source, validation_split="held")
    assert {document.held_out for document, _ in train.read(0, None)} == {False}
    (repository / "README.md").write_text(CARD.replace("split: held", "split: validation"))
    assert open_source(source, reads="validation", validation_fraction=0.0).shards == held.shards
    (repository / "sample" / "10BT" / "002.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=r"002\.jsonl is no parquet file; .* --data\.revision refs/convert/parquet, or"):
        open_source(source)


def test_a_run_keeps_its_split_for_validation(repository):
    """Without it, a share of what was trained on would be held out."""
    source = f"hf:{repository}:sample-10BT"
    with open_loader(source, validation_split="held") as loader:
        state = loader.state_dict()
    with open_loader(source) as loader, pytest.raises(UserError, match=r"validation_split held -> none;"):
        loader.load_state_dict(state)
    with open_loader(source) as loader:
        state = loader.state_dict()
    (repository / "README.md").write_text(CARD.replace("split: held", "split: validation"))
    with open_loader(source) as loader, pytest.raises(UserError, match=r"the files \(names and sizes\) \w+ -> \w+;"):
        loader.load_state_dict(state)


def test_unknown_names(repository, tmp_path):
    with pytest.raises(UserError, match=r"cannot be opened: BuilderConfig 'sample-10B' not found\. Available: .*-10BT"):
        open_source(f"hf:{repository}:sample-10B")
    for key in ("split", "validation_split"):
        with pytest.raises(UserError, match=rf"{key[-5:]} 'test' .* the nearest is \w+ \(it has train, held\)"):
            open_source(f"hf:{repository}:sample-10BT", **{key: "test"})
    with pytest.raises(UserError, match="are both 'held'; validate on other data"):
        open_source(f"hf:{repository}:sample-10BT", split="held", validation_split="held")
    (repository / "README.md").write_text(CARD.replace("default", "full"))
    with pytest.raises(UserError, match=r"cannot be opened: .*available configs: .*sample-10BT"):
        open_source(f"hf:{repository}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^hf:.*empty cannot be opened: "):
        open_source(f"hf:{tmp_path / 'empty'}")
    with pytest.raises(UserError, match=r"no such folder: .*nowhere$"):
        open_source(f"hf:{tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match=r"no such folder: nowhere$"):
        open_source("hf:./nowhere#text")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"^data\.source hf:a/b needs an extra: pip install 'trifocal\[data\]'$"):
        open_source("hf:a/b")


def test_without_a_network_the_line_names_text_that_needs_none(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^hf:.*10BT cannot be opened: .*; --data\.source builtin needs no network$"):
        open_source()


def test_a_run_keeps_the_commit_that_it_began_with(monkeypatch):
    commits = {"main": "a" * 40}

    def builder(repository, *, name, revision):
        file = f"hf://datasets/{repository}@{commits.get(revision, revision)}/sample/10BT/000.parquet"
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": [file]}))

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)

    config = DataConfig(source="fineweb-edu")
    with open_loader(config) as first:
        state = first.state_dict()
    assert first.config == replace(config, revision="a" * 40)
    commits["main"] = "b" * 40
    with open_loader(first.config) as resumed:
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state and resumed.config == first.config
    # The branch by name is other data now.
    with (
        open_loader(config) as other,
        pytest.raises(UserError, match=r"belongs to .*@a{40}, this run reads .*@b{40}: "),
    ):
        other.load_state_dict(state)


class StandInHub(FileServer):
    """Answers the requests of `datasets` about one repository."""

    sizes: dict[str, int]

    def answer(self, handler):
        path = unquote(urlsplit(handler.path).path)
        resolve = re.fullmatch(rf"/datasets/{NAME}/resolve/(main|{REVISION})/(.+)", path)
        if resolve is not None and resolve[2].endswith(".parquet"):
            super().answer(handler)
        elif resolve is not None:
            body = CARD.encode() if resolve[2] == "README.md" else None
            self._reply(handler, body, {"X-Repo-Commit": REVISION, "ETag": '"card"'})
        elif path.startswith(f"/api/datasets/{NAME}/tree/{REVISION}"):
            folder = path.removeprefix(f"/api/datasets/{NAME}/tree/{REVISION}").strip("/")
            entries = self._list(folder, recursive="recursive=true" in handler.path)
            self._reply(handler, json.dumps(entries).encode(), {})
        elif path.startswith(f"/api/datasets/{NAME}"):
            self._reply(handler, json.dumps({"id": NAME, "sha": REVISION, "siblings": []}).encode(), {})
        else:
            self._reply(handler, None, {})

    def _list(self, folder, *, recursive):
        names = set(FILES)
        for name in FILES:
            names |= {str(parent) for parent in PurePosixPath(name).parents}
        chosen = [
            PurePosixPath(name)
            for name in sorted(names - {"."})
            if PurePosixPath(folder) in (PurePosixPath(name).parents if recursive else [PurePosixPath(name).parent])
        ]
        return [
            {
                "type": "file" if path.suffix else "directory",
                "oid": "0" * 40,
                "size": self.sizes.get(str(path), 0),
                "path": str(path),
            }
            for path in chosen
        ]

    def _reply(self, handler, body, headers):
        handler.send_response(404 if body is None else 200)
        if body is None:
            headers = headers | {"X-Error-Code": "EntryNotFound"}
        for name, value in (headers | {"Content-Length": str(len(body or b""))}).items():
            handler.send_header(name, value)
        handler.end_headers()
        if body is not None and handler.command != "HEAD":
            handler.wfile.write(body)


READ_FROM_HUB = """
import json
from trifocal.data import *
config = DataConfig(source="fineweb-edu", shuffle_sequences=8)
sizes = {"tokenizer": make_tokenizer("bytes"), "sequence_length": 128, "batch_size": 4, "vocab_size": 257}
with Loader(config, **sizes) as loader:
    batches = [next(loader).tokens.tolist() for _ in range(20)]
    state = loader.state_dict()
    following = next(loader).tokens.tolist()
# By the commit that it found: the hub knows it too.
with Loader(loader.config, **sizes) as again:
    again.load_state_dict(state)
    assert next(again).tokens.tolist() == following
    print(json.dumps([batches, state, again.config.revision]))
"""


def test_a_hub_that_lists_and_redirects(repository, serve, tmp_path):
    """The whole way as it is online, `datasets` and all, with a server of this test for the hub's address."""
    prefix = f"datasets/{NAME}/resolve/{REVISION}"
    store = serve({name: (repository / name).read_bytes() for name in FILES})
    hub = serve({}, StandInHub)
    hub.sizes = {name: len(content) for name, content in store.files.items()}
    hub.redirects = {f"/{prefix}/{name}": f"{store.url}/{name}" for name in FILES}
    variables = environment(HF_ENDPOINT=hub.url, HF_HOME=tmp_path / "home", HF_TOKEN="example", HF_HUB_OFFLINE=0)
    out, error = tmp_path / "out", tmp_path / "error"
    with out.open("wb") as stdout, error.open("wb") as stderr:
        process = warm.popen([sys.executable, "-c", READ_FROM_HUB], stdout=stdout, stderr=stderr, env=variables)
    assert wait_for_end(process, 120) == 0, error.read_text()
    batches, state, revision = json.loads(out.read_text().splitlines()[-1])
    folder = DataConfig(source=f"fineweb-edu:{repository}/sample/10BT", shuffle_sequences=8)
    with open_loader(folder, 128, 4) as loader:
        assert batches == [next(loader).tokens.tolist() for _ in range(20)]
    assert revision == REVISION
    assert state["source"] == f"hf:{NAME}:sample-10BT@{REVISION}"
    assert hub.requests and set(hub.authorizations) == {"Bearer example"}
    assert store.requests and set(store.authorizations) == {None}
