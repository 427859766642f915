"""Which tiles of the scores each rank computes.

The scores of a rank's queries and one shard of keys are cut into tiles. A tile in which no query
sees a key is left out. A tile in which every query sees every key needs no mask. All this is known
before anything runs: there is a table for each shard that arrives.
"""

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ringcoll.layers.context_parallel.layouts import PARTS, positions

#: The position of the padding of the last tile. No query sees it, and it sees no key.
NOWHERE = np.int32(2**30)
#: The most bytes of a tile of scores. Small tiles stay in the fast memory of a TPU.
TILE_BYTES = 8 << 20
#: The least and the greatest number of positions on a side of a tile.
LEAST, MOST = 128, 1024


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: those that are not after it, those in its window, or both."""

    causal: bool
    window: int | None = None

    def visible(self, query: Any, key: Any) -> Any:
        """Whether queries at these positions see keys at those."""
        seen = key < NOWHERE
        if self.causal:
            seen = seen & (key <= query)
        if self.window is not None:
            seen = seen & (query - key < self.window) & (key - query < self.window)
        return seen


class Tiles(NamedTuple):
    """The tiles of one shard of keys: (query tile, key tile) for each rank.

    Attributes:
        lists: `[lists, tiles, 2]`, each filled up to the longest one.
        counts: the number of tiles of each list.
        which: `[ranks, origins]`, the list that a rank uses for the shard of each origin.
    """

    lists: np.ndarray
    counts: np.ndarray
    which: np.ndarray


def side(length: int, heads: int) -> int:
    """How many positions a side of a tile has, if the tile has `heads` heads."""
    most = max(int((TILE_BYTES / (4 * heads)) ** 0.5), LEAST)
    most = min(2 ** (most.bit_length() - 1), MOST)
    if length <= most:
        return max(length, 1)
    divisor = next(size for size in range(most, 0, -1) if length % size == 0)
    return divisor if divisor >= most // 4 else most


def rows_together(rows: int, heads: int, tile: int) -> int:
    """How many rows, of `heads` heads each, share one tile; it divides `rows`."""
    most = max(TILE_BYTES // (4 * max(heads, 1) * tile**2), 1)
    return next(size for size in range(min(rows, most), 0, -1) if rows % size == 0)


class TilePlan:
    """The tiles of every rank and shard.

    Args:
        mask: which keys a query sees.
        positions: `[ranks, length]`, the positions of queries and keys; padding has `NOWHERE`.
        tile: the side of a tile, which divides the length.
        shape: the ranks as the digits of a schedule.
    """

    def __init__(self, mask: Mask, positions: np.ndarray, tile: int, shape: tuple[int, ...]):
        self.mask, self.positions, self.tile, self.shape = mask, positions, tile, shape
        n, length = positions.shape
        tiles = positions.reshape(n, length // tile, tile)
        real = np.where(tiles == NOWHERE, -1, tiles)
        self.first, self.last = tiles.min(-1), real.max(-1)
        self.is_filled_up = (tiles == NOWHERE).any(-1)
        self.tiles = cache(self._tiles)  # every lane, pass and layer needs the same tiles

    def kinds(self, rank: int, origin: int) -> np.ndarray:
        """`[query tiles, key tiles]`: 0 if nothing is visible, 2 if everything is, otherwise 1.

        It looks only at the first and the last position of a tile. If these do not decide, it is 1.
        """
        q_first, q_last = self.first[rank][:, None], self.last[rank][:, None]
        k_first, k_last = self.first[origin], self.last[origin]
        seen = (q_last >= 0) & (k_last >= 0)
        all_seen = ~self.is_filled_up[rank][:, None] & ~self.is_filled_up[origin]
        if self.mask.causal:
            seen &= k_first <= q_last
            all_seen &= k_last <= q_first
        if self.mask.window is not None:
            window = self.mask.window
            seen &= (q_first - k_last < window) & (k_first - q_last < window)
            all_seen &= (q_last - k_first < window) & (k_last - q_first < window)
        return np.where(seen, 1 + all_seen, 0)

    def origins(self, offset: int) -> np.ndarray:
        """For every rank, the rank whose shard has this offset."""
        ranks = np.arange(len(self.positions)).reshape(self.shape)
        digits = np.unravel_index(offset, self.shape)
        return np.roll(ranks, digits, range(len(self.shape))).reshape(-1)

    @cached_property
    def needed(self) -> frozenset[int]:
        """The offsets, except 0, of the shards that at least one rank needs."""
        others = range(1, len(self.positions))
        return frozenset(offset for offset in others if self.counted(offset).any())

    def _tiles(self, offsets: tuple[int, ...]) -> dict[bool, Tiles]:
        """The tiles of shards with these offsets: those that need a mask, and those that do not."""
        n = len(self.positions)
        lists: dict[bool, dict[bytes, int]] = {False: {}, True: {}}
        which = {masked: np.zeros((n, n), np.int32) for masked in lists}
        for offset in offsets:
            for rank, origin in enumerate(self.origins(offset)):
                kinds = self.kinds(rank, origin)
                for masked, known in lists.items():
                    pairs = np.argwhere(kinds == (1 if masked else 2)).astype(np.int32)
                    which[masked][rank, origin] = known.setdefault(pairs.tobytes(), len(known))
        listed = {}
        for masked, known in lists.items():
            lists_of_pairs = [np.frombuffer(key, np.int32).reshape(-1, 2) for key in known]
            counts = np.array([len(pairs) for pairs in lists_of_pairs], np.int32)
            table = np.zeros((len(lists_of_pairs), counts.max(), 2), np.int32)
            for number, pairs in enumerate(lists_of_pairs):
                table[number, : len(pairs)] = pairs
            if counts.max():
                listed[masked] = Tiles(table, counts, which[masked])
        return listed

    def counted(self, offset: int) -> np.ndarray:
        """How many tiles each rank computes of the shard of this offset: `[ranks]`."""
        origins = enumerate(self.origins(offset))
        return np.array([(self.kinds(rank, origin) > 0).sum() for rank, origin in origins])


@lru_cache(maxsize=64)
def plan(
    mask: Mask,
    layout: str,
    length: int,
    sizes: tuple[int, ...],
    exchanged: tuple[int, ...],
    heads: int,
    shape: tuple[int, ...],
) -> TilePlan:
    """The plan for a layout.

    Args:
        mask: which keys a query sees.
        layout: see `LAYOUTS`.
        length: the number of positions of each rank.
        sizes: the sizes of the axes over which the sequence is sharded.
        exchanged: the indices of the axes over which ranks have exchanged positions for heads.
        heads: how many heads share a head of keys; 0: each part of a layout is one tile.
        shape: the ranks over the other axes, as the digits of a schedule.
    """
    part = length // PARTS[layout]
    tile = side(part, heads) if heads else part
    held = positions(layout, prod(sizes), length).reshape(*sizes, length)
    others = [axis for axis in range(len(sizes)) if axis not in exchanged]
    held = held.transpose(*others, *exchanged, len(sizes)).reshape(prod(shape), -1)
    fill = -held.shape[1] % tile
    return TilePlan(mask, np.pad(held, ((0, 0), (0, fill)), constant_values=NOWHERE), tile, shape)
