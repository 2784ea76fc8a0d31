"""The files of a checkpoint's tensors are safetensors files, as the library itself reads them."""

import errno
import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trifocal.train.checkpoint import save_load, tensor_files
from trifocal.train.checkpoint.tensor_files import write_tensors

METADATA = {"format": "pt", "text": 'é "quoted"'}


def tensors() -> dict[str, torch.Tensor]:
    """All types, scalars, empty ones and transposed ones; odd sizes, so that a wrong order would misalign others."""
    drawn = {str(dtype): torch.arange(-7, 8).to(dtype) for dtype in tensor_files._DTYPES}
    return drawn | {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "a part": torch.arange(20.0)[3:8],
        "naïve": torch.tensor([True]),
    }


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours", tensors(), METADATA)
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == METADATA


def test_each_number_lies_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours", tensors(), METADATA)
    content = (tmp_path / "ours").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    assert end % 8 == 0
    for name, tensor in tensors().items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0, name


def test_no_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours", {}, {})
    assert load_file(tmp_path / "ours") == {}


def test_a_full_disk_says_so() -> None:
    with pytest.raises(OSError) as caught:
        write_tensors(Path("/dev/full"), {"x": torch.zeros(100_000)}, {})
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    try:
        if not enabled:
            gc.disable()
        with pytest.raises(OSError), save_load._without_collector():
            assert not gc.isenabled()
            raise OSError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
