"""Move parts of tensors between devices, bit for bit, as transfers say."""

from uneven.reshard.exchange import Exchange
from uneven.reshard.tiles import Tile, Tiles, copy_common, cut, flat_tiles, tiles_of

__all__ = ["Exchange", "Tile", "Tiles", "copy_common", "cut", "flat_tiles", "tiles_of"]
