"""Where the blocks of a rank's shard lie: the op `fdattn::block_bounds`, one launch in place of ten.

block_bounds(kv_lens, q_start, q_len, block, count, each, rank, world_size, length_limit, pages_apart)
    -> (4, B, count) int32

Row 0 says how many keys of each block are filled, row 1 where the queries start, row 2 where the block starts, and
row 3 which page it is where blocks are pages, pages_apart of which lie from one sequence to the next. The sequence's blocks are
dealt out `each` in turn to the ranks, of which `rank` has `count`; kv_lens (B,) int32 or int64 are global, at most
`length_limit` of which count. q_start: None if the last query is the last key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.ops import library
from torch_fdattn.ops.positions import FAR


def _block_bounds(
    kv_lens, q_start, q_len, block, count, each, rank, world_size, length_limit, pages_apart
) -> Tensor:
    bounds = kv_lens.new_empty((4, kv_lens.shape[0], count), dtype=torch.int32)
    if library.use_triton(kv_lens):
        if bounds.numel():
            from torch_fdattn.dist.decode.block_bounds_kernel import launch_bounds

            where = q_len, block, each, rank, world_size, length_limit, pages_apart
            launch_bounds(kv_lens, q_start, bounds, *where)
        return bounds
    lengths = kv_lens.clamp(0, length_limit).int()
    q_start = lengths - q_len if q_start is None else q_start.clamp(-FAR, FAR).int()
    i = torch.arange(count, dtype=torch.int32, device=kv_lens.device)
    start = ((i // each * world_size + rank) * each + i % each) * block
    first = pages_apart * torch.arange(len(lengths), dtype=torch.int32, device=kv_lens.device)
    filled = (lengths[:, None] - start).clamp(0, block)
    for row, x in zip(bounds, (filled, q_start[:, None], start, first[:, None] + i), strict=True):
        row.copy_(x)
    return bounds


def _fake(
    kv_lens, q_start, q_len, block, count, each, rank, world_size, length_limit, pages_apart
) -> Tensor:
    return kv_lens.new_empty((4, kv_lens.shape[0], count), dtype=torch.int32)


library.define_raw(
    "block_bounds(Tensor kv_lens, Tensor? q_start, int q_len, int block, int count, int each, int rank, int world_size, "
    "int length_limit, int pages_apart) -> Tensor",
    _block_bounds,
    _fake,
)
