"""Writing the tensors of a checkpoint so that training continues meanwhile in another thread."""

import itertools
import json
import os
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of the types in files."""


class TensorFileWriter(HuggingFaceStorageWriter):
    """PyTorch's writer of safetensors files, but each tensor is written from its own memory.

    PyTorch's makes every file in memory first, and holds Python's lock (GIL) meanwhile: all other threads stand still.
    It also waits for the work of a GPU.

    Args:
        folder: Of the files.
        file_numbers: The number of each tensor's file, from 1.
        rank: This process among those that write.
    """

    def __init__(self, folder: Path, file_numbers: dict[str, int], rank: int) -> None:
        super().__init__(str(folder), file_numbers, save_distributed=True)
        self._folder, self._file_numbers, self._shard = folder, file_numbers, rank + 1

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's part, and flush it to the disk."""
        tensors: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        offsets: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        for item in plan.items:
            name = item.index.fqn
            number = self._file_numbers[name]
            tensors[number][name] = cast(Tensor, planner.resolve_data(item)).detach()
            offsets[number][name] = {"saved_offsets": cast(TensorWriteData, item.tensor_data).chunk.offsets}
        last = max(self._file_numbers.values())
        for number in tensors:
            file = self._folder / f"shard-{self._shard:05}-model-{number:05}-of-{last:05}.safetensors"
            # As PyTorch's reader expects them.
            metadata = {"DCP_SHARDING_INFO": json.dumps(offsets[number]), "DCP_VERSION": "1.0", "format": "pt"}
            write_tensors(file, tensors[number], metadata)
        # They would tell where each tensor lies, for an index that shards do not have.
        results: Future[list[WriteResult]] = Future()
        results.set_result([])
        return results


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, and flush it to the disk; the library's `save_file` holds Python's lock before 0.8.

    Args:
        path: The file.
        tensors: By name; on any device.
        metadata: Further texts.

    Raises:
        OSError: If the disk does not take it.
    """
    # The widest types first, so that each number lies at a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda named: (-named[1].itemsize, named[0]))
    places = itertools.pairwise(itertools.accumulate((tensor.nbytes for _, tensor in ordered), initial=0))
    header: dict[str, Any] = {"__metadata__": metadata}
    for (name, tensor), place in zip(ordered, places, strict=True):
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
