"""Reading `torch.distributed.checkpoint` without running code from it.

PyTorch reads a checkpoint's `.metadata`, and every value that is no tensor, with a pickle that may call any function.
Here both are read by unpicklers that build plain data alone, so that a downloaded checkpoint cannot run code. PyTorch
itself reads tensors with `weights_only`.
"""

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from trifocal.errors import UserError

# The classes in `.metadata`, besides numbers, text, lists and dictionaries. Calling them only stores the arguments.
_METADATA_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    # The path of the writer; in another module from Python 3.13 on.
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}


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
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
            for info in metadata.storage_data.values():
                if PurePath(info.relative_path).name != info.relative_path:
                    raise pickle.UnpicklingError(f"it names a file elsewhere, {info.relative_path!r}")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except Exception as error:
            # A broken pickle can raise any exception.
            raise UserError(f"{path} is not the metadata of a checkpoint: {error}") from error
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


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
