"""Checkpoints are complete or absent, and every damage is found and named."""

import errno
import json
import os
import pickle
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.written_runs import Attack
from trifocal.distributed.processes import DistributedContext
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.testing.small_models import small_config
from trifocal.train.checkpoint import folders, manifest
from trifocal.train.checkpoint import save_load as module
from trifocal.train.checkpoint.folders import (
    checkpoint_path,
    delete_later,
    find_checkpoint,
    list_checkpoints,
    prune_checkpoints,
)
from trifocal.train.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    CheckpointDamaged,
    describe_files,
    verify_checkpoint,
    write_manifest,
)
from trifocal.train.checkpoint.random_state import random_state, restore_random_state, seed_everything
from trifocal.train.checkpoint.save_load import collect_state, load_checkpoint, load_model_weights, write_checkpoint
from trifocal.train.config.sections import OptimizerSection
from trifocal.train.run_folder import remove_folder
from trifocal.train.step.optimizer import make_optimizer

CONFIG = small_config(num_layers=1, dim=8, mlp_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4)
STATE = {"step": 3, "data": {"sample_index": 12}}


def make_model(seed=0):
    model = DecoderLM(CONFIG)
    model.init_weights(seed)
    optimizer = make_optimizer(model, OptimizerSection())
    tokens = torch.arange(24).remainder(20).view(2, 12)
    model(tokens, tokens).backward()
    optimizer.step()
    return model, optimizer


def save(run, step):
    return write_checkpoint(
        run / "checkpoints",
        step,
        state=collect_state(*make_model()),
        model_config=CONFIG,
        process_state=STATE,
        processes=DistributedContext(),
    )


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_any_damage_to_any_file_is_found_and_the_file_named(tmp_path):
    path = save(tmp_path, 3)
    files = files_of(path)
    names = {"manifest.json", "rank0.json", "shard-00001-model-00001-of-00001.safetensors"}
    assert {file.name for file in files} == names
    for file in files:
        content = file.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:middle], None):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            with pytest.raises(UserError, match=re.escape(str(file))):
                find_checkpoint(tmp_path / "checkpoints")
            file.write_bytes(content)
    verify_checkpoint(path)


def test_the_optimizer_s_files_are_hashed_for_those_who_read_them(tmp_path, monkeypatch):
    """Large weights lie in several files."""
    monkeypatch.setattr(module, "_FILE_BYTES", 1000)
    path = save(tmp_path, 1)
    hashed = []
    real = manifest._hash
    monkeypatch.setattr(manifest, "_hash", lambda file: (hashed.append(file.name), real(file))[1])
    first, *_, last = sorted((path / "weights").iterdir())
    for file in (last, first):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointDamaged, match=rf"{file.name} has changed"):
            verify_checkpoint(path)
        if file == last:
            hashed.clear()
            verify_checkpoint(path, optimizer=False)
            assert first.name in hashed and last.name not in hashed
            file.write_bytes(content[:-1])
            with pytest.raises(CheckpointDamaged, match=rf"{file.name} has {len(content) - 1} bytes, expected"):
                verify_checkpoint(path, optimizer=False)
        else:
            with pytest.raises(CheckpointDamaged, match=rf"{file.name} has changed"):
                verify_checkpoint(path, optimizer=False)
        file.write_bytes(content)
    model, expected = DecoderLM(CONFIG), make_model()[0]
    load_model_weights(path, model=model, model_config=CONFIG)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_the_error_offers_the_newest_intact_checkpoint_before(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    (paths[2] / "rank0.json").write_text("{}")
    with pytest.raises(UserError, match=r"the newest intact one before it is \S+/step_00000002$"):
        find_checkpoint(tmp_path / "checkpoints", "step_00000003")
    (paths[3] / "rank0.json").write_text("{}")
    with pytest.raises(UserError, match=r"step_00000004 is damaged: .*rank0\.json") as caught:
        find_checkpoint(tmp_path / "checkpoints", command="trifocal train --resume RUN")
    assert str(caught.value).endswith("trifocal train --resume RUN --checkpoint step_00000002")
    assert find_checkpoint(tmp_path / "checkpoints", "step_00000002") == paths[1]
    (paths[0] / "manifest.json").unlink()
    (paths[1] / "manifest.json").unlink()
    with pytest.raises(UserError, match="no intact checkpoint lies before it"):
        find_checkpoint(tmp_path / "checkpoints")


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_called_damaged(tmp_path, monkeypatch):
    path = save(tmp_path, 3)

    def verify(*_, **__):
        remove_folder(path)
        verify_checkpoint(path)

    monkeypatch.setattr(folders, "verify_checkpoint", verify)
    with pytest.raises(UserError, match=r"step_00000003 was removed while it was read, .*; run the command again$"):
        find_checkpoint(tmp_path / "checkpoints")


def test_another_model_is_refused_and_the_difference_named(tmp_path):
    path = save(tmp_path, 3)
    wider = replace(CONFIG, mlp_dim=16, geometry=replace(CONFIG.geometry, window_size=9))
    model = DecoderLM(wider)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(
        UserError, match=r"a different model: mlp_dim is 8 there, 16 here; geometry\.window_size is 7 there, 9 here"
    ):
        load_checkpoint(path, model=model, optimizer=make_optimizer(model, OptimizerSection()), model_config=wider)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    # How the model is computed is free to change.
    model, optimizer = make_model()
    load_checkpoint(path, model=model, optimizer=optimizer, model_config=replace(CONFIG, backend="reference"))


def test_a_full_disk_leaves_nothing_and_harms_nothing(tmp_path, monkeypatch):
    """The error comes at each of the writes, the flushes and the rename in turn."""
    complete = save(tmp_path, 1)
    before = {file: file.read_bytes() for file in files_of(complete)}
    calls = 0

    def counted(original, fail_at):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        return call

    fail_at = 1
    while True:
        calls = 0
        with monkeypatch.context() as patch:
            for target, name in ((os, "fsync"), (Path, "write_text"), (Path, "mkdir"), (Path, "rename")):
                patch.setattr(target, name, counted(getattr(target, name), fail_at))
            try:
                save(tmp_path, 2)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                break
        if (tmp_path / "checkpoints" / "step_00000002").exists():
            # The rename itself was done, only its flush failed: then all of it is there.
            verify_checkpoint(tmp_path / "checkpoints" / "step_00000002")
            shutil.rmtree(tmp_path / "checkpoints" / "step_00000002")
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
        assert {file: file.read_bytes() for file in files_of(complete)} == before
        fail_at += 1
    assert fail_at > 8, "fewer writes than there are files"


def test_keeps_the_last_ones_and_every_mth(tmp_path):
    root = tmp_path / "checkpoints"
    for step in range(2, 22, 2):
        checkpoint_path(root, step).mkdir(parents=True)
        prune_checkpoints(root, keep_last=2, keep_every_steps=8)
    assert [int(path.name[5:]) for path in list_checkpoints(root)] == [8, 16, 18, 20]
    prune_checkpoints(root, keep_last=1, keep_every_steps=0, keep_step=16)
    assert [int(path.name[5:]) for path in list_checkpoints(root)] == [16, 20]
    for name in ("partial_step_00000022", "step_18"):
        (root / name).mkdir()
    files = [tmp_path / "samples" / "step_00000016.txt", tmp_path / "evaluation" / "step_00000018.json"]
    for file in files:
        file.parent.mkdir()
        file.touch()
    delete_later(tmp_path, 16)
    assert sorted(path.name for path in root.iterdir()) == ["step_00000016", "step_18"]
    assert [file.exists() for file in files] == [True, False]


@pytest.mark.parametrize("kind", ["pickle", "cut", "another shape", "absent"])
def test_a_broken_or_hostile_file_with_a_right_manifest_is_refused(tmp_path, kind):
    path, made = save(tmp_path, 2), tmp_path / "made by the attack"
    (file,) = (path / "weights").iterdir()
    tensors = load_file(file)
    if kind == "pickle":
        file.write_bytes(pickle.dumps(Attack(made)))
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    elif kind == "absent":
        file.unlink()
    else:
        save_file(tensors | {"model.embedding.weight": torch.zeros(3)}, file)
    manifest = json.loads((path / MANIFEST).read_text())["content"]
    (path / MANIFEST).unlink()
    write_manifest(path, manifest | {"files": describe_files(path, DistributedContext())})
    assert find_checkpoint(tmp_path / "checkpoints") == path, "its hashes are right"
    model, optimizer = make_model(1)
    with pytest.raises(UserError, match=r"cannot load .*weights: "):
        load_checkpoint(path, model=model, optimizer=optimizer, model_config=CONFIG)
    with pytest.raises(UserError, match=r"cannot load .*weights: "):
        load_model_weights(path, model=model, model_config=CONFIG)
    assert not made.exists()


def test_a_file_of_tensors_that_does_not_belong_to_it_is_found(tmp_path):
    path = save(tmp_path, 2)
    save_file({"model.embedding.weight": torch.zeros(2)}, path / "weights" / "another.safetensors")
    with pytest.raises(UserError, match=r"another\.safetensors does not belong to it"):
        find_checkpoint(tmp_path / "checkpoints")


def test_random_generators_continue_where_they_were():
    seed_everything(3)
    # Each draws two numbers of a normal distribution at a time, and keeps one.
    random.gauss(), np.random.normal()
    state = json.loads(json.dumps(random_state()))

    def draw():
        return random.gauss(), random.random(), np.random.normal(), np.random.random(), torch.rand(()).item()

    expected = draw()
    restore_random_state(state)
    assert draw() == expected
    state["numpy"][1] = -1
    with pytest.raises(ValueError, match="is at -1 of 624 numbers"):
        restore_random_state(state)


def test_each_process_gets_its_own_state_and_more_of_them_that_of_another(tmp_path):
    path, (model, optimizer) = save(tmp_path, 3), make_model()
    (path / "rank1.json").write_text(json.dumps(STATE | {"random": "of rank 1"}))
    for rank, expected in ((0, STATE), (1, STATE | {"random": "of rank 1"}), (2, STATE)):
        processes = DistributedContext(rank=rank, size=3)
        given = {"model": model, "optimizer": optimizer, "model_config": CONFIG, "processes": processes}
        assert load_checkpoint(path, **given) == expected


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 99)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"format 99, expected {FORMAT}"):
        verify_checkpoint(path)
