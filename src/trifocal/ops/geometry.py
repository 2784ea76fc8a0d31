"""The block sizes of Native Sparse Attention, and the counts that follow from them."""

from dataclasses import dataclass, fields

LARGEST_SIZE = 2**31 - 1
"""Positions are numbers of 32 bits."""


@dataclass(frozen=True)
class Geometry:
    """Block sizes of the three branches, in tokens. The defaults are the paper's.

    Args:
        compression_block_size: Tokens in a compressed block; `l` in the paper.
        compression_stride: Tokens between the starts of compressed blocks; `d`. Divides the two block sizes.
        selection_block_size: Tokens in a selection block; `l'`. At least `l`.
        num_selected_blocks: Blocks that a query attends to in full, the forced ones included; `n`.
        num_initial_blocks: First blocks of the sequence that are always selected.
        num_local_blocks: Last blocks, the query's own included, that are always selected.
        window_size: Keys in the sliding window, the query's own included; `w`.

    Raises:
        ValueError: If the sizes do not fit one another; the message names them.

    Source: arXiv:2502.11089, Sections 3.3 and 4.1.
    """

    compression_block_size: int = 32
    compression_stride: int = 16
    selection_block_size: int = 64
    num_selected_blocks: int = 16
    num_initial_blocks: int = 1
    num_local_blocks: int = 2
    window_size: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            lowest = 0 if field.name in ("num_initial_blocks", "num_local_blocks") else 1
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"Geometry.{field.name} must be an integer, got {value!r}")
            if value < lowest:
                raise ValueError(f"Geometry.{field.name} must be at least {lowest}, got {value}")
            if value > LARGEST_SIZE:
                raise ValueError(f"Geometry.{field.name} may be at most {LARGEST_SIZE}, got {value}")
        block, stride, selection = self.compression_block_size, self.compression_stride, self.selection_block_size
        for name, size in (("compression_block_size", block), ("selection_block_size", selection)):
            if size % stride:
                raise ValueError(f"{name} must be a multiple of compression_stride, got {size} and {stride}")
        if block > selection:
            raise ValueError(f"compression_block_size may not exceed selection_block_size, got {block} and {selection}")
        forced = self.num_initial_blocks + self.num_local_blocks
        if not 1 <= forced <= self.num_selected_blocks:
            raise ValueError(
                "num_initial_blocks + num_local_blocks must lie between 1 and num_selected_blocks, "
                f"got {self.num_initial_blocks} + {self.num_local_blocks} of {self.num_selected_blocks}"
            )

    @property
    def selected_tokens(self) -> int:
        """Tokens of a query's chosen blocks: a sequence no longer than this leaves no choice."""
        return self.num_selected_blocks * self.selection_block_size

    def num_compressed_blocks(self, num_keys: int) -> int:
        """Compressed blocks that fit whole into `num_keys` tokens; 0 when there are fewer than one block's."""
        return max(0, (num_keys - self.compression_block_size) // self.compression_stride + 1)

    def num_selection_blocks(self, num_keys: int) -> int:
        """Selection blocks that `num_keys` tokens touch, the last one possibly in part."""
        return -(-num_keys // self.selection_block_size)

    def overlap_tokens(self, compressed_block: int, selection_block: int) -> int:
        """Tokens that a compressed block and a selection block share."""
        compressed_start = compressed_block * self.compression_stride
        selection_start = selection_block * self.selection_block_size
        end = min(compressed_start + self.compression_block_size, selection_start + self.selection_block_size)
        return max(0, end - max(compressed_start, selection_start))

    def overlap_stencil(self) -> tuple[float, ...]:
        """Weights of the compressed blocks that a selection block overlaps, in units of the stride.

        Selection block `j` takes compressed blocks `j*l'/d - (l/d - 1)` to `(j+1)*l'/d - 1` with these weights,
        in this order: `1 2 2 2 1` for 32/16/64. Source: arXiv:2502.11089, Eq. 9.
        """
        before = self.compression_block_size // self.compression_stride - 1
        # Counted at a selection block far enough from the start that none of its compressed blocks is missing.
        far = self.compression_block_size
        first = far * self.selection_block_size // self.compression_stride - before
        taps = before + self.selection_block_size // self.compression_stride
        return tuple(self.overlap_tokens(first + tap, far) / self.compression_stride for tap in range(taps))

    def keys_read_per_step(self, position: int) -> int:
        """Keys that one query at `position` (0-based) reads: compressed, selected and window together.

        Far from the start this is `C + n*l' + w` less the part of the query's own block that lies ahead. Exact
        when at least one local block is forced; without one, the query's own block counts as not chosen.
        """
        num_keys = position + 1
        candidates = self.num_selection_blocks(num_keys)
        if candidates <= self.num_selected_blocks:
            selected = num_keys
        else:
            selected = self.selected_tokens
            if self.num_local_blocks:
                selected -= -num_keys % self.selection_block_size
        return self.num_compressed_blocks(num_keys) + selected + min(self.window_size, num_keys)
