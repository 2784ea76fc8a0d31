"""The attention picture: the keys that each branch reads, for one sequence of validation text.

At every evaluation the trainer stores the picture of the same sequence in `attention/step_*.npz` (compressed numpy, no
pickles; well under 1 MB). The window needs no array: a query reads the last `window_size` tokens of its document, its
own included.
"""

import io
import json
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trifocal.errors import UserError, one_line
from trifocal.ops import Geometry
from trifocal.paths import read_file
from trifocal.runlog.whole_files import write_whole
from trifocal.telemetry.maps import LayerAttention, choosing_shares, full_attention_shares

VERSION = 2
_MAX_BYTES = 2**26
"""Bytes of a file, compressed and expanded."""
_PLAIN = ("step", "texts", "layers", "others")
_ARRAYS = ("positions", "documents", "queries", "selected", "importance", "dense", "gates")


@dataclass(frozen=True)
class AttentionPicture:
    """The keys that the branches of every layer read in one sequence.

    T tokens, Q evenly spaced queries (128 at most), L layers that choose blocks, G groups, J selection blocks of the
    longest document, N selected ones. The file has the arrays by these names, and all else as JSON in `header`.

    Attributes:
        texts: Text of each token.
        layers: Numbers of the L layers.
        positions: Position of each token in its document, [T].
        documents: Document of each token, [T].
        queries: Index of each query's token, [Q].
        selected: Selected blocks, ascending, counted from the start of the query's document, [L, Q, G, N]; -1 pads.
        importance: Share of each block in the scores that choose, as round(255 * sqrt(share)), [L, Q, G, J].
        dense: Share of full attention over the selected branch's keys in each block, in the same code, [L, Q, G, J].
        gates: Gates of cmp, slc, win, mean over the group's heads, as round(255 * gate), [L, Q, G, 3]; 0, 1, 0 in a
            layer without gates.
    """

    step: int
    geometry: Geometry
    texts: list[str]
    layers: list[int]
    positions: NDArray[np.int32]
    documents: NDArray[np.int32]
    queries: NDArray[np.int32]
    selected: NDArray[np.int16]
    importance: NDArray[np.uint8]
    dense: NDArray[np.uint8]
    gates: NDArray[np.uint8]
    others: list[list[int]] = field(default_factory=list)
    """Layers without arrays, as they choose no blocks: number and window; 0 where they read everything."""

    def save(self, path: Path) -> None:
        """Write the file; readers never see a partial file. Raises OSError if writing fails."""
        header: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        header |= {"version": VERSION, "geometry": asdict(self.geometry)}
        content = io.BytesIO()
        arrays: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in _ARRAYS}
        arrays["header"] = np.frombuffer(json.dumps(header, ensure_ascii=False).encode(), dtype=np.uint8)
        np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
        path.parent.mkdir(exist_ok=True)
        write_whole(path, content.getvalue())


def read_picture(path: Path) -> AttentionPicture:
    """Read a file of `AttentionPicture.save`; UserError, with its name, if it is damaged or of another version."""
    try:
        content = io.BytesIO(read_file(path, _MAX_BYTES))
        with zipfile.ZipFile(content) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > _MAX_BYTES:
            raise ValueError(f"expected at most {_MAX_BYTES:,} bytes, it expands to {size:,}")
        with np.load(content, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            arrays = {name: file[name] for name in _ARRAYS}
        if header["version"] != VERSION:
            raise ValueError(f"expected version {VERSION}, got {header['version']}")
        geometry = Geometry(**header["geometry"])
        picture = AttentionPicture(geometry=geometry, **{name: header[name] for name in _PLAIN}, **arrays)
    except Exception as error:  # A damaged archive raises many kinds of errors.
        raise UserError(f"cannot read the attention picture {path} ({one_line(error)}); remove it") from error
    return picture


def describe_layer(layer: LayerAttention, queries: Tensor) -> dict[str, Tensor]:
    """The picture's arrays of a layer at the queries with these indices, [Q], encoded as in the file, on the device."""
    gates = layer.gates[:, queries].float().unflatten(-2, (layer.k_slc.shape[-2], -1)).mean(-2)
    only_selected = (torch.arange(3, device=gates.device) == 1).float()
    gates = torch.where(gates.isnan(), only_selected, gates)
    return {
        "selected": layer.selected[:, queries].to(torch.int16),
        "importance": _root_code(choosing_shares(layer, queries)),
        "dense": _root_code(full_attention_shares(layer, queries)),
        "gates": (255 * gates).round().clamp(0, 255).to(torch.uint8),
    }


def _root_code(share: Tensor) -> Tensor:
    """Shares between 0 and 1 as a byte of their square root, which keeps small shares apart."""
    return (255 * share.clamp(0, 1).sqrt()).round().to(torch.uint8)
