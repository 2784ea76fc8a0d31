"""Data sets of other formats than parquet, streamed by `datasets` from local folders."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trifocal.data import DataConfig, Loader, make_loader, make_tokenizer
from trifocal.data.activity import Activity
from trifocal.data.sources.base import BadDocuments, Source
from trifocal.data.sources.hub import open_dataset
from trifocal.errors import UserError

pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path: Path, texts: Callable[..., list[str]]) -> Path:
    """Two files to train on, one of them compressed, and one to validate on."""
    for number, name in enumerate(("train-0.jsonl.gz", "train-1.jsonl", "validation.jsonl")):
        lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts(40, seed=number)))
        opened: Any = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write(lines)
    return tmp_path


def open_source(source: str, reads: str = "train", **settings: Any) -> Source:
    return open_dataset(DataConfig(source=source, **settings), reads, Activity(), BadDocuments())[0]


def open_loader(source: str, **settings: Any) -> Loader:
    own = {name: settings.pop(name) for name in ("rank", "world_size", "split_read") if name in settings}
    return make_loader(
        DataConfig(source=source, **{"shuffle_sequences": 4, "shuffle_documents": 8} | settings),
        tokenizer=make_tokenizer("bytes"),
        sequence_length=64,
        batch_size=2,
        vocab_size=257,
        split=own.pop("split_read", "train"),
        **own,
    )


def test_documents_and_cursors(folder: Path, texts: Callable[..., list[str]]) -> None:
    source = open_source(f"hf:{folder}")
    assert source.shards == ["train-0.jsonl.gz", "train-1.jsonl"]
    for shard in range(2):
        whole = list(source.read(shard, None))
        assert [document.text for document, _ in whole] == texts(40, seed=shard)
        for at in (0, 7, 39):
            assert list(source.read(shard, whole[at][1])) == whole[at + 1 :]
    assert len(source.content_hashes()) == 2


def test_a_resume_repeats_the_uninterrupted_run(folder: Path) -> None:
    with open_loader(f"hf:{folder}") as loader:
        whole, states = [], []
        for _ in range(40):
            states.append(json.loads(json.dumps(loader.state_dict())))
            whole.append(next(loader))
    for at in (1, 13, 37):
        with open_loader(f"hf:{folder}") as loader:
            loader.load_state_dict(states[at])
            for expected in whole[at : at + 3]:
                assert torch.equal(next(loader).tokens, expected.tokens)
    with (folder / "train-1.jsonl").open("r+b") as file:
        file.seek(20)
        file.write(b"#")
    with open_loader(f"hf:{folder}") as loader, pytest.raises(UserError, match=r"train-1\.jsonl has changed since"):
        loader.load_state_dict(states[1])


def test_processes_share_the_files(folder: Path) -> None:
    with open_loader(f"hf:{folder}", streams=2) as loader:
        whole = [next(loader).tokens for _ in range(8)]
    for rank in range(2):
        with open_loader(f"hf:{folder}", streams=2, rank=rank, world_size=2) as loader:
            rows = torch.cat([next(loader).tokens for _ in range(4)])
        assert torch.equal(rows, torch.cat(whole)[rank::2])


def test_a_split_for_validation(folder: Path) -> None:
    """The one named validation, or another by name; without one, a share of the documents."""
    held = open_source(f"hf:{folder}", "validation")
    assert held.shards == ["validation.jsonl"]
    assert {document.held_out for document, _ in held.read(0, None)} == {True}
    assert {document.held_out for document, _ in open_source(f"hf:{folder}").read(0, None)} == {False}
    other = {"split": "validation", "validation_split": "train"}
    assert open_source(f"hf:{folder}", **other).shards == ["validation.jsonl"]
    assert len(open_source(f"hf:{folder}", "validation", **other).shards) == 2
    with open_loader(f"hf:{folder}", split_read="validation", validation_fraction=0.0) as loader:
        assert {name.partition("#")[0] for name in next(loader).document_ids} == {"validation.jsonl"}
    (folder / "validation.jsonl").unlink()
    alone = open_source(f"hf:{folder}", "validation")
    assert len(alone.shards) == 2 and next(alone.read(0, None))[0].held_out is None
    with pytest.raises(UserError, match=r"no split named validation; name one of train in data\.validation_split"):
        open_source(f"hf:{folder}", "validation", validation_fraction=0.0)


def test_other_formats(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,body\n1,"first, with a comma"\n2,second\n')
    documents = [document.text for document, _ in open_source(f"hf:{tmp_path}#body").read(0, None)]
    assert documents == ["first, with a comma", "second"]


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def message(source: str) -> str:
        with open_loader(source) as loader, pytest.raises(UserError) as caught:
            next(loader)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    path.write_text('{"id": 1, "body": "x"}\n')
    assert f"hf:{tmp_path} (a.jsonl): no field 'text'; it has 'id', 'body'" in message(f"hf:{tmp_path}")
    assert "a.jsonl): record 0: field 'id' must be a string or a list of messages, got int" in message(
        f"hf:{tmp_path}#id"
    )
    path.write_text('{"text": "x"\n' * 9)
    assert f"hf:{tmp_path} (a.jsonl) cannot be read: " in message(f"hf:{tmp_path}")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "a.md").write_text("# A page")
    with pytest.raises(UserError, match=r"^hf:\S+pages cannot be opened: "):
        open_source(f"hf:{tmp_path}/pages")
    path.write_text('{"text": "x"}\n{"text": null}\n')
    assert "(a.jsonl): record 1: field 'text' is null; data.on_bad_document" in message(f"hf:{tmp_path}")
