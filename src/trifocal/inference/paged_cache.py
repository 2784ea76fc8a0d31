"""The tensors of a model's caches: pages of keys and values, rings of the last tokens; and what they weigh.

A page number is the same in all layers, so is a row of the rings. Moving a sequence to the host and back, or copying a
page or a row for a fork, copies bytes and computes nothing.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from trifocal.models import parameter_count
from trifocal.models.model_config import Attention, ModelConfig
from trifocal.nn.attention_base import INDEX_DIM
from trifocal.ops import DenseCache, Geometry, SparseCache, WindowCache
from trifocal.ops.decode.caches import MAX_NEW_TOKENS
from trifocal.ops.geometry import LARGEST_SIZE
from trifocal.runlog.environment import host_memory_bytes

PAGE_SIZE = 256
"""Tokens of a page, or the next multiple of the selection block."""

# Share of the free memory to use; the driver and fragmentation, on a CPU all other programs, take the rest.
_USABLE_SHARE = {"cuda": 0.92, "cpu": 0.5}
# What a prompt's chunk and the kernels take beside weights and caches, by measurement on an H200: up to 3 GiB.
_WORKING_BYTES = {"cuda": 3 * 2**30, "cpu": 0}

Shape = tuple[int, int, int]


class LayerShapes(NamedTuple):
    """The tensors of one layer by name: the shapes of a page and of a row of the rings, [G, tokens, width]."""

    pages: dict[str, Shape]
    rings: dict[str, Shape]


class CacheBytes(NamedTuple):
    """Bytes of all layers' caches: of a page of `page_size` tokens, and of a row, which a sequence takes once."""

    page: int
    row: int
    page_size: int

    def of_sequence(self, num_tokens: int) -> int:
        """Bytes of one sequence of `num_tokens`."""
        return -(-num_tokens // self.page_size) * self.page + self.row


def page_size_of(config: ModelConfig, wanted: int) -> int:
    """The smallest page of at least `wanted` tokens that holds whole selection blocks."""
    block = config.geometry.selection_block_size if config.chooses_blocks else 1
    return -(-wanted // block) * block


def decode_geometry(config: ModelConfig, max_length: int) -> Geometry:
    """The model's geometry for sequences up to a length: a window that is wider never slides, so it is cut."""
    return replace(config.geometry, window_size=min(config.geometry.window_size, max_length))


def layer_shapes(
    config: ModelConfig, kind: Attention, page_size: int, max_length: int, spare: int = MAX_NEW_TOKENS
) -> LayerShapes:
    """The tensors of a layer. Rings hold `spare` tokens beyond what is read, so that as many new ones fit."""
    heads, dim, value_dim = config.num_kv_heads, config.head_dim, config.value_dim
    if kind == "dense":
        return LayerShapes({"k": (heads, page_size, dim), "v": (heads, page_size, value_dim)}, {})
    if kind == "window":
        size = min(config.window_of_layers, max_length) - 1 + spare
        return LayerShapes({}, {"k_win": (heads, size, dim), "v_win": (heads, size, value_dim)})
    geometry = decode_geometry(config, max_length)
    slots = page_size // geometry.compression_stride
    window, raw = (reach - 1 + spare for reach in (geometry.window_size, geometry.compression_block_size))
    pages, rings = {}, {}
    if config.has_index:
        pages["k_idx"] = (1, page_size, INDEX_DIM)
    for letter, width in (("k", dim), ("v", value_dim)):
        pages[f"{letter}_slc"] = (heads, page_size, width)
        if kind == "nsa" or (letter == "k" and not config.has_index):
            # The compressed keys of a selected layer only choose.
            pages[f"{letter}_cmp"] = (heads, slots, width)
            rings[f"{letter}_raw"] = (heads, raw, width)
        if kind == "nsa" and not config.shared_kv:
            rings[f"{letter}_win"] = (heads, window, width)
    return LayerShapes(pages, rings)


LayerCache = SparseCache | DenseCache | WindowCache


def layer_cache(tensors: dict[str, Tensor]) -> LayerCache:
    """A layer's caches as `trifocal.ops` takes them, from tensors by the names of `layer_shapes`."""
    if "k" in tensors:
        return DenseCache(**tensors)
    if "k_slc" not in tensors:
        return WindowCache(**tensors)
    return SparseCache(**tensors)


def cache_bytes(config: ModelConfig, dtype: torch.dtype, max_length: int, page_size: int = 0) -> CacheBytes:
    """What a page and a row of `PagedCache` weigh, exactly; a `page_size` of 0 is the usual one."""
    page_size = page_size or page_size_of(config, PAGE_SIZE)
    shapes = [layer_shapes(config, kind, page_size, max_length) for kind in config.attention_of_layers]

    def weigh(tensors: dict[str, Shape]) -> int:
        return dtype.itemsize * sum(heads * tokens * width for heads, tokens, width in tensors.values())

    page, row = sum(weigh(layer.pages) for layer in shapes), sum(weigh(layer.rings) for layer in shapes)
    return CacheBytes(page, row, page_size)


class CachePlan(NamedTuple):
    """Caches that fit: the sequences at a time, and the pages that they share."""

    max_sequences: int
    num_pages: int


def plan_cache(
    config: ModelConfig, dtype: torch.dtype, max_length: int, *, free_bytes: int, sequences: int
) -> CachePlan | None:
    """The caches for as many of `sequences` at a time as get a page each: they share the pages, and the youngest leaves
    when these run out. None if not even one of `max_length` tokens fits.
    """
    weight = cache_bytes(config, dtype, max_length)
    longest = -(-max_length // weight.page_size)
    if longest * weight.page + weight.row > free_bytes:
        return None
    if not weight.page:
        # All layers have a window: pages are numbers, without tensors.
        sequences = max(1, min(sequences, free_bytes // weight.row))
        return CachePlan(sequences, sequences * longest)
    sequences = max(1, min(sequences, free_bytes // (weight.page + weight.row)))
    while sequences > 1 and sequences * weight.row + longest * weight.page > free_bytes:
        sequences -= 1
    return CachePlan(sequences, min(sequences * longest, (free_bytes - sequences * weight.row) // weight.page))


def memory_for_caches(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes for caches on a device beside the weights of a model that is not loaded yet; none may be left."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory_bytes()
    # The weights as they are loaded, and the copy for the products.
    weight_bytes = parameter_count(config) * (4 + dtype.itemsize)
    return int(free_bytes * _USABLE_SHARE[device.type]) - weight_bytes - _WORKING_BYTES[device.type]


def longest_that_fits(config: ModelConfig, dtype: torch.dtype, free_bytes: int) -> int:
    """Tokens of the longest single sequence whose caches take no more than these bytes."""
    # A row grows with the length up to the window, and not beyond.
    weight = cache_bytes(config, dtype, max(config.geometry.window_size, config.window_of_layers))
    if not weight.page:
        return LARGEST_SIZE if weight.row <= free_bytes else 0
    return max(0, (free_bytes - weight.row) // weight.page) * weight.page_size


class PagedCache:
    """The caches of all layers: `layers`, as `trifocal.ops` takes them, and one row of the rings for each sequence."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        num_rows: int,
        page_size: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        kinds = config.attention_of_layers
        shapes = [layer_shapes(config, kind, page_size, max_length) for kind in kinds]
        # All rings of a sequence lie side by side: a chunk of a prompt writes them at once.
        width = sum(math.prod(shape) for layer in shapes for shape in layer.rings.values())
        rings, offset = torch.zeros(num_rows, width, dtype=dtype, device=device), 0
        self._rings = [rings] if width else []
        self._pages: list[Tensor] = []
        self.layers: list[LayerCache] = []
        for layer in shapes:
            tensors = {}
            for name, shape in layer.pages.items():
                tensors[name] = torch.zeros(num_pages, *shape, dtype=dtype, device=device)
            self._pages += tensors.values()
            for name, (heads, tokens, size) in layer.rings.items():
                strides = width, tokens * size, size, 1
                tensors[name] = rings.as_strided((num_rows, heads, tokens, size), strides, offset)
                offset += heads * tokens * size
            self.layers.append(layer_cache(tensors))
        self._device = device

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages, each (from, to)."""
        for source, target in copies:
            _copy_within(self._pages, source, target)

    def copy_row(self, source: int, target: int) -> None:
        """Copy a row of all rings."""
        _copy_within(self._rings, source, target)

    def to_host(self, pages: list[int], row: int) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of a sequence's pages and rings on the host, which may be overwritten here by what is queued later."""
        index = torch.tensor(pages, dtype=torch.int64).to(self._device)
        return [self._send(x.index_select(0, index)) for x in self._pages], [self._send(x[row]) for x in self._rings]

    def from_host(self, copies: tuple[list[Tensor], list[Tensor]], pages: list[int], row: int) -> None:
        """Write a sequence's pages and rings back, to other places or the same."""
        kept_pages, kept_rings = copies
        index = torch.tensor(pages, dtype=torch.int64).to(self._device)
        for x, kept in zip(self._pages, kept_pages, strict=True):
            x.index_copy_(0, index, kept.to(self._device, non_blocking=True))
        for x, kept in zip(self._rings, kept_rings, strict=True):
            x[row].copy_(kept, non_blocking=True)

    def _send(self, x: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return x.clone()
        # Pinned: the copy is queued like a kernel, and so is whatever reads or overwrites either side.
        kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return kept.copy_(x, non_blocking=True)


def _copy_within(tensors: list[Tensor], source: int, target: int) -> None:
    """Copy one place of each tensor to another, on a GPU in few launches."""
    if tensors:
        torch._foreach_copy_([x[target] for x in tensors], [x[source] for x in tensors])
