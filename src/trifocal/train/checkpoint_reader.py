"""Reading `torch.distributed.checkpoint` without running code from it.

Its `.metadata` is read as in `checkpoint_metadata`, and values that are no tensors with `weights_only`, as PyTorch
itself reads tensors.
"""

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from trifocal.train.checkpoint_metadata import MetadataUnpickler, read_metadata


class _Unpickler(MetadataUnpickler):
    metadata_class = Metadata


class SafeReader(dcp.FileSystemReader):
    """A `FileSystemReader` whose metadata cannot run code, and that reads files of its own folder alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata.

        Raises:
            UserError: If it holds anything but the metadata of a checkpoint; names the file.
        """
        # PyTorch asks for the metadata of one rank if there is no common one.
        rank = kwargs.get("rank")
        path = Path(self.path) / (".metadata" if rank is None else f"__{rank}.metadata")
        metadata: Metadata = read_metadata(path, _Unpickler)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """A `DefaultLoadPlanner` whose non-tensor values cannot run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor, with `weights_only`."""
        # PyTorch reads it again without `weights_only`, so it gets a copy that was written here.
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
