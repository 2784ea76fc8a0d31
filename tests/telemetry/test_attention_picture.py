"""The attention picture against the model that it shows, and its file."""

import contextlib
import functools

import numpy as np
import pytest
import torch

from tests.telemetry.test_telemetry import GEOMETRY, LENGTH, model_of
from tests.written_runs import Attack
from trifocal.errors import UserError
from trifocal.telemetry.attention_picture import read_picture
from trifocal.telemetry.attention_telemetry import AttentionTelemetry

TEXTS = [chr(97 + index % 26) for index in range(LENGTH)]


@functools.cache
def plain():
    """One picture for the tests of its file."""
    return picture_of()


def picture_of(borders=None, **changes):
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 64
    cu_seqlens = None if borders is None else torch.tensor(borders)
    return AttentionTelemetry(model_of(**changes)).picture(7, tokens, TEXTS, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("chooser", ["compressed", "index"])
@pytest.mark.parametrize("borders", [None, [0, 60, 200, 2 * LENGTH]])
def test_it_shows_what_a_query_may_read_and_no_more(borders, chooser):
    picture = picture_of(borders, chooser=chooser)
    layers, queries, groups, blocks = picture.importance.shape
    # A document of 90 tokens may have 16 blocks.
    assert (layers, queries, groups, blocks) == (3, 128, 2, 16 if borders else 19)
    assert picture.selected.shape == (3, 128, 2, 4) and picture.gates.shape == (3, 128, 2, 3)
    assert (picture.step, picture.geometry, picture.texts) == (7, GEOMETRY, TEXTS)
    second = 60 if borders else LENGTH
    assert picture.documents.tolist() == [int(t >= second) for t in range(LENGTH)]
    assert picture.positions.tolist() == [t - second if t >= second else t for t in range(LENGTH)]
    own = picture.positions[picture.queries] // 8
    for index, block in enumerate(own.tolist()):
        for chosen in picture.selected[:, index].reshape(-1, 4).tolist():
            kept = [b for b in chosen if b >= 0]
            assert len(kept) == min(4, block + 1) and kept == sorted(kept)
            assert {0, block} <= set(kept) and max(kept) == block
        assert (picture.dense[:, index, :, block + 1 :] == 0).all()
        assert (picture.importance[:, index, :, block + 1 :] == 0).all()
    # The code is a square root: its squares add up to the whole, but for rounding.
    total = ((picture.dense / 255.0) ** 2).sum(-1)
    assert np.abs(total - 1).max() < 0.05
    assert picture.gates.mean() / 255 == pytest.approx(0.5, abs=0.1)


def test_the_file_gives_back_what_was_written(tmp_path):
    picture = plain()
    path = tmp_path / "attention" / "step_00000007.npz"
    picture.save(path)
    again = read_picture(path)
    for name in ("step", "geometry", "texts", "layers", "others"):
        assert getattr(again, name) == getattr(picture, name)
    for name in ("positions", "documents", "queries", "selected", "importance", "dense", "gates"):
        mine, other = getattr(picture, name), getattr(again, name)
        assert mine.dtype == other.dtype and np.array_equal(mine, other)
    assert path.stat().st_size < 40_000
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "step_1.npz"
    path.write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"step_1\.npz"):
        read_picture(path)
    plain().save(path)
    content = path.read_bytes()
    # In the compressed data too, and in the archive's own directory.
    for place in range(30, len(content), 53):
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        with contextlib.suppress(UserError):
            read_picture(path)


def test_a_pickle_in_a_picture_is_not_loaded(tmp_path):
    path, made = tmp_path / "a.npz", tmp_path / "made by the attack"
    plain().save(path)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["gates"] = np.array([Attack(made)], dtype=object)
    np.savez(path, **arrays)
    with pytest.raises(UserError, match=r"a\.npz"):
        read_picture(path)
    assert not made.exists()
