"""The `.metadata` of a checkpoint: which tensors it has, and where they lie.

PyTorch writes it with pickle, which may call any function when it is read. The unpicklers here build plain data alone,
so that a downloaded checkpoint cannot run code.
"""

import pickle
from pathlib import Path, PurePath
from typing import Any

import torch

from trifocal.errors import UserError

CHECKPOINT_PACKAGE = "torch.distributed.checkpoint."
# The classes in `.metadata`, besides numbers, text, lists and dictionaries. Calling them only stores the arguments.
_CLASSES = {
    *(
        (f"{CHECKPOINT_PACKAGE}metadata", name)
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
    (f"{CHECKPOINT_PACKAGE}filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    # The path of the writer; in another module from Python 3.13 on.
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}


class MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of `.metadata`, and refuses all others."""

    metadata_class: type[Any]
    """Of the whole."""

    def check_class(self, module: str, name: str) -> None:
        """Refuse a class that no checkpoint needs."""
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _CLASSES and not is_type:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")

    def find_class(self, module: str, name: str) -> Any:
        """The class of this name."""
        self.check_class(module, name)
        return super().find_class(module, name)


def read_metadata(path: Path, unpickler: type[MetadataUnpickler]) -> Any:
    """The metadata in a file, which name files of the same folder alone.

    Raises:
        UserError: If it holds anything but the metadata of a checkpoint; names the file.
    """
    try:
        with path.open("rb") as file:
            metadata: Any = unpickler(file).load()
        if not isinstance(metadata, unpickler.metadata_class):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        for info in metadata.storage_data.values():
            if PurePath(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"it names a file elsewhere, {info.relative_path!r}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:
        # A broken pickle can raise any exception.
        raise UserError(f"{path} is not the metadata of a checkpoint: {error}") from error
    return metadata
