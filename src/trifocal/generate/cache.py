"""Preallocated caches for decoding: no tensor is concatenated token by token.

Buffers take batch, type and device from the first tokens. `extend` returns views of the buffers, which are valid until
the next call.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trifocal.models.model_config import ModelConfig
from trifocal.ops import Geometry

KeysValues = tuple[Tensor, Tensor]


class NSACache:
    """The past of one sparse layer.

    It keeps rotated keys and values: of every token for the selected branch, of the last `w - 1` tokens for the window,
    of every compressed block for the compressed branch. For the next block it keeps the unrotated keys and values from
    the block's start: fewer than `l` tokens. A block is compressed every `d` tokens.

    Args:
        geometry: Block sizes, in tokens.
        capacity: Most tokens that it can hold.
    """

    def __init__(self, geometry: Geometry, capacity: int) -> None:
        self.geometry = geometry
        self.capacity = capacity
        self.length = 0
        num_blocks = geometry.num_compressed_blocks(capacity)
        self._k_cmp, self._v_cmp = _Store(num_blocks), _Store(num_blocks)
        self._k_slc, self._v_slc = _Store(capacity), _Store(capacity)
        # A window wider than the capacity never slides.
        window = min(2 * geometry.window_size, capacity)
        self._k_win, self._v_win = _SlidingBuffer(window), _SlidingBuffer(window)
        raw = 2 * geometry.compression_block_size
        self._k_raw, self._v_raw = _SlidingBuffer(raw), _SlidingBuffer(raw)

    def extend(
        self,
        raw: KeysValues,
        selected: KeysValues,
        window: KeysValues | None,
        compress: Callable[[Tensor, Tensor, int], KeysValues],
    ) -> tuple[KeysValues, KeysValues, KeysValues]:
        """Append T tokens and return what their queries see; see `trifocal.nn.attention.NSACache`.

        Raises:
            ValueError: If the tokens do not fit the capacity or the batch, or gradients are on.
        """
        num_new = selected[0].shape[1]
        _check_room(self.length, num_new, self.capacity)
        geometry, total = self.geometry, self.length + num_new
        blocks_before, blocks = geometry.num_compressed_blocks(self.length), geometry.num_compressed_blocks(total)

        pending = total - blocks * geometry.compression_stride
        k_raw, v_raw = self._k_raw.push(raw[0], pending), self._v_raw.push(raw[1], pending)
        if blocks > blocks_before:
            first_position = blocks_before * geometry.compression_stride
            k_new, v_new = compress(k_raw, v_raw, first_position)
        else:
            k_new, v_new = k_raw[:, :0], v_raw[:, :0]
        compressed = self._k_cmp.append(k_new), self._v_cmp.append(v_new)

        k_slc, v_slc = self._k_slc.append(selected[0]), self._v_slc.append(selected[1])
        if window is None:
            first = max(0, total - (num_new + geometry.window_size - 1))
            k_win, v_win = k_slc[:, first:], v_slc[:, first:]
        else:
            kept = min(total, geometry.window_size - 1)
            k_win, v_win = self._k_win.push(window[0], kept), self._v_win.push(window[1], kept)
        self.length = total
        return compressed, (k_slc, v_slc), (k_win, v_win)


class DenseCache:
    """The past of one dense layer: rotated keys and values of every token.

    Args:
        capacity: Most tokens that it can hold.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._k, self._v = _Store(capacity), _Store(capacity)

    def extend(self, k: Tensor, v: Tensor) -> KeysValues:
        """Append T tokens and return all so far: k [B, T, G, D] -> [B, S, G, D], v likewise.

        Raises:
            ValueError: If the tokens do not fit the capacity or the batch, or gradients are on.
        """
        _check_room(self.length, k.shape[1], self.capacity)
        num_new = k.shape[1]
        k, v = self._k.append(k), self._v.append(v)
        # After `append`, which may refuse the tokens.
        self.length += num_new
        return k, v


def make_caches(config: ModelConfig, capacity: int) -> list[NSACache | DenseCache]:
    """One empty cache a layer.

    Args:
        config: The model that will use them.
        capacity: Most tokens that they can hold, prompt included.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 token, got {capacity}")
    return [
        NSACache(config.geometry, capacity) if kind in ("nsa", "selected") else DenseCache(capacity)
        for kind in config.attention_of_layers
    ]


class _Store:
    """Everything so far, in a buffer of fixed capacity: [B, capacity, G, *]."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffer: Tensor | None = None
        self._length = 0

    def append(self, new: Tensor) -> Tensor:
        self._buffer = _buffer_for(new, self._buffer, self._capacity)
        stop = self._length + new.shape[1]
        self._buffer[:, self._length : stop] = new
        self._length = stop
        return self._buffer[:, :stop]


class _SlidingBuffer:
    """The last tokens of a stream, contiguous.

    They move along a buffer of about twice their number and back to its front when they reach its end, so a token
    costs a constant number of copies.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffer: Tensor | None = None
        self._start = self._stop = 0

    def push(self, new: Tensor, keep: int) -> Tensor:
        """Return the kept tokens followed by the new ones; then keep the last `keep` of these."""
        buffer = self._buffer = _buffer_for(new, self._buffer, self._capacity)
        kept, num_new = self._stop - self._start, new.shape[1]
        if kept + num_new > self._capacity:
            # A chunk of a prompt that is longer than the buffer: concatenated once, outside of it.
            joined = torch.cat((buffer[:, self._start : self._stop], new), dim=1)
            buffer[:, :keep] = joined[:, joined.shape[1] - keep :]
            self._start, self._stop = 0, keep
            return joined
        if self._stop + num_new > self._capacity:
            buffer[:, :kept] = buffer[:, self._start : self._stop].clone()
            self._start, self._stop = 0, kept
        buffer[:, self._stop : self._stop + num_new] = new
        joined = buffer[:, self._start : self._stop + num_new]
        self._stop += num_new
        self._start = self._stop - keep
        return joined


def _buffer_for(new: Tensor, buffer: Tensor | None, capacity: int) -> Tensor:
    if buffer is None:
        return new.new_empty(new.shape[0], capacity, *new.shape[2:])
    if buffer.shape[0] != new.shape[0] or buffer.dtype != new.dtype:
        raise ValueError(
            f"the cache holds a batch of {buffer.shape[0]} in {buffer.dtype}, got {new.shape[0]} in {new.dtype}"
        )
    return buffer


def _check_room(length: int, num_new: int, capacity: int) -> None:
    if torch.is_grad_enabled():
        raise ValueError("a cache is for decoding without gradients: use torch.inference_mode()")
    if length + num_new > capacity:
        raise ValueError(f"the cache has room for {capacity} tokens, got {length} and {num_new} more")
