"""Who reads what: the work of a decode launch, shared out on the device from the lengths.

An item is one sequence's one KV head (and one block of its packed query rows, where there are more than
one); its keys are counted in units of UNIT keys. Items in order are one long line of units.

    balanced    program p takes units p·share … (p + 1)·share of the line, whatever items they belong to:
                every program reads the same bytes, ragged batches included.
    invariant   each item is cut every CHUNK units, one program a piece: a sequence's bits then depend on
                nothing but its own length.

The grid follows from shapes alone, so that a CUDA graph stays right for any lengths. Stream-K
(arXiv:2301.03598) is the same idea for matrix products.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

#: Keys a unit: the grain of the balance, and the alignment of a share's first key.
UNIT = tl.constexpr(16)
#: Units a program takes at least: less is not worth its part of the merge.
MIN_SHARE = 4
#: Units a piece in the batch-invariant mode: 1024 keys.
CHUNK = tl.constexpr(64)
#: Programs a streaming multiprocessor: while one merges or starts, the other keeps requests in flight.
PROGRAMS_PER_PROCESSOR = 2
#: More sequences than this are several launches, because each program scans all lengths.
MAX_BATCH = 4096


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small number for the interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def balanced_programs(items: int, kv_capacity: int, device: torch.device) -> int:
    """The grid of the balanced schedule."""
    most = items * triton.cdiv(max(kv_capacity, 1), UNIT.value * MIN_SHARE)
    return min(PROGRAMS_PER_PROCESSOR * processors(device), most)


def invariant_pieces(kv_capacity: int) -> int:
    """Programs an item in the batch-invariant mode."""
    return triton.cdiv(max(kv_capacity, 1), UNIT.value * CHUNK.value)


@triton.jit
def line_ends(units, items):
    """Where each sequence's part of the line ends, from its units an item (BLOCK_B,)."""
    return tl.cumsum(units, 0) * items


@triton.jit
def sequence_at(unit, ends, units):
    """(sequence, where its part of the line begins, its units an item) at one unit of the line."""
    before = ends <= unit
    sequence = tl.sum(before.to(tl.int32), 0)
    begin = tl.max(tl.where(before, ends, 0), 0)
    index = tl.arange(0, ends.shape[0])
    return sequence, begin, tl.sum(tl.where(index == sequence, units, 0), 0)
