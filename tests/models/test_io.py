"""Weights as safetensors: there and back; a tensor that does not fit is named."""

import os

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.parametrizations import weight_norm

from trifocal import load_model
from trifocal.errors import UserError
from trifocal.models import DecoderLM, load_weights, save_weights
from trifocal.models.io import write_tensors


def test_files_of_an_earlier_model_do_not_stay(make_config, tmp_path):
    """Whole weights, shards, whole weights again: each time the last ones are read; what a killed process left goes."""
    left = tmp_path / ".weights.partial"
    left.mkdir()
    (left / "model-00009-of-00009.safetensors").touch()
    for shard_bytes, files in ((10**9, 1), (8000, 4), (10**9, 1)):
        model = DecoderLM(make_config())
        save_weights(model, tmp_path, shard_bytes=shard_bytes)
        found = len(list(tmp_path.glob("model*.safetensors*")))
        assert found == files if files == 1 else found >= files
        assert not left.exists()
        for load in (load_model, load_weights):
            assert torch.equal(load(str(tmp_path)).embedding.weight, model.embedding.weight)


def test_weights_that_could_not_be_read_are_not_written(make_config, tmp_path):
    model = DecoderLM(make_config())
    with pytest.raises(UserError, match=r"_orig_mod\..* differs; give the model inside of wrappers"):
        save_weights(torch.compile(model, backend="eager"), tmp_path)
    model.embedding = torch.nn.Embedding(40, 24)
    with pytest.raises(UserError, match=r"embedding.weight differs"):
        save_weights(model, tmp_path)
    weight_norm(model.head)
    with pytest.raises(UserError, match=r"merged into its weights"):
        save_weights(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_configuration_that_is_missing_or_of_another_kind_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no run at .*, nor weights: .* no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "trifocal"}', encoding="utf-8")
    with pytest.raises(UserError, match='lacks the table "model"'):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "trifocal", "model": {"dim": 24}, "hidden_size": 25}')
    with pytest.raises(UserError, match=r"got hidden_size = 25, but model\.dim = 24; give both one value"):
        load_weights(tmp_path)


def test_a_shard_outside_of_its_folder_is_not_read(make_config, tmp_path):
    folder = tmp_path / "model"
    save_weights(DecoderLM(make_config()), folder, shard_bytes=8000)
    shard, index = min(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    shard.rename(tmp_path / shard.name)
    index.write_text(index.read_text().replace(shard.name, f"../{shard.name}"))
    with pytest.raises(UserError, match=r"lacks the shard \.\./model-00001"):
        load_model(folder)


def test_tensors_are_readable_by_the_umask_and_need_not_be_contiguous(tmp_path):
    path = tmp_path / "tensors.safetensors"
    written = {"turned": torch.arange(6.0).view(2, 3).T, "part": torch.arange(20)[3:8], "empty": torch.empty(0, 5)}
    before = os.umask(0o027)
    try:
        write_tensors(path, written, {"format": "pt"})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    found = load_file(path)
    assert found.keys() == written.keys() and all(torch.equal(found[name], x) for name, x in written.items())
