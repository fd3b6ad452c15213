"""Softmax over long rows by blocks: of each block its largest entry, where that stands, and the sum of what is relative to it.

What a draw from the softmax needs of a row of a vocabulary, in one pass over the logits as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.ops.library import INTERPRET, can_call_kernel

#: Entries of a block.
BLOCK = 2048
_DTYPES = (torch.float16, torch.float32) if INTERPRET else (torch.bfloat16, torch.float16, torch.float32)  # fmt: skip


class BlockSums(NamedTuple):
    """Of each row's blocks, (n, blocks). A block that holds NaN or inf has a sum of NaN, one of -inf alone a sum of 0."""

    largest: Tensor  # fp32; where the block holds NaN: NaN, or the largest of the others
    columns: Tensor  # int64, where the first of the largest stands in the row
    sums: Tensor  # fp32, of exp((x - largest) / temperature)


def block_sums(x: Tensor, temperature: Tensor) -> BlockSums:
    """Of rows x (n, m) with fp32 temperatures (n,), each above 0 and finite."""
    on_kernel = (x.is_cuda or INTERPRET) and x.dtype in _DTYPES and x.stride(-1) == 1 and x.numel()
    if on_kernel and can_call_kernel(x, temperature):
        from torch_fdattn.ops.block_sums_kernel import launch_block_sums  # imports triton

        shape = x.shape[0], -(-x.shape[1] // BLOCK)
        largest, sums = x.new_empty(2, *shape, dtype=torch.float32)
        found = BlockSums(largest, x.new_empty(shape, dtype=torch.int64), sums)
        launch_block_sums(x, temperature.contiguous(), *found)
        return found
    missing = -x.shape[1] % BLOCK
    padded = F.pad(x.float(), (0, missing), value=float("-inf")) if missing else x.float()
    blocks = padded.unflatten(1, (-1, BLOCK))
    largest, at = blocks.max(-1)
    # Finite, so that a block of -inf alone has no NaN: -inf - -inf. In place: less memory to pass over.
    weights = blocks - largest.clamp(min=torch.finfo(torch.float32).min)[..., None]
    sums = weights.div_(temperature[:, None, None]).exp_().sum(-1)
    begins = torch.arange(0, padded.shape[1], BLOCK, device=x.device)
    return BlockSums(largest, begins + at, sums)
