"""From positions to tile ranges, in Triton: which tiles a block must visit, and which need no mask.

The torch twin, which defines the meaning, is `ops/positions.py`. Key positions grow with the key's
index (kv_stride >= kv_block), so the keys that a block of queries sees form one range of indices:

    begin ··· full_begin ······ full_end ··· end
      border          interior          border

In the interior every pair is visible; border tiles are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops import positions

FAR = tl.constexpr(positions.FAR)
#: Of loads; Triton 3.6 takes no str as the default of a device function's parameter.
NO_CACHE_MODIFIER = tl.constexpr("")


@triton.jit
def program_coordinates(inner, middle):
    """Program id of a flat grid (outer · middle · inner) to (inner, middle, outer) coordinates.

    Flat, because the y and z dimensions of a CUDA grid end at 65535.
    """
    program = tl.program_id(0)
    return program % inner, program // inner % middle, program // inner // middle


@triton.jit
def block_coordinates(blocks, heads, swizzle):
    """(block, head, batch) of this program: of `swizzle` heads all first blocks begin, then all second ones, and so on.

    Where first blocks are the longest, SMs end together: with one head after the other, the last head's
    longest block begins when the work is nearly done.
    """
    program = tl.program_id(0)
    first = program // (blocks * swizzle) * swizzle
    swizzle = tl.minimum(swizzle, tl.num_programs(0) // blocks - first)
    program -= first * blocks
    line = first + program % swizzle
    return program // swizzle, line % heads, line // heads


@triton.jit
def tile_offsets(rows, d, strides, WIDE: tl.constexpr):
    """Offsets within a tile; rows and d already broadcast against each other.

    32-bit, since 64-bit offsets cost the backward its registers (632 bytes of spills against 360), but
    64-bit (WIDE) where strides are so large that a tile can span 2**31 elements.
    """
    if WIDE:
        rows = rows.to(tl.int64)
        d = d.to(tl.int64)
    return rows * strides[0] + d * strides[1]


@triton.jit
def key_position(index, kv_start, kv_block, kv_stride, BLOCK_CYCLIC: tl.constexpr):
    if BLOCK_CYCLIC:
        return kv_start + index // kv_block * kv_stride + index % kv_block
    else:
        return kv_start + index


@triton.jit
def keys_before(position, kv_start, kv_block, kv_stride, BLOCK_CYCLIC: tl.constexpr):
    """How many local keys of an endless shard stand before `position`."""
    distance = tl.maximum(position - kv_start, 0)
    if BLOCK_CYCLIC:
        return distance // kv_stride * kv_block + tl.minimum(distance % kv_stride, kv_block)
    else:
        return distance


@triton.jit
def sequence_bounds(
    batch,
    kv_lens_ptr,
    q_start_ptr,
    kv_start_ptr,
    q_len,
    kv_capacity,
    CACHE: tl.constexpr = NO_CACHE_MODIFIER,
):
    """(kv_len clamped to the capacity, q_start, kv_start) of one sequence; each pointer may be None; CACHE: of the loads."""
    kv_len = kv_capacity
    if kv_lens_ptr is not None:
        # Clamped before it is narrowed: an int64 length beyond 2**31 means the whole capacity.
        given = tl.load(kv_lens_ptr + batch, cache_modifier=CACHE)
        kv_len = tl.minimum(tl.maximum(given, 0), kv_capacity).to(tl.int32)
    kv_start = 0
    if kv_start_ptr is not None:
        kv_start = _position(tl.load(kv_start_ptr + batch, cache_modifier=CACHE))
    if q_start_ptr is not None:
        q_start = _position(tl.load(q_start_ptr + batch, cache_modifier=CACHE))
    else:
        q_start = kv_start + kv_len - q_len
    return kv_len, q_start, kv_start


@triton.jit
def shard_bounds(
    batch,
    kv_lens_ptr,
    q_start_ptr,
    kv_start_ptr,
    q_len,
    kv_capacity,
    start,
    max_len,
    kv_block,
    kv_stride,
    CACHE: tl.constexpr = NO_CACHE_MODIFIER,
):
    """`sequence_bounds` of a shard, where kv_lens counts whole sequences of `max_len` keys at most."""
    length = tl.minimum(
        tl.maximum(tl.load(kv_lens_ptr + batch, cache_modifier=CACHE), 0), max_len
    ).to(tl.int32)
    kv_start = start
    if kv_start_ptr is not None:
        kv_start = _position(tl.load(kv_start_ptr + batch, cache_modifier=CACHE))
    kv_len = keys_before(length, kv_start, kv_block, kv_stride, kv_start_ptr is None)
    if q_start_ptr is not None:
        q_start = _position(tl.load(q_start_ptr + batch, cache_modifier=CACHE))
    else:
        q_start = length - q_len
    return tl.minimum(kv_len, kv_capacity), q_start, kv_start


@triton.jit
def _position(start):
    """A position within ±FAR, so that with an index and a window it stays within int32."""
    return tl.minimum(tl.maximum(start, -FAR), FAR).to(tl.int32)


@triton.jit
def key_range(
    first, last, keys,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, full_begin, full_end, end) of the keys that queries at positions first..last see.

    begin, full_begin and full_end are multiples of BLOCK_N, except that they never pass `end`.
    """
    kv_len, kv_start, window_left, window_right, kv_block, kv_stride = keys
    begin = 0
    full_begin = 0
    end = kv_len
    full_end = kv_len
    if HAS_RIGHT:
        seen_by_last = keys_before(
            last + window_right + 1, kv_start, kv_block, kv_stride, BLOCK_CYCLIC
        )
        seen_by_first = keys_before(
            first + window_right + 1, kv_start, kv_block, kv_stride, BLOCK_CYCLIC
        )
        end = tl.minimum(end, seen_by_last)
        full_end = tl.minimum(end, seen_by_first)
    if HAS_LEFT:
        begin = keys_before(first - window_left, kv_start, kv_block, kv_stride, BLOCK_CYCLIC)
        full_begin = keys_before(last - window_left, kv_start, kv_block, kv_stride, BLOCK_CYCLIC)
    begin = tl.minimum(begin // BLOCK_N * BLOCK_N, end)
    full_begin = tl.minimum(tl.cdiv(full_begin, BLOCK_N) * BLOCK_N, end)
    full_end = tl.maximum(full_end // BLOCK_N * BLOCK_N, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def shown_range(bounds, first, end, BLOCK_N: tl.constexpr):
    """What is left of `key_range` where a mask's row hides the keys before `first` and from `end` on."""
    begin, full_begin, full_end, last = bounds
    last = tl.minimum(last, end)
    begin = tl.minimum(tl.maximum(begin, first // BLOCK_N * BLOCK_N), last)
    full_begin = tl.minimum(tl.maximum(full_begin, tl.cdiv(first, BLOCK_N) * BLOCK_N), last)
    full_end = tl.maximum(tl.minimum(full_end, end // BLOCK_N * BLOCK_N), full_begin)
    return begin, full_begin, full_end, last


@triton.jit
def query_range(
    first, last, even_n, q_start, q_len, window_left, window_right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(begin, full_begin, full_end, end) of the queries that see keys at positions first..last.

    `even_n` is false where the key tile itself is ragged, so that every query tile needs a mask.
    """
    begin = 0
    full_begin = 0
    end = q_len
    full_end = q_len
    if HAS_RIGHT:
        begin = tl.maximum(first - window_right - q_start, 0)
        full_begin = tl.maximum(last - window_right - q_start, 0)
    if HAS_LEFT:
        # Up to the last query before the window is added: a far key's distance and the window would overflow int32.
        seeing_last = tl.minimum(last - q_start, q_len) + window_left + 1
        seeing_first = tl.minimum(first - q_start, q_len) + window_left + 1
        end = tl.maximum(tl.minimum(end, seeing_last), 0)
        full_end = tl.maximum(tl.minimum(end, seeing_first), 0)
    begin = tl.minimum(begin // BLOCK_M * BLOCK_M, end)
    full_begin = tl.cdiv(tl.minimum(full_begin, end), BLOCK_M) * BLOCK_M
    full_begin = tl.where(even_n, tl.minimum(full_begin, end), end)
    full_end = tl.maximum(full_end // BLOCK_M * BLOCK_M, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def tile_steps(bounds, BORDER: tl.constexpr):
    """(first, last) of the loop over a range's border tiles, both sides in one, or its interior."""
    begin, full_begin, full_end, end = bounds
    if BORDER:
        return begin, end - (full_end - full_begin)
    else:
        return full_begin, full_end


@triton.jit
def tile_start(step, bounds, BORDER: tl.constexpr):
    """The tile of a step of that loop: border steps jump over the interior."""
    if BORDER:
        return tl.where(step < bounds[1], step, step + (bounds[2] - bounds[1]))
    else:
        return step


@triton.jit
def visible(
    q_pos, index, keys, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr
):
    """The mask of one tile; q_pos and key index already broadcast against each other."""
    kv_len, kv_start, window_left, window_right, kv_block, kv_stride = keys
    seen = index < kv_len
    if HAS_LEFT or HAS_RIGHT:
        position = key_position(index, kv_start, kv_block, kv_stride, BLOCK_CYCLIC)
        if HAS_RIGHT:
            seen = seen & (position <= q_pos + window_right)
        if HAS_LEFT:
            seen = seen & (position >= q_pos - window_left)
    return seen


@triton.jit
def add_dot(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b, in fp32 without tensor cores each tile's product by itself.

    Such a product is a chain of FMAs along the columns of a. One chain through all tiles gathers an error that grows
    with the sequence (docs/notes/attention.md); max_num_imprecise_acc keeps the compiler from making it one.
    """
    if a.dtype == tl.float32 and PRECISION == "ieee":
        return acc + tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)
