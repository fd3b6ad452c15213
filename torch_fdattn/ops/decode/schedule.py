"""Who reads what: the work of a decode launch, shared out on the device from the lengths.

A work tile is one sequence's one KV head (and one block of its packed query rows, where there are more than
one); its keys are counted in units of UNIT keys. Each work tile is cut into splits, one program a split:

    balanced    splits of about one size, `share`: what all units amount to a program, or a sixth of it where
                some sequences are longer than others, so that the SMs of early programs take what is left.
    invariant   a split for each CHUNK units: a sequence's bits then depend on nothing but its own length.

The splits of a work tile take its tiles in turn: split p of P reads tiles p, p + P, …. Partial results lie in
the order of work tiles, then splits. The grid follows from shapes alone, so that a CUDA graph stays right for any
lengths; programs beyond the last split end at once. Each program scans all lengths to find its split, so a
large batch is shared out in groups of sequences, each with programs of its own. (A line of equal shares that run across work tiles, Stream-K's
idea, a counter at which the last program merges, and programs that take several splits were tried: docs/notes/decode.md.)
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.tiles import NO_CACHE_MODIFIER, key_range, sequence_bounds, shard_bounds

#: Keys a unit: the grain of the balance, and the alignment of a split's first key.
UNIT = tl.constexpr(16)
#: Units a split at least: less is not worth its part of the merge.
MIN_SHARE = 4
#: Units a split from which on two programs an SM are better than one, where each has more to wait for.
LONG_SHARE = tl.constexpr(32)
#: Units a split at most in the batch-invariant mode: 1024 keys.
CHUNK = tl.constexpr(64)
#: Splits a ragged batch is cut into, in multiples of an even one's; at least 2, as `cut` may double those.
FINER = 6
#: Where work tiles abound they balance by themselves: splits an SM beyond which they are cut in two at most.
ENOUGH = 48
#: The same multiple where fast memory has many work tiles: what is cut is written and read again.
COARSER = 2
#: Programs an SM at once: enough to wait for memory.
MAX_CTAS_PER_SM = 4
#: Sequences whose lengths one program scans; a larger batch is shared out group by group.
GROUP = 128
#: Sequences a launch: groups, and where nothing is scanned sequences, are a small dimension of the grid.
MAX_BATCH = 65535
#: Keys of a cache up to which nothing is cut where work tiles abound: a scan and a merge would take longer.
SHORT = 512


def groups(batch: int) -> tuple[int, int]:
    """(how many groups, sequences of each but the last)."""
    count = cdiv(batch, GROUP)
    return count, cdiv(batch, count)


@functools.cache
def fast_memory(device: torch.device) -> bool:
    """Whether a CUDA device's memory is of the class of an H200's 4.8 TB/s, not of an H100's 3.35."""
    if device.type != "cuda":
        return False
    found = torch.cuda.get_device_properties(device)
    clock_khz, bits = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return clock_khz * 1e3 * 2 * bits / 8 >= 4e12


def target_splits(work_tiles: int, num_sms: int) -> int:
    """How many splits an even batch is cut into: the same number on each SM, one where work tiles are few."""
    return num_sms * max(1, round(work_tiles / num_sms))


def splits_per_work_tile(work_tiles: int, target: int) -> int:
    """Splits of each of so many equal work tiles, in all about as many as the target."""
    return max(1, int(target / work_tiles + 0.4))


def ragged_target_splits(target: int, num_sms: int, coarse: bool = False) -> int:
    """How many splits a ragged batch is cut into, of an even one's target."""
    if coarse:
        return COARSER * target
    return max(2 * target, min(FINER * target, ENOUGH * num_sms))


def max_ctas_per_sm(work_tiles: int, target: int, twice: bool, num_sms: int) -> int:
    """How many programs an SM may run at once: what the splits of so many equal work tiles need.

    The hardware deals a grid out to groups of SMs, which are of different sizes. Where the grid is large enough for a
    ragged batch, or does not fit, only this limit gives each SM its share of an even batch.
    Where work tiles are split, there is a second one, which starts while the first one ends.
    """
    splits = (1 + twice) * splits_per_work_tile(work_tiles, target)
    return min(MAX_CTAS_PER_SM, max(cdiv(work_tiles * splits, num_sms), min(splits, 2)))


def max_splits(
    batch: int,
    work_tiles: int,
    kv_capacity: int,
    target: int,
    ragged_target: int,
    min_units: int,
    even: bool,
    twice: bool,
    batch_invariant: bool,
) -> tuple[int, int]:
    """(the most splits of all work tiles, those of one), work tiles a sequence; even: equal lengths."""
    units = max(1, cdiv(kv_capacity, UNIT.value))
    longest = cdiv(units, min_units)
    if batch_invariant:
        splits = cdiv(units, CHUNK.value)
    elif even:
        splits = min(longest, (1 + twice) * splits_per_work_tile(batch * work_tiles, target))
    else:
        # A work tile has at most one split more than whole shares, and no batch is cut finer than a ragged one.
        splits = min(longest, ragged_target // work_tiles + 1)
        return min(batch * work_tiles * splits, ragged_target + batch * work_tiles), splits
    return batch * work_tiles * splits, splits


class Splits(NamedTuple):
    """How the keys of a launch's work tiles are shared out; a work tile is one sequence's KV head and block of query rows."""

    even: bool  # all work tiles alike, without a look at the lengths
    target: int  # splits of a work tile where they are even, else of all work tiles of a group
    ragged_target: int  # the same where some sequences are longer than others
    min_units: int  # units a split at least
    twice: bool  # whether long splits are cut in two
    groups: int
    group_size: int  # sequences
    programs: int  # of a group
    per_work_tile: int  # splits of a work tile at most
    max_ctas_per_sm: int | None


def choose_splits(
    batch: int, work_tiles: int, kv_capacity: int, num_sms: int, *, load: float, block_n: int, equal_lengths: bool,
    twice: bool, uncut: bool, batch_invariant: bool, coarse: bool = False, target: int | None = None,
) -> Splits:  # fmt: skip
    """
    Args:
        work_tiles: of a sequence.
        load: KV heads an SM.
        twice: whether two programs an SM are better than one for long splits.
        uncut: whether nothing is split, however long.
        coarse: whether a ragged batch is cut as little as need be.
        target: splits of an even batch, where not as `target_splits` has it.
    """
    target = target or target_splits(batch * work_tiles, num_sms)
    min_units = max(MIN_SHARE, block_n // UNIT.value)
    ragged = ragged_target_splits(target, num_sms, coarse)
    even, max_ctas = equal_lengths, None
    if not batch_invariant and (not even or load > MAX_CTAS_PER_SM):
        max_ctas = max_ctas_per_sm(batch * work_tiles, target, twice, num_sms)
    count, size = (1, batch) if even else groups(batch)
    if count > 1:
        target, ragged = (cdiv(x * size, batch) for x in (target, ragged))
    programs, per_work_tile = max_splits(
        size, work_tiles, kv_capacity, target, ragged, min_units, even, twice, batch_invariant
    )
    if uncut or per_work_tile == 1:  # nothing to cut, so nothing to scan
        even, count, size, per_work_tile = True, 1, batch, 1
    if even:
        target = splits_per_work_tile(batch * work_tiles, target)
    return Splits(
        even, target, ragged, min_units, twice, count, size, programs, per_work_tile, max_ctas
    )


@triton.jit
def key_bounds(
    sequence, bounds_of, window,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, CACHE: tl.constexpr = NO_CACHE_MODIFIER,
):  # fmt: skip
    """(kv_len, q_start, kv_start, keys, begin, end) of one sequence, or of many at once; CACHE: of the loads."""
    kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity, global_lens = bounds_of
    if global_lens is None:
        kv_len, q_start, kv_start = sequence_bounds(
            sequence, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity, CACHE
        )
    else:
        kv_len, q_start, kv_start = shard_bounds(
            sequence, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity, global_lens[0], global_lens[1], window[2],
            window[3], CACHE,
        )  # fmt: skip
    keys = (kv_len, kv_start, window[0], window[1], window[2], window[3])
    begin, _, _, end = key_range(
        q_start, q_start + q_len - 1, keys, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, UNIT
    )
    if not HAS_LEFT:
        begin = 0  # for the compiler, which then knows by what addresses can be divided
    return kv_len, q_start, kv_start, keys, begin, end


@triton.jit
def units_between(begin, end):
    """Units of a sequence's visible keys; one at least, so that every sequence's output is written."""
    return tl.maximum(tl.cdiv(end - begin, UNIT), 1)


@triton.jit
def splits_of(units, share, INVARIANT: tl.constexpr):
    """Splits of a work tile from its units and the share of a split; none of a work tile without units."""
    if INVARIANT:
        return tl.cdiv(units, CHUNK)
    else:
        # To the nearest, a little downwards: rather longer splits than a second wave of them. A product with
        # a reciprocal may be one below the quotient, for all programs alike.
        reciprocal = (0xFFFFFFFF // share.to(tl.uint32)).to(tl.uint32)
        splits = tl.umulhi((units + share * 2 // 5).to(tl.uint32), reciprocal).to(tl.int32)
        return tl.where(units > 0, tl.maximum(splits, 1), 0)


@triton.jit
def even_splits(
    units, splits, MIN_UNITS: tl.constexpr, TWICE: tl.constexpr, INVARIANT: tl.constexpr
):
    """Splits of each work tile where all of them have as many units, at most the host's `splits`."""
    if INVARIANT:
        return tl.cdiv(units, CHUNK)
    elif TWICE:
        few = tl.minimum(tl.cdiv(units, MIN_UNITS), splits)
        return tl.where(units >= splits * LONG_SHARE, splits * 2, few)
    else:
        return tl.minimum(tl.cdiv(units, MIN_UNITS), splits)


@triton.jit
def cut(
    first, batch, bounds_of, window, work_tiles, target_splits, ragged_target_splits,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, MIN_UNITS: tl.constexpr,
    TWICE: tl.constexpr, INVARIANT: tl.constexpr, BLOCK_B: tl.constexpr, CACHE: tl.constexpr = NO_CACHE_MODIFIER,
):  # fmt: skip
    """(share, splits): units a split, and splits of a work tile of each sequence (BLOCK_B,) from `first` on.

    batch counts the sequences; there are 0 splits beyond them.
    """
    sequences = tl.arange(0, BLOCK_B)
    within = first + tl.minimum(sequences, batch - 1)
    _, _, _, _, begin, end = key_bounds(
        within, bounds_of, window, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, CACHE
    )
    units = tl.where(sequences < batch, units_between(begin, end), 0)
    total = tl.sum(units, 0)
    ragged = tl.max(units, 0).to(tl.float32) * (4 * batch) > total.to(tl.float32) * 5
    share = tl.cdiv(total * work_tiles, tl.where(ragged, ragged_target_splits, target_splits))
    if TWICE:
        share = tl.where((share >= LONG_SHARE) & (ragged == 0), tl.cdiv(share, 2), share)
    share = tl.maximum(share, MIN_UNITS)
    return share, splits_of(units, share, INVARIANT)


@triton.jit
def place_of(program, splits, work_tiles):
    """(sequence, its first program) of a program, from the splits (BLOCK_B,); sequence -1 beyond the last."""
    ends = tl.cumsum(splits, 0) * work_tiles
    begins = ends - splits * work_tiles
    here = (begins <= program) & (program < ends)
    numbers = tl.arange(1, splits.shape[0] + 1)
    # One sum of both: every program waits for these before its first load.
    found = tl.sum(tl.where(here, (begins.to(tl.int64) << 16) | numbers, 0), 0)
    return (found & 0xFFFF).to(tl.int32) - 1, (found >> 16).to(tl.int32)


@triton.jit
def first_program(sequence, splits, work_tiles):
    """The first program of a sequence, from the splits (BLOCK_B,)."""
    return tl.sum(tl.where(tl.arange(0, splits.shape[0]) < sequence, splits, 0), 0) * work_tiles
