"""Forcing a kernel or a configuration: stand-ins for one rule of `dispatch` or `tiles`."""

from trifocal.ops.tiles import Tile

# Small tiles make several of them out of short sequences; the d_k, d_v tile has other proportions on purpose.
TILE = Tile(32, 16, 4, 1)
OTHER_TILE = Tile(16, 32, 4, 1)


def order_rule(order):
    """`dispatch.selected_order` that always takes one loop order."""
    return lambda *sizes, backward=False, packed=False: order


def interval_tile_rule(kernel, *tensors, window):
    """`tiles.interval_tile` that takes small tiles."""
    return OTHER_TILE if kernel == "dkdv" else TILE


def selected_tile_rule(tile):
    """`tiles.selected_tile` that always takes one tile."""
    return lambda kernel, q, v, q_per_kv, *, on_hopper: tile
