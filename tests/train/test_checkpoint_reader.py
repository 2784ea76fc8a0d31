"""Checkpoints of somebody else's run no code, whichever of their files carries it."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.test_checkpoint import CONFIG, make_model, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from trifocal.distributed import Processes
from trifocal.errors import UserError
from trifocal.train.checkpoint import load_checkpoint
from trifocal.train.checkpoint_folders import find_checkpoint
from trifocal.train.checkpoint_weights import load_model_weights
from trifocal.train.manifest import MANIFEST, describe_files, verify_checkpoint, write_manifest


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def sign(path: Path) -> None:
    """Write the manifest again, as an attacker would."""
    manifest = json.loads((path / MANIFEST).read_text())["content"]
    (path / MANIFEST).unlink()
    manifest["files"] = describe_files(path, Processes())
    write_manifest(path, manifest)
    verify_checkpoint(path)


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def change_metadata(path: Path, change: Callable[[Metadata], object]) -> None:
    file = path / "weights" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata) or metadata))


def put(path: Path, name: str, content: bytes, *, as_value: bool) -> None:
    """Store other bytes under the name of a tensor or value."""

    def change(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == name)
        info = metadata.storage_data[index]
        info.relative_path, info.offset, info.length = "__9_9.distcp", 0, len(content)
        if as_value:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()

    (path / "weights" / "__9_9.distcp").write_bytes(content)
    change_metadata(path, change)


ATTACKS = {
    "metadata": lambda path, attack: (path / "weights" / ".metadata").write_bytes(pickle.dumps(attack)),
    "inside metadata": lambda path, attack: change_metadata(path, lambda m: setattr(m, "planner_data", attack)),
    "tensor": lambda path, attack: put(path, "model.embedding.weight", saved(attack), as_value=False),
    "pickle as a tensor": lambda path, attack: put(
        path, "model.embedding.weight", pickle.dumps(attack), as_value=False
    ),
    "value": lambda path, attack: put(path, "optimizer.param_groups.0.lr", saved(attack), as_value=True),
}


@pytest.mark.parametrize("place", ATTACKS)
def test_no_file_of_a_checkpoint_runs_code(tmp_path: Path, place: str) -> None:
    path, made = save(tmp_path, 2), tmp_path / "made by the attack"
    ATTACKS[place](path, Attack(made))
    sign(path)
    assert find_checkpoint(tmp_path, command="") == path, "its hashes are right"
    model, optimizer = make_model(1)
    with pytest.raises(UserError, match=r"cannot load .*weights: "):
        load_checkpoint(path, model=model, optimizer=optimizer, model_config=CONFIG)
    if place != "value":
        with pytest.raises(UserError, match=r"cannot load .*weights: "):
            load_model_weights(path, model=model, model_config=CONFIG)
    assert not made.exists()


def test_the_attack_works_where_nothing_guards(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Attack(tmp_path / "made")))
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize("elsewhere", ["../../other", "/etc/hostname"])
def test_metadata_name_no_file_elsewhere(tmp_path: Path, elsewhere: str) -> None:
    path = save(tmp_path, 2)

    def change(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = elsewhere

    change_metadata(path, change)
    model, _ = make_model(1)
    with pytest.raises(UserError, match="it names a file elsewhere"):
        load_model_weights(path, model=model, model_config=CONFIG)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(3)])
def test_metadata_that_are_none_are_named(tmp_path: Path, content: bytes) -> None:
    path = save(tmp_path, 2)
    (path / "weights" / ".metadata").write_bytes(content)
    model, _ = make_model(1)
    with pytest.raises(UserError, match=r"\.metadata is not the metadata of a checkpoint"):
        load_model_weights(path, model=model, model_config=CONFIG)


def test_metadata_without_files_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    change_metadata(path, lambda metadata: setattr(metadata, "storage_data", {}))
    model, _ = make_model(1)
    with pytest.raises(UserError, match="cannot load"):
        load_model_weights(path, model=model, model_config=CONFIG)
    shutil.rmtree(path / "weights")
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        load_model_weights(path, model=model, model_config=CONFIG)


def put_pieces(path: Path, name: str, pieces: list[tuple[tuple[int, ...], torch.Tensor]]) -> None:
    """Store a tensor as pieces, as several processes would, each with its first element."""
    contents = [saved(piece) for _, piece in pieces]
    (path / "weights" / "__9_9.distcp").write_bytes(b"".join(contents))

    def change(metadata: Metadata) -> None:
        for index in [index for index in metadata.storage_data if index.fqn == name]:
            del metadata.storage_data[index]
        begin = 0
        for number, ((offsets, _), content) in enumerate(zip(pieces, contents, strict=True)):
            index = MetadataIndex(name, torch.Size(offsets), number)
            metadata.storage_data[index] = _StorageInfo("__9_9.distcp", begin, len(content))
            begin += len(content)

    change_metadata(path, change)


def test_weights_in_pieces_are_put_together(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    model, _ = make_model(1)
    whole = torch.randn_like(model.state_dict()["embedding.weight"])
    (rows, _), half = whole.shape, whole.shape[0] // 2
    put_pieces(path, "model.embedding.weight", [((half, 0), whole[half:].clone()), ((0, 0), whole[:half].clone())])
    with torch.device("meta"):
        empty = type(model)(CONFIG)
    load_model_weights(path, model=empty, model_config=CONFIG)
    assert torch.equal(empty.state_dict()["embedding.weight"], whole)
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in empty.parameters())
    for offsets in ((rows, 0), (-1, 0), (0,)):
        put_pieces(path, "model.embedding.weight", [(offsets, whole[half:].clone())])
        with pytest.raises(UserError, match=r"embedding\.weight is of another shape"):
            load_model_weights(path, model=model, model_config=CONFIG)
    put_pieces(path, "model.embedding.weight", [((0, 0), whole[half:].clone())])
    with pytest.raises(UserError, match=r"it does not hold all of model\.embedding\.weight"):
        load_model_weights(path, model=model, model_config=CONFIG)
