"""Work by formula: floating-point operations of each row, and the fewest bytes that it must move.

Counted are the multiplications and additions of the matrix products over the keys that each query sees, exactly;
scores that a kernel computes and masks are not. Backward makes the scores once more and has four more products: of
the gradients of q, k and v, and of the probabilities. Every input is read once and every result written once.
"""

from typing import NamedTuple

from lib.shapes import AttentionShape
from trifocal.models.counts import compressed_keys, dense_keys, selected_keys, window_keys
from trifocal.nn.attention_base import INDEX_DIM
from trifocal.ops import Geometry


class Work(NamedTuple):
    """Operations and bytes; zero for a backward pass that does not exist."""

    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float


def attention_work(shape: AttentionShape, keys: int, key_slots: int, element_bytes: int) -> Work:
    """One attention: q with `keys` keys summed over positions, out of `key_slots` stored ones."""
    pairs = 2.0 * shape.batch * shape.heads * keys
    rows = shape.batch * shape.tokens * shape.heads
    stored = shape.batch * key_slots * shape.groups * (shape.head_dim + shape.value_dim)
    inputs, results = rows * shape.head_dim + stored, rows * shape.value_dim
    return Work(
        forward_flops=pairs * (shape.head_dim + shape.value_dim),
        backward_flops=pairs * (3 * shape.head_dim + 2 * shape.value_dim),
        forward_bytes=float(element_bytes * (inputs + results)),
        # q, k, v, o and the gradient of o are read, three gradients are written.
        backward_bytes=float(element_bytes * (2 * inputs + 2 * results)),
    )


def scoring_work(shape: AttentionShape, geometry: Geometry, element_bytes: int) -> Work:
    """The scores again, from q, the compressed keys and the log-sum-exp (fp32), to indices (int32)."""
    keys = compressed_keys(geometry, shape.tokens)
    rows = shape.batch * shape.tokens * shape.heads
    slots = shape.batch * geometry.num_compressed_blocks(shape.tokens) * shape.groups
    chosen = shape.batch * shape.tokens * shape.groups * geometry.num_selected_blocks
    moved = element_bytes * shape.head_dim * (rows + slots) + 4 * (rows + chosen)
    return Work(2.0 * shape.batch * shape.heads * shape.head_dim * keys, 0.0, float(moved), 0.0)


def index_work(shape: AttentionShape, geometry: Geometry, element_bytes: int) -> Work:
    """Products of one index query a group with the index keys of its past, to indices (int32)."""
    pairs = 2.0 * shape.batch * shape.groups * INDEX_DIM * dense_keys(shape.tokens)
    moved = element_bytes * INDEX_DIM * (shape.groups + 1) + 4 * shape.groups * geometry.num_selected_blocks
    return Work(pairs, 0.0, float(shape.batch * shape.tokens * moved), 0.0)


def compression_work(shape: AttentionShape, geometry: Geometry, element_bytes: int) -> Work:
    """Means of keys and values: additions, the tokens once and the blocks once."""
    numbers = shape.batch * shape.groups * (shape.head_dim + shape.value_dim)
    blocks = geometry.num_compressed_blocks(shape.tokens)
    additions = float(numbers * blocks * geometry.compression_block_size)
    moved = float(element_bytes * numbers * (shape.tokens + blocks))
    return Work(additions, additions, moved, moved)


def branch_work(shape: AttentionShape, geometry: Geometry, element_bytes: int) -> dict[str, Work]:
    """The four parts; "whole": their operations together, with q and o moved once; and the rows of other names."""
    tokens = shape.tokens
    parts = {
        "compressed": attention_work(
            shape, compressed_keys(geometry, tokens), geometry.num_compressed_blocks(tokens), element_bytes
        ),
        "scoring": scoring_work(shape, geometry, element_bytes),
        "selected": attention_work(shape, selected_keys(geometry, tokens), tokens, element_bytes),
        "window": attention_work(shape, window_keys(geometry.window_size, tokens), tokens, element_bytes),
    }
    # All keys and values, q and o once; the gates are read and their gradients written.
    slots = 2 * tokens + geometry.num_compressed_blocks(tokens)
    moved = attention_work(shape, 0, slots, element_bytes)
    gates = 3.0 * element_bytes * shape.batch * tokens * shape.heads
    parts["whole"] = Work(
        sum(part.forward_flops for part in parts.values()),
        sum(part.backward_flops for part in parts.values()),
        moved.forward_bytes + gates,
        moved.backward_bytes + 2 * gates,
    )
    sums = {
        "end to end": (parts["whole"], compression_work(shape, geometry, element_bytes)),
        "one branch": (parts["selected"], index_work(shape, geometry, element_bytes)),
    }
    return parts | {name: Work(*map(sum, zip(*terms, strict=True))) for name, terms in sums.items()}
