"""Who reads what: the work of a decode launch, shared out on the device from the lengths.

An item is one sequence's one KV head (and one block of its packed query rows, where there are more than
one); its keys are counted in units of UNIT keys. Each item is cut into pieces, one program a piece:

    balanced    pieces of about one size, `share`: what all units amount to a program, or a third of it where
                some sequences are longer than others, so that early programs' processors take what is left.
    invariant   pieces of CHUNK units: a sequence's bits then depend on nothing but its own length.

Pieces lie in the order of their items; a piece's place in it is its program, and the slot of its partial
result. The grid follows from shapes alone, so that a CUDA graph stays right for any lengths; programs
beyond the last piece end at once. (A line of equal shares that run across items, Stream-K's idea, and a
counter at which the last program merges were tried before: README.md.)
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from torch_fdattn.ops.tiles import key_range, sequence_bounds

#: Keys a unit: the grain of the balance, and the alignment of a piece's first key.
UNIT = tl.constexpr(16)
#: Units a piece at least: less is not worth its part of the merge.
MIN_SHARE = tl.constexpr(4)
#: Units a piece in the batch-invariant mode: 1024 keys.
CHUNK = tl.constexpr(64)
#: Pieces a ragged batch is cut into, in multiples of an even one's.
FINER = 3
#: More sequences than this are several launches, because each program scans all lengths.
MAX_BATCH = 4096


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; few for the interpreter, an H100's for meta tensors."""
    if device.type != "cuda":
        return 132 if device.type == "meta" else 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def wanted_pieces(items: int, processors: int) -> int:
    """How many pieces an even batch is cut into: a whole number a processor, one if items are few."""
    return processors * max(1, round(items / processors))


def most_pieces(
    batch: int, items: int, kv_capacity: int, wanted: int, even: bool, batch_invariant: bool
) -> tuple[int, int]:
    """(the programs of a launch, the most pieces of an item), items a sequence; even: equal lengths."""
    units = max(1, triton.cdiv(kv_capacity, UNIT.value))
    longest = triton.cdiv(units, MIN_SHARE.value)
    if batch_invariant:
        pieces = triton.cdiv(units, CHUNK.value)
    elif even:
        pieces = min(longest, max(1, int(wanted / (batch * items) + 0.4)))
    else:
        # An item has at most one piece more than whole shares.
        pieces = min(longest, wanted * FINER // items + 1)
        return min(batch * items * pieces, wanted * FINER + batch * items), pieces
    return batch * items * pieces, pieces


@triton.jit
def key_bounds(
    sequence, bounds_of, window,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr,
):  # fmt: skip
    """(kv_len, q_start, kv_start, keys, begin, end) of one sequence, or of many at once."""
    q_len = bounds_of[3]
    kv_len, q_start, kv_start = sequence_bounds(
        sequence, bounds_of[0], bounds_of[1], bounds_of[2], q_len, bounds_of[4]
    )
    keys = (kv_len, kv_start, window[0], window[1], window[2], window[3])
    begin, _, _, end = key_range(
        q_start, q_start + q_len - 1, keys, HAS_LEFT, HAS_RIGHT, STRIPED, UNIT
    )
    return kv_len, q_start, kv_start, keys, begin, end


@triton.jit
def units_of(
    sequence, bounds_of, window,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr,
):  # fmt: skip
    """Units of a sequence's visible keys; one at least, so that every sequence's output is written."""
    _, _, _, _, begin, end = key_bounds(sequence, bounds_of, window, HAS_LEFT, HAS_RIGHT, STRIPED)
    return tl.maximum(tl.cdiv(end - begin, UNIT), 1)


@triton.jit
def cut(units, items, wanted, wanted_ragged, INVARIANT: tl.constexpr):
    """Pieces of an item of each sequence (BLOCK_B,), from its units, which are 0 beyond the batch."""
    if INVARIANT:
        return tl.cdiv(units, CHUNK)
    else:
        total = tl.sum(units, 0) * items
        mean = total.to(tl.float32) / tl.sum((units > 0).to(tl.int32), 0)
        ragged = (tl.max(units, 0) * items).to(tl.float32) > 1.25 * mean
        share = tl.maximum(tl.cdiv(total, tl.where(ragged, wanted_ragged, wanted)), MIN_SHARE)
        # To the nearest, a little downwards: rather longer pieces than a second wave of them.
        pieces = tl.maximum((units + share * 2 // 5) // share, 1)
        return tl.where(units > 0, pieces, 0)


@triton.jit
def cut_evenly(units, most, INVARIANT: tl.constexpr):
    """Pieces of each item where all of them have as many units; `most` are the host's."""
    if INVARIANT:
        return tl.cdiv(units, CHUNK)
    else:
        return tl.minimum(tl.cdiv(units, MIN_SHARE), most)


@triton.jit
def piece_ends(pieces, items):
    """Where each sequence's pieces end in the order of all, from its pieces an item (BLOCK_B,)."""
    return tl.cumsum(pieces, 0) * items


@triton.jit
def sequence_at(program, ends):
    """(the sequence to which a program's piece belongs, the first piece of that sequence)."""
    before = ends <= program
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def at(values, index):
    """values[index] of a small tensor (BLOCK_B,)."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)
