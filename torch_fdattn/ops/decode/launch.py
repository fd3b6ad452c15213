"""From a checked decode call to its launches: all that follows from shapes, strides, dtypes and options is decided once.

Binding 50 arguments anew costs more than a short decode takes (docs/notes/decode.md): `op.py` keeps a
`DecodeLaunchPlan` with its launches prepared (`launch/prepared.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.launch.device import num_sms
from torch_fdattn.launch.launches import Launch, run
from torch_fdattn.launch.pdl import supports_pdl
from torch_fdattn.ops.attention.configs import TileConfig, device_capability, dot_precision
from torch_fdattn.ops.decode import schedule
from torch_fdattn.ops.decode.configs import (
    CROWDED,
    E4M3_CAPABILITY,
    INVARIANT_MERGE,
    MANY,
    SPARE_PARTS,
    WARP_GROUP_ROWS,
    come_in_pairs,
    decode_config,
    loads_keys_first,
    merge_config,
    register_limit,
    static_row_stride,
)
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
from torch_fdattn.ops.decode.kernel import _decode_kernel
from torch_fdattn.ops.decode.merge import _merge_kernel
from torch_fdattn.ops.decode.tuned_splits import tuned_target_splits
from torch_fdattn.ops.launch import (
    cdiv,
    contiguous_mask,
    mask_flags,
    mask_numbers,
    padded,
    tile_dims,
)
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.mask_strides import mask_strides
from torch_fdattn.ops.options import DecodeOptions
from torch_fdattn.ops.pdl import pdl_option
from torch_fdattn.ops.positions import Mask

#: Keys a sequence; positions are int32, and windows are added to them.
MAX_CAPACITY = 1 << 30
#: The y and z dimensions of a CUDA grid are smaller.
MAX_GRID = 65536


class EvenCut(NamedTuple):
    """How work tiles are cut, all alike, and where their parts lie: what a kernel that merges them must know."""

    numbers: tuple[
        int, ...
    ]  # kv_capacity, window_left, window_right, kv_block, kv_stride, target splits
    shard: tuple[int, int] | None  # of `GlobalLengths`: start and max_len
    kv_heads: int
    flags: tuple[bool, ...]  # HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC
    min_units: int
    twice: bool
    block_m: int
    block_dv: int
    splits: int  # of a work tile at most


class Unmerged(NamedTuple):
    """What a decode has left of its work tiles for another kernel to merge; work tiles in one split are written to out."""

    parts: Tensor
    part_lses: Tensor
    bounds: tuple[Tensor | None, ...]  # kv_lens, q_start, kv_start
    cut: EvenCut


class DecodeLaunchPlan:
    """A call's launches with all but its tensors' addresses decided."""

    def __init__(
        self, call: DecodeCall, out: Tensor, config: TileConfig | None = None, target_splits: int | None = None,
        capability: tuple[int, int] | None = None, odd_addresses: bool = False,
    ) -> None:  # fmt: skip
        """config, target_splits, capability: in place of the ones that are chosen; odd_addresses: of the cache's first bytes."""
        (q, cache, options, global_lens) = call
        (k, v, page_table, k_scale, v_scale), scores = cache, options.scores
        batch_invariant = options.batch_invariant
        batch, heads, q_len, head_dim = q.shape
        kv_heads, v_dim = k.shape[1], v.shape[3]
        group, paged = heads // kv_heads, page_table is not None
        rows = group * q_len
        capability = capability or device_capability(q.device)
        #: Whether the kernel takes the cache as bytes.
        self.as_bytes = k.dtype == torch.float8_e4m3fn and capability < E4M3_CAPABILITY

        sms = num_sms(q.device)
        narrow = k.dtype.itemsize == 1
        load = batch * kv_heads / sms
        short = load >= CROWDED and cache.capacity <= schedule.SHORT and not batch_invariant
        if batch_invariant:  # nothing that a sequence's bits depend on may follow from the batch
            load = 1.0
        dims = max(head_dim, v_dim)
        fast = schedule.fast_memory(q.device) and not batch_invariant
        config = config or decode_config(
            dims, q.dtype, rows, paged, narrow, load, capability, cache.capacity, fast
        )
        block_d, block_dv = padded(head_dim), padded(v_dim)
        if config.block_m >= WARP_GROUP_ROWS:
            block_d, block_dv = tile_dims(k, v)
        work_tiles = kv_heads * cdiv(rows, config.block_m)
        if target_splits is None and not batch_invariant:
            target_splits = tuned_target_splits(
                q, k, v, paged, batch * work_tiles, cache.capacity, sms
            )
        splits = schedule.choose_splits(
            batch, work_tiles, cache.capacity, sms, load=load, block_n=config.block_n,
            equal_lengths=batch == 1 or all(x is None for x in options.mask[:3]),
            twice=(paged or narrow) and load < MANY,  # page numbers and conversions are more to wait for
            uncut=short, batch_invariant=batch_invariant, coarse=fast and paged and load >= CROWDED,
            target=target_splits,
        )  # fmt: skip
        keys_first = loads_keys_first(config, dims, q.dtype, load, capability) and not INTERPRET
        pairs = narrow and q.dtype.itemsize == 2 and not odd_addresses
        pairs = pairs and come_in_pairs(k) and come_in_pairs(v)
        # Products of a warp group read tiles of one swizzle (`tile_dims`), which the two of a pair are not.
        pairs = pairs and config.block_m < WARP_GROUP_ROWS
        self.reads_pairs = pairs
        width, ptx = 2 if pairs else 1, pairs and capability >= E4M3_CAPABILITY
        cast_first = narrow and q.dtype.itemsize == 2 and not pairs
        cast_first = cast_first and capability >= (7, 0) and not INTERPRET
        split, pdl = splits.per_work_tile > 1, supports_pdl(capability)
        slots = splits.groups * splits.programs if split else 0
        self.lse_offset = slots * config.block_m * block_dv
        #: fp32 elements of partial results.
        self.floats = self.lse_offset + slots * config.block_m

        self.strided_lengths = not all(x is None or x.is_contiguous() for x in options.mask[:3])
        mask = simplified(options.mask, q_len)
        strides_of_mask, mask_rows = None, False
        if scores.attn_mask is not None:
            full_mask = scores.attn_mask.expand(batch, heads, q_len, cache.capacity)
            strides_of_mask = mask_strides(full_mask, by_query=True)
            mask_rows = any(full_mask.stride()[1:3])
        strides = out.stride(), 0 if scores.sinks is None else scores.sinks.stride(0)
        flags = tuple(mask_flags(mask).values())
        window, cut_by = mask_numbers(mask), None
        if global_lens is not None:
            window = *window[:2], global_lens.block, global_lens.stride
            cut_by = global_lens.start, global_lens.max_len
        block_b = 1 if splits.even else scan_width(splits.group_size)
        # Heads that lie next to each other are read at the same time.
        heads_first = splits.per_work_tile < MAX_GRID and (
            k.stride(1) < k.stride(2) or work_tiles >= MAX_GRID
        )
        if splits.even and not heads_first and work_tiles >= MAX_GRID:
            raise ValueError(
                f"KV heads must be fewer in a cache of this length, got {kv_heads} of capacity {cache.capacity}"
            )
        grid = (
            (work_tiles, splits.per_work_tile, batch)
            if heads_first
            else (splits.per_work_tile, work_tiles, batch)
        )
        if not splits.even:
            grid = (splits.programs, splits.groups, 1)
        targets = splits.target, splits.ragged_target, splits.group_size
        self._decode = _Template(
            _decode_kernel, grid, (
                q.stride(), _in_pairs(k, width), _in_pairs(v, width), strides[0], _scale_strides(k_scale), _scale_strides(v_scale),
                _slope_strides(scores.alibi_slopes), strides_of_mask, strides[1], batch, q_len, cache.capacity, k.shape[0],
                *(page_table.stride() if paged else (0, 0)), *window, cut_by, options.scale, scores.softcap, *targets,
                kv_heads, group, head_dim, v_dim, static_row_stride(k) // width, static_row_stride(v) // width, k.shape[2] if paged else 0,
                *flags, scores.softcap > 0,
                _scale_kind(k_scale, paged), _scale_kind(v_scale, paged), mask_rows,
                batch_invariant, splits.min_units, splits.twice, split, splits.groups > 1, pdl, keys_first,
                heads_first, pairs, ptx, cast_first, dot_precision(q.dtype), block_b, config.block_m, config.block_n, block_d, block_dv,
            ),
            dict(
                num_warps=config.num_warps, num_stages=config.num_stages, max_ctas_per_sm=splits.max_ctas_per_sm,
                **register_limit(config, pairs, paged, capability), **pdl_option(pdl),
            ),
        )  # fmt: skip
        self._merge, self.tiles = None, (config, None)
        #: What another kernel that merges must know; None: only ours can.
        self.even_cut: EvenCut | None = None
        if not split:
            return
        # Bits that must not follow from the batch come from one kernel, whatever the batch, and sinks
        # from the kernel that writes the rows.
        if splits.even and not batch_invariant and scores.sinks is None:
            self.even_cut = EvenCut(
                (cache.capacity, *window, splits.target), cut_by, kv_heads, flags, splits.min_units, splits.twice,
                config.block_m, block_dv, splits.per_work_tile,
            )  # fmt: skip
        merge = INVARIANT_MERGE
        if not batch_invariant:
            rows_here = min(rows, config.block_m)
            usual = splits.per_work_tile
            if not splits.even and fast and paged:
                usual = min(
                    usual, SPARE_PARTS * cdiv(splits.programs, splits.group_size * work_tiles)
                )
            merge = merge_config(batch * heads * q_len, rows_here, usual, block_dv, 2 * sms)
        merge = merge._replace(dims=min(merge.dims, block_dv))
        self.tiles = config, merge
        blocks = cdiv(rows, merge.rows) * (block_dv // merge.dims)
        self._merge = _Template(
            _merge_kernel, batch * kv_heads * blocks, (
                *strides, batch, q_len, cache.capacity, *window, cut_by, *targets, splits.programs,
                kv_heads, group, v_dim, *flags, splits.groups > 1, batch_invariant, splits.min_units, splits.twice, pdl,
                block_b, config.block_m, block_dv, merge.rows, merge.parts, merge.dims,
            ),
            dict(num_warps=merge.warps, **pdl_option(pdl)),
        )  # fmt: skip

    def launches(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, parts: Tensor | None, *others: Tensor | None,
        merge: bool = True,
    ) -> Iterator[Launch]:  # fmt: skip
        """Of tensors like those of the plan; others: `DecodeCall.tensors`; parts: of `floats` elements of 4 bytes."""
        if self.as_bytes:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        part_lses = None
        if parts is not None:
            parts = parts.view(torch.float32)  # a workspace is of int32
            part_lses = parts[self.lse_offset :]
        yield self._decode(q, k, v, out, lse, parts, part_lses, *others)
        if parts is not None and merge:
            bounds, sinks = others[:3], others[-1]
            yield self._merge(out, lse, parts, part_lses, *bounds, sinks)

    def unmerged(self, parts: Tensor, bounds: tuple[Tensor | None, ...]) -> Unmerged:
        """What launches without a merge have left; bounds: kv_lens, q_start, kv_start."""
        parts = parts.view(torch.float32)
        return Unmerged(parts, parts[self.lse_offset :], bounds, self.even_cut)


class _Template(NamedTuple):
    """A launch, but for its tensors, which are its first arguments."""

    kernel: object
    grid: int | tuple[int, int, int]
    numbers: tuple
    options: dict[str, object]

    def __call__(self, *tensors: Tensor | None) -> Launch:
        return Launch(self.kernel, self.grid, *tensors, *self.numbers, **self.options)


def odd_addresses(k: Tensor, v: Tensor) -> bool:
    """Whether a cache of one byte an element cannot be read two bytes at a time."""
    return k.dtype.itemsize == 1 and bool((k.data_ptr() | v.data_ptr()) & 1)


def _in_pairs(cache: Tensor, width: int) -> tuple[int, ...]:
    """Strides in units of `width` neighbouring elements."""
    return cache.stride() if width == 1 else (*(x // width for x in cache.stride()[:3]), 1)


def launch_decode(*args, **kwargs) -> None:
    """Makes `decode_launches`."""
    run(decode_launches(*args, **kwargs))


def decode_launches(
    call: DecodeCall, out: Tensor, lse: Tensor, workspace: Tensor | None = None, **chosen
) -> Iterator[Launch]:
    """What writes attention of q over the cache into out (B, H, T, DV), any float dtype, and lse (fp32).

    As many as it takes, one call of the kernels after the other; chosen: of `DecodeLaunchPlan`.
    """
    q, cache = call.q, call.cache
    if out.numel() == 0:
        return
    if not fits_one_launch(q, cache):
        half, _ = _halves(q.shape[0])
        for part in (slice(None, half), slice(half, None)):
            yield from decode_launches(_part_of(call, part), out[part], lse[part], workspace, **chosen)  # fmt: skip
        return
    plan = DecodeLaunchPlan(call, out, odd_addresses=odd_addresses(cache.k, cache.v), **chosen)
    parts = workspace
    if plan.floats and parts is None:
        parts = torch.empty(plan.floats, dtype=torch.float32, device=q.device)
    launches["decode_forward/triton"] += 1
    contiguous = call._replace(
        options=call.options._replace(mask=contiguous_mask(call.options.mask))
    )
    others = contiguous.tensors
    yield from plan.launches(q, cache.k, cache.v, out, lse, parts if plan.floats else None, *others)


def workspace_elements(q: Tensor, cache: Cache, batch_invariant: bool) -> int:
    """int32 elements of a caller's workspace: partial results, whatever the lengths."""
    most = 0
    for batch in _launch_sizes(q, cache):
        here, lens = q[:batch], torch.empty(batch, dtype=torch.int32, device="meta")
        for mask in (Mask(), Mask(lens)):
            options = DecodeOptions(mask, 1.0, batch_invariant=batch_invariant)
            plan = DecodeLaunchPlan(DecodeCall(here, cache, options), here)
            most = max(most, plan.floats)
    return most


def _launch_sizes(q: Tensor, cache: Cache) -> set[int]:
    """Sequences of each launch of a call. The scratch memory does not grow with them: fewer may be cut into more splits."""
    sizes, found = {q.shape[0]}, set()
    while sizes:
        long = {batch for batch in sizes if _too_long(batch, q, cache)}
        found |= sizes - long
        sizes = {half for batch in long for half in _halves(batch)}
    return found


def _halves(batch: int) -> tuple[int, int]:
    return batch // 2, batch - batch // 2


def fits_one_launch(q: Tensor, cache: Cache) -> bool:
    """Whether one launch (and a merge) is enough for such a call."""
    return not _too_long(q.shape[0], q, cache)


def _too_long(batch: int, q: Tensor, cache: Cache) -> bool:
    """Whether one launch cannot scan so many lengths, or number the units of all sequences in int32."""
    if cache.capacity >= MAX_CAPACITY:
        raise ValueError(
            f"the cache must hold fewer than 2**30 keys a sequence, got {cache.capacity}"
        )
    rows = q.shape[1] // cache.k.shape[1] * q.shape[2]
    work_tiles = cache.k.shape[1] * cdiv(rows, padded(min(rows, 32)))
    units = batch * work_tiles * (cache.capacity // schedule.UNIT.value + 1)
    if units >= 1 << 30 and batch == 1:
        raise ValueError(
            f"one sequence's keys times KV heads must be below 2**34, got capacity {cache.capacity} and "
            f"{cache.k.shape[1]} heads"
        )
    return batch > schedule.MAX_BATCH or units >= 1 << 30


def _part_of(call: DecodeCall, part: slice) -> DecodeCall:
    """The call of some of its sequences."""

    def of_part(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[part]

    q, cache, options, global_lens = call
    mask, scores = options.mask, options.scores
    if cache.page_table is None:
        here = Cache(*map(of_part, cache))
    else:
        here = cache._replace(page_table=cache.page_table[part])
    if scores.alibi_slopes is not None and scores.alibi_slopes.dim() == 2:
        scores = scores._replace(alibi_slopes=scores.alibi_slopes[part])
    if scores.attn_mask is not None:
        full_mask = scores.attn_mask.expand(*q.shape[:3], cache.capacity)
        scores = scores._replace(attn_mask=full_mask[part])
    mask = Mask(*map(of_part, mask[:3]), *mask[3:])
    return DecodeCall(q[part], here, options._replace(mask=mask, scores=scores), global_lens)


def simplified(mask: Mask, q_len: int) -> Mask:
    """Without the right border where it hides nothing: one query, which is the last key."""
    if q_len == 1 and mask.window_right >= 0 and mask.q_start is None and not mask.kv_block:
        return mask._replace(window_right=-1)
    return mask


def scan_width(batch: int) -> int:
    """Lengths that each program scans: few widths, so that batch sizes share a compiled kernel."""
    return next(width for width in (32, 64, schedule.GROUP) if width >= batch)


def _slope_strides(slopes: Tensor | None) -> tuple[int, int]:
    if slopes is None:
        return 0, 0
    return slopes.stride() if slopes.dim() == 2 else (0, slopes.stride(0))


def _scale_strides(scales: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if scales is None else scales.stride()


def _scale_kind(scales: Tensor | None, paged: bool) -> int:
    """0 no scales, 1 one a sequence's head, 2 one a key."""
    if scales is None or not scales.numel():  # of no keys: nothing to load
        return 0
    return 2 if scales.stride(2) or (paged and scales.stride(0)) else 1
