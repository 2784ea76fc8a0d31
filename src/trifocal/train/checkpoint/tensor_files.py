"""Writing the tensors of a checkpoint so that training continues meanwhile in another thread."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trifocal.models.io import write_tensors
from trifocal.train.run_folder import flush


class TensorFileWriter(HuggingFaceStorageWriter):
    """PyTorch's writer of safetensors files, but the library writes each tensor from its own memory, without Python's
    lock (GIL), where PyTorch's holds it and waits for a GPU. `file_numbers` are the tensors' files, from 1.
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
            flush(file)
        # They would tell where each tensor lies, for an index that shards do not have.
        results: Future[list[WriteResult]] = Future()
        results.set_result([])
        return results
