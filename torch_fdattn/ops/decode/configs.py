"""Tiles of decode's kernels, measured on an H100, those for fast memory and of bytes in pages on an H200
(docs/notes/decode.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.ops.attention.configs import TileConfig
from torch_fdattn.ops.launch import padded, power_of_two
from torch_fdattn.ops.library import INTERPRET

MAX_ROWS = 64
#: Work tiles an SM from which on they fill the device, and from which on they do not fit at once.
MANY, CROWDED = 1.5, 3.0
#: Keys of a sequence from which on fast memory wants wide tiles.
LONG = 65536
#: From here on float8_e4m3fn has conversion instructions; elsewhere the kernel takes its bytes apart.
E4M3_CAPABILITY = (8, 9)
#: Rows from which on four warps multiply together (wgmma).
WARP_GROUP_ROWS = 64
#: fp32 elements of partial results that a program of the merge holds at once, and their share a warp.
MERGE_ELEMENTS, MERGE_ELEMENTS_A_WARP = 4096, 1024
#: How many times the mean of a ragged batch's splits a merge on fast memory takes at once; it comes back for more.
SPARE_PARTS = 2


def decode_config(
    head_dim: int, dtype: torch.dtype, rows: int, paged: bool = False, narrow: bool = False, load: float = 1.0,
    capability: tuple[int, int] = (9, 0), capacity: int = 0, fast_memory: bool = False,
) -> TileConfig:  # fmt: skip
    """Tiles of the kernel, measured on an H100, those for fast memory on an H200 (docs/notes/decode.md).

    rows is the number of packed query rows of one KV head; narrow: the cache has one byte an element; load is
    the number of work tiles an SM; capacity: keys of a sequence.
    """
    block_m = padded(min(rows, MAX_ROWS))
    if INTERPRET:
        return TileConfig(block_m, 16, 1, 1)
    if head_dim > 256:
        return _largest_dims_config(dtype, block_m, narrow, capability)
    if dtype == torch.float32:
        # FMA dots keep whole operand rows in registers: wider tiles spill kilobytes a thread, and where bytes
        # are converted when they are loaded, so do these with a second stage.
        if narrow and head_dim > 64:
            return TileConfig(
                min(block_m, 32), 16, 8, 2 if block_m == 16 and head_dim <= 128 else 1
            )
        if block_m == 16 and head_dim <= 128:
            return TileConfig(16, 32, 8, 2)
        return TileConfig(min(block_m, 32), 16, 4 if block_m == 16 else 8, 2)
    if head_dim > 128:
        return TileConfig(block_m, 32, 4 if block_m <= 32 else 8, 2)
    if block_m == 16 and narrow and load >= MANY:
        if not paged:
            return TileConfig(16, 128, 4, 3)
        if capability >= (8, 0):
            return TileConfig(16, 128, 4, 3 if capability == (9, 0) and head_dim > 64 else 2)
    if block_m == 16 and not narrow and load >= CROWDED:
        if paged and fast_memory and head_dim > 64 and load > 4:  # of which only three fit an SM
            return TileConfig(16, 64, 4, 2)
        if paged:
            return TileConfig(16, 32, 4, 3 if head_dim > 64 else 4)
        return TileConfig(16, 32, 1, 2 if head_dim > 64 else 4)
    if fast_memory and block_m == 16 and head_dim > 64 and not paged and not narrow and load < MANY:
        # More bytes in flight, which cost an H100 1 to 3 %.
        return TileConfig(16, 128, 4, 3) if capacity >= LONG else TileConfig(16, 64, 4, 4)
    # 64 keys of 128 dims are 16 KiB a load: three stages keep enough bytes in flight. With 64 rows they
    # would take 72 KiB of the 64 KiB of shared memory that gfx942 has.
    return TileConfig(block_m, 64, 4, 3 if block_m <= 32 else 2)


def _largest_dims_config(
    dtype: torch.dtype, block_m: int, narrow: bool, capability: tuple[int, int]
) -> TileConfig:
    """Head dims above 256, padded to 512: what fits into registers and, on AMD, 64 KiB. Not measured."""
    if dtype == torch.float32:
        return TileConfig(16, 16, 8, 1)
    return TileConfig(min(block_m, 32), 32 if capability >= (8, 0) else 16, 8, 1)


def loads_keys_first(
    config: TileConfig, head_dim: int, dtype: torch.dtype, load: float, capability
) -> bool:
    """Whether the first keys are loaded before the queries are waited for, which takes registers for them."""
    fits = config.block_m == 16 and head_dim <= 128 and dtype.itemsize == 2
    return fits and config.num_warps > 1 and load < MANY and capability >= (8, 0)


def register_limit(
    config: TileConfig, pairs: bool, paged: bool, capability: tuple[int, int]
) -> dict[str, int]:
    """Triton's option by which three programs fit an SM where two would: a tenth to a sixth of the time on an H200."""
    tiles = TileConfig(16, 128, 4, 2), TileConfig(16, 128, 4, 3)
    limited = pairs and paged and capability >= (8, 0) and config in tiles
    return {"maxnreg": 168} if limited else {}


def come_in_pairs(cache: Tensor) -> bool:
    """Whether the elements of one byte of a cache can be read as pairs, of which a product takes 16 at least."""
    even = all(stride % 2 == 0 for stride in cache.stride()[:3])
    return even and cache.stride(3) == 1 and cache.shape[3] % 2 == 0 and cache.shape[3] > 16


def static_row_stride(cache: Tensor) -> int:
    """The stride of keys where it follows from the shape, for the compiler; 0 where only the launch knows it.

    Other strides, of sequences first or of slices, follow from batches and buffers: a kernel for each is too many.
    """
    heads, dims = cache.shape[1], cache.shape[3]
    return cache.stride(2) if cache.stride(2) in (dims, heads * dims) else 0


class MergeConfig(NamedTuple):
    """What a program of the merge kernel takes at a time."""

    rows: int
    parts: int
    dims: int
    warps: int


#: In the batch-invariant mode, whatever the batch.
INVARIANT_MERGE = MergeConfig(rows=1, parts=32, dims=128, warps=4)


def merge_config(all_rows: int, rows: int, splits: int, block_dv: int, wide: int) -> MergeConfig:
    """all_rows of all work tiles, rows of one; `wide` programs are enough to fill the device."""
    dims = block_dv if all_rows * block_dv >= 32 * wide else min(32, block_dv)
    tile_rows = 1
    while tile_rows < rows and all_rows * block_dv > 16 * wide * tile_rows * dims:
        tile_rows *= 2
    parts = min(power_of_two(splits), max(1, MERGE_ELEMENTS // (tile_rows * dims)))
    warps = min(4, max(1, tile_rows * parts * dims // MERGE_ELEMENTS_A_WARP))
    return MergeConfig(tile_rows, parts, dims, warps)
