"""Where the keys lie that a boolean mask's one row shows: padding, which no graph can prove to be one block.

A row for all heads and queries of a sequence hides whole tiles of keys, and, where what it shows is one block, nothing
within it. So the kernels of attention go through [first, end) alone, and the forward reads the row only in the tiles
of the block's borders; in all of them where the row has holes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.launch import broadcast_mask
from torch_fdattn.ops.scores import Scores

_BLOCK = 1024


@triton.jit(do_not_specialize=["of_batch", "of_keys", "keys"])
def _row_ranges_kernel(ranges_ptr, mask_ptr, of_batch, of_keys, keys, BLOCK: tl.constexpr):
    """ranges (B, 3): first, end, and 1 where all between is shown, of mask (B, keys)."""
    batch = tl.program_id(0)
    mask_ptr += batch.to(tl.int64) * of_batch
    first = tl.full([BLOCK], 2**31 - 1, tl.int32)
    end = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, keys, BLOCK):
        index = start + tl.arange(0, BLOCK)
        seen = tl.load(mask_ptr + index.to(tl.int64) * of_keys, mask=index < keys, other=0) != 0
        first = tl.minimum(first, tl.where(seen, index, 2**31 - 1))
        end = tl.maximum(end, tl.where(seen, index + 1, 0))
        count += seen.to(tl.int32)
    last = tl.max(end, 0)
    begin = tl.minimum(tl.min(first, 0), last)
    ranges_ptr += batch * 3
    tl.store(ranges_ptr, begin)
    tl.store(ranges_ptr + 1, last)
    tl.store(ranges_ptr + 2, (last - begin == tl.sum(count, 0)).to(tl.int32))


def ranges_launch(ranges: Tensor, scores: Scores, q: Tensor, k: Tensor) -> Launch:
    """What writes `empty_ranges`."""
    (whole,) = broadcast_mask(scores, q, k)
    return Launch(
        _row_ranges_kernel, q.shape[0],
        ranges, scores.attn_mask, whole.stride(0), whole.stride(3), k.shape[2], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
