"""Forcing a kernel or a configuration: stand-ins for one rule of `dispatch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trifocal.ops.tiles import SelectedTile, Tile

# Small tiles make several of them out of short sequences; the d_k, d_v tile has other proportions on purpose.
TILE = Tile(32, 16, 4, 1)
OTHER_TILE = Tile(16, 32, 4, 1)


def order_rule(forward: str, backward: str | None = None) -> Callable[..., str]:
    """`dispatch.selected_order` that always takes one loop order; backward the same unless given."""

    def rule(*sizes: int, backward: bool = False, packed: bool = False) -> str:
        return wanted[backward]

    wanted = {False: forward, True: backward or forward}
    return rule


def interval_tile_rule(kernel: str, *tensors: Any, window: bool) -> Tile:
    """`dispatch.interval_tile` that takes small tiles."""
    return OTHER_TILE if kernel == "dkdv" else TILE


def selected_tile_rule(tile: SelectedTile) -> Callable[..., SelectedTile]:
    """`dispatch.selected_tile` that always takes one tile."""
    return lambda kernel, q, v, q_per_kv, *, on_hopper: tile
