"""From a decode call to its launches: tiles and schedule, prepared once for calls of equal metadata.

Everything that follows from shapes, strides, dtypes and options is a `Plan`, which holds its launches prepared
(`launch/prepared.py`): binding 50 arguments anew costs more than a short decode takes (docs/notes/decode.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.launch.launches import Launch
from torch_fdattn.launch.pdl import supports_pdl
from torch_fdattn.launch.prepared import PreparedCall
from torch_fdattn.ops.attention.configs import TileConfig, device_capability, dot_precision
from torch_fdattn.ops.decode import schedule
from torch_fdattn.ops.decode.inputs import WholeLengths
from torch_fdattn.ops.decode.kernel import _decode_kernel
from torch_fdattn.ops.decode.merge import _merge_kernel
from torch_fdattn.ops.launch import (
    cdiv,
    contiguous_mask,
    mask_flags,
    mask_numbers,
    padded,
    power_of_two,
    tile_dims,
)
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.mask_strides import mask_strides
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

MAX_ROWS = 64
#: Items a processor from which on they fill the device, and from which on they do not fit side by side.
MANY, CROWDED = 1.5, 3.0
#: Keys of a sequence from which on fast memory wants wide tiles.
LONG = 65536
#: Keys a sequence; positions are int32, and windows are added to them.
MAX_CAPACITY = 1 << 30
#: The y and z dimensions of a CUDA grid are smaller.
MAX_GRID = 65536
#: From here on float8_e4m3fn has conversion instructions; elsewhere the kernel takes its bytes apart.
E4M3_CAPABILITY = (8, 9)
#: Rows from which on four warps multiply together (wgmma).
WARP_GROUP_ROWS = 64
#: fp32 elements of partial results that a program of the merge holds at once, and their share a warp.
MERGE_ELEMENTS, MERGE_ELEMENTS_A_WARP = 4096, 1024


class Cache(NamedTuple):
    """Where keys and values are: (B, H_kv, N, D), or pages (P, H_kv, page, D) behind a table."""

    k: Tensor
    v: Tensor
    page_table: Tensor | None = None
    k_scale: Tensor | None = None  # of k.shape[:3], by strides
    v_scale: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Keys a sequence at most."""
        if self.page_table is None:
            return self.k.shape[2]
        return self.page_table.shape[1] * self.k.shape[2]


def decode_config(
    head_dim: int, dtype: torch.dtype, rows: int, paged: bool = False, narrow: bool = False, load: float = 1.0,
    capability: tuple[int, int] = (9, 0), capacity: int = 0, fast_memory: bool = False,
) -> TileConfig:  # fmt: skip
    """Tiles of the kernel, measured on an H100, those for fast memory on an H200 (docs/notes/decode.md).

    rows is the number of packed query rows of one KV head; narrow: the cache has one byte an element; load is
    the number of items a processor; capacity: keys of a sequence.
    """
    block_m = padded(min(rows, MAX_ROWS))
    if INTERPRET:
        return TileConfig(block_m, 16, 1, 1)
    if head_dim > 256:
        return _largest_dims_config(dtype, block_m, narrow, capability)
    if dtype == torch.float32:
        # FMA dots keep whole operand rows in registers: wider tiles spill kilobytes a thread, and where bytes
        # are converted on their way so do these beside a second stage.
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
        if capability >= (8, 0):  # with four warps the addresses of pages spill registers
            return TileConfig(16, 128, 8, 2)
    if block_m == 16 and not narrow and load >= CROWDED:
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


def known_row(cache: Tensor) -> int:
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


def merge_config(all_rows: int, rows: int, pieces: int, block_dv: int, wide: int) -> MergeConfig:
    """all_rows of all items, rows of one; `wide` programs are enough to fill the device."""
    dims = block_dv if all_rows * block_dv >= 32 * wide else min(32, block_dv)
    tile_rows = 1
    while tile_rows < rows and all_rows * block_dv > 16 * wide * tile_rows * dims:
        tile_rows *= 2
    parts = min(power_of_two(pieces), max(1, MERGE_ELEMENTS // (tile_rows * dims)))
    warps = min(4, max(1, tile_rows * parts * dims // MERGE_ELEMENTS_A_WARP))
    return MergeConfig(tile_rows, parts, dims, warps)


class EvenCut(NamedTuple):
    """How items are cut, all alike, and where their parts lie: what a kernel that merges them must know."""

    numbers: tuple[int, ...]  # kv_capacity, window_left, window_right, kv_block, kv_stride, wanted
    whole: tuple[int, int] | None
    kv_heads: int
    flags: tuple[bool, ...]  # HAS_LEFT, HAS_RIGHT, STRIPED
    least: int
    twice: bool
    block_m: int
    block_dv: int
    pieces: int  # of an item at most


class Unmerged(NamedTuple):
    """What a decode has left of its items for another kernel to merge; items in one piece are written to out."""

    parts: Tensor
    part_lses: Tensor
    bounds: tuple[Tensor | None, ...]  # kv_lens, q_start, kv_start
    cut: EvenCut


class Plan:
    """A call's launches with all but its tensors' addresses decided."""

    def __init__(
        self, q: Tensor, cache: Cache, mask: Mask, scale: float, out: Tensor, options: Scores,
        batch_invariant: bool, config: TileConfig | None = None, wanted: int | None = None,
        capability: tuple[int, int] | None = None, whole: WholeLengths | None = None,
    ) -> None:  # fmt: skip
        k, v, page_table, k_scale, v_scale = cache
        batch, heads, q_len, head_dim = q.shape
        kv_heads, v_dim = k.shape[1], v.shape[3]
        group, paged = heads // kv_heads, page_table is not None
        rows = group * q_len
        capability = capability or device_capability(q.device)
        self._as_bytes = k.dtype == torch.float8_e4m3fn and capability < E4M3_CAPABILITY

        processors = schedule.processors(q.device)
        narrow = k.dtype.itemsize == 1
        load = batch * kv_heads / processors
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
        items = kv_heads * cdiv(rows, config.block_m)
        wanted = wanted or schedule.wanted_pieces(batch * items, processors)
        # Page numbers and conversions are more to wait for.
        twice = (paged or narrow) and load < MANY
        least = max(schedule.MIN_SHARE, config.block_n // schedule.UNIT.value)
        ragged = schedule.ragged_pieces(wanted, processors)
        even = batch == 1 or all(x is None for x in mask[:3])
        beside = None
        if not batch_invariant and (not even or load > schedule.MOST_BESIDE):
            beside = schedule.side_by_side(batch * items, wanted, twice, processors)
        groups, size = (1, batch) if even else schedule.groups(batch)
        if groups > 1:
            wanted, ragged = (cdiv(x * size, batch) for x in (wanted, ragged))
        programs, pieces = schedule.most_pieces(
            size, items, cache.capacity, wanted, ragged, least, even, twice, batch_invariant
        )
        if short or pieces == 1:  # nothing to cut, so nothing to scan
            even, groups, size, pieces = True, 1, batch, 1
        if even:
            wanted = schedule.even_share(batch * items, wanted)
        keys_first = loads_keys_first(config, dims, q.dtype, load, capability) and not INTERPRET
        split, pdl = pieces > 1, supports_pdl(capability)
        slots = groups * programs if split else 0
        self.lse_offset = slots * config.block_m * block_dv
        self.floats = self.lse_offset + slots * config.block_m

        self.device = q.device
        self._calls = PreparedCall(), PreparedCall()  # without the merge, and with it
        self._strided_lengths = not all(x is None or x.is_contiguous() for x in mask[:3])
        mask = simplified(mask, q_len)
        slopes, strides_of_mask, mask_rows = options.alibi_slopes, None, False
        if options.attn_mask is not None:
            whole_mask = options.attn_mask.expand(batch, heads, q_len, cache.capacity)
            strides_of_mask = mask_strides(whole_mask, by_query=True)
            mask_rows = any(whole_mask.stride()[1:3])
        strides = out.stride(), 0 if options.sinks is None else options.sinks.stride(0)
        flags = tuple(mask_flags(mask).values())
        window, cut_by = mask_numbers(mask), None
        if whole is not None:
            window, cut_by = (*window[:2], whole.block, whole.stride), (whole.start, whole.most)
        block_b = 1 if even else scan_width(size)
        # Heads that lie next to each other are read side by side.
        heads_first = pieces < MAX_GRID and (k.stride(1) < k.stride(2) or items >= MAX_GRID)
        if even and not heads_first and items >= MAX_GRID:
            raise ValueError(
                f"KV heads must be fewer in a cache of this length, got {kv_heads} of capacity {cache.capacity}"
            )
        grid = (items, pieces, batch) if heads_first else (pieces, items, batch)
        if not even:
            grid = (programs, groups, 1)
        self._decode = _Template(
            _decode_kernel, grid, (
                q.stride(), k.stride(), v.stride(), strides[0], _scale_strides(k_scale), _scale_strides(v_scale),
                _slope_strides(slopes), strides_of_mask, strides[1], batch, q_len, cache.capacity, k.shape[0],
                *(page_table.stride() if paged else (0, 0)), *window, cut_by, scale, options.softcap, wanted,
                ragged, size, kv_heads, group, head_dim, v_dim, known_row(k), known_row(v), k.shape[2] if paged else 0,
                *flags, options.softcap > 0,
                _scale_kind(k_scale, paged), _scale_kind(v_scale, paged), mask_rows,
                batch_invariant, least, twice, split, groups > 1, pdl, keys_first, heads_first, dot_precision(q.dtype), block_b, config.block_m,
                config.block_n, block_d, block_dv,
            ),
            dict(num_warps=config.num_warps, num_stages=config.num_stages, max_ctas_per_sm=beside),
        )  # fmt: skip
        self._merge, self.tiles, self._cut = None, (config, None), None
        if split:
            # Bits that must not follow from the batch come from one kernel, whatever the batch, and sinks
            # from the kernel that writes the rows.
            if even and not batch_invariant and options.sinks is None:
                numbers = cache.capacity, *window, wanted
                self._cut = EvenCut(
                    numbers, cut_by, kv_heads, flags, least, twice, config.block_m, block_dv, pieces
                )
            merge = INVARIANT_MERGE
            if not batch_invariant:
                rows_here = min(rows, config.block_m)
                merge = merge_config(
                    batch * heads * q_len, rows_here, pieces, block_dv, 2 * processors
                )
            merge = merge._replace(dims=min(merge.dims, block_dv))
            self.tiles = config, merge
            blocks = cdiv(rows, merge.rows) * (block_dv // merge.dims)
            self._merge = _Template(
                _merge_kernel, batch * kv_heads * blocks, (
                    *strides, batch, q_len, cache.capacity, *window, cut_by, wanted, ragged,
                    size, programs, kv_heads, group, v_dim,
                    *flags, groups > 1, batch_invariant, least, twice, pdl, block_b, config.block_m, block_dv,
                    merge.rows, merge.parts, merge.dims,
                ),
                dict(num_warps=merge.warps) | (dict(launch_pdl=True) if pdl else {}),
            )  # fmt: skip

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kv_lens: Tensor | None,
        q_start: Tensor | None, kv_start: Tensor | None, page_table: Tensor | None, k_scale: Tensor | None,
        v_scale: Tensor | None, alibi_slopes: Tensor | None, attn_mask: Tensor | None, sinks: Tensor | None,
        workspace: Tensor | None = None, leave_parts: bool = False,
    ) -> Unmerged | None:  # fmt: skip
        """Launches on tensors of the plan's metadata.

        leave_parts: does not merge where all items are cut alike, but returns what is to be merged.
        """
        launches["decode_forward/triton"] += 1
        parts = None
        if self._merge is not None:
            if workspace is None:
                parts = torch.empty(self.floats, dtype=torch.float32, device=self.device)
            else:
                parts = workspace
        if self._strided_lengths:
            kv_lens, q_start, kv_start = contiguous_mask(Mask(kv_lens, q_start, kv_start))[:3]
        if self._as_bytes:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        bounds, unmerged = (kv_lens, q_start, kv_start), None
        if leave_parts and self._cut is not None:
            parts = parts.view(torch.float32)
            unmerged = Unmerged(parts, parts[self.lse_offset :], bounds, self._cut)
        rest = page_table, k_scale, v_scale, alibi_slopes, attn_mask, sinks
        call = self._calls[unmerged is None]
        tensors = (q, k, v, out, lse, parts, *bounds, *rest)
        if not call.by_driver(tensors):
            call.run(tensors, self._launches(*tensors, merges=unmerged is None))
        return unmerged

    def _launches(self, q, k, v, out, lse, parts, *rest, merges: bool) -> Iterator[Launch]:
        part_lses = None
        if parts is not None:
            parts = parts.view(torch.float32)  # a workspace is of int32
            part_lses = parts[self.lse_offset :]
        yield self._decode(q, k, v, out, lse, parts, part_lses, *rest)
        if parts is not None and merges:
            bounds, sinks = rest[:3], rest[-1]
            yield self._merge(out, lse, parts, part_lses, *bounds, sinks)


class _Template(NamedTuple):
    """A launch, but for its tensors, which are its first arguments."""

    kernel: object
    grid: int | tuple[int, int, int]
    numbers: tuple
    options: dict[str, object]

    def __call__(self, *tensors: Tensor | None) -> Launch:
        return Launch(self.kernel, self.grid, *tensors, *self.numbers, **self.options)


def launch_decode(
    q: Tensor, cache: Cache, mask: Mask, scale: float, out: Tensor, lse: Tensor,
    options: Scores | None = None, batch_invariant: bool = False, workspace: Tensor | None = None,
    config: TileConfig | None = None, wanted: int | None = None,
    capability: tuple[int, int] | None = None, whole: WholeLengths | None = None, leave_parts: bool = False,
) -> tuple[Plan | None, Unmerged | None]:  # fmt: skip
    """Writes attention of q over the cache into out (B, H, T, DV), any float dtype, and lse (fp32).

    Returns the plan, for later calls of equal metadata, None where there was no one launch; and what
    `Plan.launch` returns.
    """
    if out.numel() == 0:
        return None, None
    options = options or Scores()
    if _too_long(q.shape[0], q, cache):
        _launch_in_halves(
            q, cache, mask, scale, out, lse, options, batch_invariant, workspace, whole
        )
        return None, None
    plan = Plan(
        q, cache, mask, scale, out, options, batch_invariant, config, wanted, capability, whole
    )
    unmerged = plan.launch(
        q, cache.k, cache.v, out, lse, *mask[:3], *cache[2:], options.alibi_slopes, options.attn_mask,
        options.sinks, workspace=workspace, leave_parts=leave_parts,
    )  # fmt: skip
    return plan, unmerged


def workspace_elements(q: Tensor, cache: Cache, batch_invariant: bool) -> int:
    """int32 elements of a caller's workspace: partial results, whatever the lengths."""
    most = 0
    for batch in _launch_sizes(q, cache):
        here, lens = q[:batch], torch.empty(batch, dtype=torch.int32, device="meta")
        for mask in (Mask(), Mask(lens)):
            plan = Plan(here, cache, mask, 1.0, here, Scores(), batch_invariant)
            most = max(most, plan.floats)
    return most


def launches_once(q: Tensor, cache: Cache) -> bool:
    """Whether one launch (and a merge) is enough for such a call."""
    return not _too_long(q.shape[0], q, cache)


def _launch_sizes(q: Tensor, cache: Cache) -> set[int]:
    """Sequences of each launch of a call. Room does not grow with them: fewer may be cut into more pieces."""
    sizes, found = {q.shape[0]}, set()
    while sizes:
        long = {batch for batch in sizes if _too_long(batch, q, cache)}
        found |= sizes - long
        sizes = {half for batch in long for half in _halves(batch)}
    return found


def _halves(batch: int) -> tuple[int, int]:
    return batch // 2, batch - batch // 2


def _too_long(batch: int, q: Tensor, cache: Cache) -> bool:
    """Whether one launch cannot scan so many lengths, or number the units of all sequences in int32."""
    if cache.capacity >= MAX_CAPACITY:
        raise ValueError(
            f"the cache must hold fewer than 2**30 keys a sequence, got {cache.capacity}"
        )
    rows = q.shape[1] // cache.k.shape[1] * q.shape[2]
    items = cache.k.shape[1] * cdiv(rows, padded(min(rows, 32)))
    units = batch * items * (cache.capacity // schedule.UNIT.value + 1)
    if units >= 1 << 30 and batch == 1:
        raise ValueError(
            f"one sequence's keys times KV heads must be below 2**34, got capacity {cache.capacity} and "
            f"{cache.k.shape[1]} heads"
        )
    return batch > schedule.MAX_BATCH or units >= 1 << 30


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


def _launch_in_halves(
    q, cache, mask, scale, out, lse, options, batch_invariant, workspace, whole
) -> None:
    half, _ = _halves(q.shape[0])
    for part in (slice(None, half), slice(half, None)):

        def of_part(x: Tensor | None, part: slice = part) -> Tensor | None:
            return None if x is None else x[part]

        if cache.page_table is None:
            here = Cache(*(of_part(x) for x in cache))
        else:
            here = cache._replace(page_table=cache.page_table[part])
        here_options = options
        if options.alibi_slopes is not None and options.alibi_slopes.dim() == 2:
            here_options = options._replace(alibi_slopes=options.alibi_slopes[part])
        if options.attn_mask is not None:
            whole_mask = options.attn_mask.expand(*q.shape[:3], cache.capacity)
            here_options = here_options._replace(attn_mask=whole_mask[part])
        here_mask = Mask(*(of_part(x) for x in mask[:3]), *mask[3:])
        launch_decode(
            q[part],
            here,
            here_mask,
            scale,
            out[part],
            lse[part],
            here_options,
            batch_invariant,
            workspace,
            whole=whole,
        )
