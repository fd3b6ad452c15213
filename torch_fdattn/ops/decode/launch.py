"""From a decode call to its launch: tiles, schedule, workspace; prepared once for calls of equal metadata.

Everything that follows from shapes, strides, dtypes and options is a `Plan`. The first launch of a plan goes
through Triton's own launcher, which compiles; the later ones hand the compiled kernel its pointers directly,
because binding 50 arguments anew in Python costs more than a short decode takes (README.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from torch_fdattn.ops.attention.configs import TileConfig, device_capability, dot_precision
from torch_fdattn.ops.decode import schedule
from torch_fdattn.ops.decode.kernel import _decode_kernel
from torch_fdattn.ops.decode.workspace import elements, forget, split, workspace_for
from torch_fdattn.ops.launch import contiguous_mask, mask_flags, mask_numbers, on_device, padded
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

MAX_ROWS = 64
#: From here on float8_e4m3fn has conversion instructions; elsewhere the kernel takes its bytes apart.
E4M3_CAPABILITY = (8, 9)
#: fp32 elements of partial results that the last arriver holds at once: 64 registers a thread.
MERGE_ELEMENTS = 8192


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


class Grid(NamedTuple):
    """Programs of a launch, and what they leave behind on their way."""

    programs: int
    pieces: int  # programs an item; 0: the balanced schedule
    arrivals: int
    slots: int


def decode_config(
    head_dim: int, dtype: torch.dtype, rows: int, paged: bool = False,
    capability: tuple[int, int] = (9, 0),
) -> TileConfig:  # fmt: skip
    """Tiles of the kernel; rows is the number of packed query rows of one KV head."""
    block_m = padded(min(rows, MAX_ROWS))
    if INTERPRET:
        return TileConfig(block_m, 16, 1, 1)
    if dtype == torch.float32:
        # FMA dots keep whole operand rows in registers: wider tiles spill kilobytes a thread.
        if block_m == 16 and head_dim <= 128:
            return TileConfig(16, 32, 8, 2)
        return TileConfig(min(block_m, 32), 16, 4 if block_m == 16 else 8, 2)
    if head_dim > 128:
        return TileConfig(block_m, 32, 4 if block_m <= 32 else 8, 2)
    # 64 keys of 128 dims are 16 KiB a load: three stages keep enough bytes in flight. With 64 rows they
    # would take 72 KiB of the 64 KiB of shared memory that gfx942 has.
    stages = 3 if block_m <= 32 else 2
    if paged and capability >= (8, 0):
        stages = 2 * stages - 1  # the loads of page numbers take every other stage
    return TileConfig(block_m, 64, 4, stages)


def decode_grid(
    q: Tensor, cache: Cache, block_m: int, batch_invariant: bool, programs: int | None = None
) -> Grid:
    """From shapes alone; `programs` in place of as many as fill the device."""
    batch, heads, q_len, _ = q.shape
    kv_heads = cache.k.shape[1]
    items = batch * kv_heads * triton.cdiv(heads // kv_heads * q_len, block_m)
    arrivals = -(-items // 32) * 32  # what follows them in a caller's workspace stays aligned
    if batch_invariant:
        pieces = schedule.invariant_pieces(cache.capacity)
        return Grid(items * pieces, pieces, arrivals, items * pieces)
    programs = programs or schedule.balanced_programs(items, cache.capacity, q.device)
    return Grid(programs, 0, arrivals, 2 * programs)


class Plan:
    """A launch with all but its tensors' addresses decided."""

    def __init__(
        self, q: Tensor, cache: Cache, mask: Mask, scale: float, out: Tensor, options: Scores,
        batch_invariant: bool, config: TileConfig | None = None, programs: int | None = None,
        capability: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        k, v, page_table, k_scale, v_scale = cache
        batch, heads, q_len, head_dim = q.shape
        kv_heads, v_dim = k.shape[1], v.shape[3]
        group, paged = heads // kv_heads, page_table is not None
        rows = group * q_len
        capability = capability or device_capability(q.device)
        self._as_bytes = k.dtype == torch.float8_e4m3fn and capability < E4M3_CAPABILITY
        config = config or decode_config(max(head_dim, v_dim), q.dtype, rows, paged, capability)
        block_dv = padded(v_dim)
        merge_rows = min(
            triton.next_power_of_2(min(rows, config.block_m)), MERGE_ELEMENTS // 2 // block_dv
        )
        self.device = q.device
        self.grid = decode_grid(q, cache, config.block_m, batch_invariant, programs)
        self.lse_offset = self.grid.slots * config.block_m * block_dv
        self.floats = self.lse_offset + self.grid.slots * config.block_m
        self._strided_lengths = not all(x is None or x.is_contiguous() for x in mask[:3])
        mask = simplified(mask, q_len)
        slopes = options.alibi_slopes
        self._numbers = (
            q.stride(), k.stride(), v.stride(), out.stride(), _scale_strides(k_scale), _scale_strides(v_scale),
            _slope_strides(slopes), 0 if options.sinks is None else options.sinks.stride(0),
            batch, q_len, cache.capacity, k.shape[0], *(page_table.stride() if paged else (0, 0)),
            *mask_numbers(mask), scale, options.softcap, self.grid.pieces, kv_heads, group, head_dim, v_dim,
            k.shape[2] if paged else 0, *mask_flags(mask).values(), options.softcap > 0,
            _scale_kind(k_scale, paged), _scale_kind(v_scale, paged), batch_invariant, dot_precision(q.dtype),
            scan_width(batch), config.block_m, config.block_n, padded(head_dim), block_dv, merge_rows,
            max(1, min(16, MERGE_ELEMENTS // (merge_rows * block_dv))), schedule.MIN_SHARE,
        )  # fmt: skip
        self._options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
        self._compiled = None
        self._index = q.device.index

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kv_lens: Tensor | None,
        q_start: Tensor | None, kv_start: Tensor | None, page_table: Tensor | None, k_scale: Tensor | None,
        v_scale: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
        workspace: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launches on tensors of the plan's metadata."""
        launches["decode_forward/triton"] += 1
        if workspace is None:
            arrivals, parts = workspace_for(self.device, self.grid.arrivals, self.floats)
        else:
            arrivals, parts = split(workspace)
        if self._strided_lengths:
            kv_lens, q_start, kv_start = contiguous_mask(Mask(kv_lens, q_start, kv_start))[:3]
        if self._as_bytes:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        tensors = (
            q, k, v, out, lse, arrivals, parts, kv_lens, q_start, kv_start, page_table, k_scale, v_scale,
            alibi_slopes, sinks,
        )  # fmt: skip
        try:
            self._launch(tensors)
        except BaseException:
            if workspace is None:
                forget(self.device)
            raise

    def _launch(self, tensors: tuple[Tensor | None, ...]) -> None:
        pointers = [None if x is None else x.data_ptr() for x in tensors]
        if self._is_direct(pointers):
            compiled = self._compiled
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            compiled.run(
                self.grid.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None,
                None, *pointers[:7], pointers[6] + 4 * self.lse_offset, *pointers[7:], *self._numbers,
            )  # fmt: skip
            return
        part_lses = tensors[6][self.lse_offset :]
        with on_device(tensors[0]):
            compiled = _decode_kernel[(self.grid.programs,)](
                *tensors[:7], part_lses, *tensors[7:], *self._numbers, **self._options
            )
        # What was compiled for addresses that are multiples of 16 is right for those alone.
        if not INTERPRET and isinstance(self._index, int) and _aligned(pointers):
            self._compiled = compiled

    def _is_direct(self, pointers: list[int | None]) -> bool:
        """Whether the compiled kernel can be handed these addresses without asking Triton."""
        return (
            self._compiled is not None
            and _aligned(pointers)
            and torch._C._cuda_getDevice() == self._index
            and not _somebody_watches()
        )


def _aligned(pointers: list[int | None]) -> bool:
    bits = 0
    for pointer in pointers:
        if pointer is not None:
            bits |= pointer
    return bits & 15 == 0


def launch_decode(
    q: Tensor, cache: Cache, mask: Mask, scale: float, out: Tensor, lse: Tensor,
    options: Scores | None = None, batch_invariant: bool = False, workspace: Tensor | None = None,
    config: TileConfig | None = None, programs: int | None = None,
    capability: tuple[int, int] | None = None,
) -> Plan | None:  # fmt: skip
    """Writes attention of q over the cache into out (B, H, T, DV), any float dtype, and lse (fp32).

    Returns the plan, for later calls of equal metadata; None where there was no one launch.
    """
    if out.numel() == 0:
        return None
    options = options or Scores()
    if _too_long(q, cache):
        _launch_in_halves(q, cache, mask, scale, out, lse, options, batch_invariant, workspace)
        return None
    plan = Plan(q, cache, mask, scale, out, options, batch_invariant, config, programs, capability)
    plan.launch(
        q, cache.k, cache.v, out, lse, *mask[:3], *cache[2:], *options[1:], workspace=workspace
    )  # fmt: skip
    return plan


def workspace_elements(q: Tensor, cache: Cache, batch_invariant: bool) -> int:
    """int32 elements of a caller's workspace."""
    while _too_long(q, cache):
        q, cache = q[: -(-q.shape[0] // 2)], cache  # the larger half
    plan = Plan(q, cache, Mask(), 1.0, q, Scores(), batch_invariant)
    return elements(plan.grid.arrivals, plan.floats)


def _too_long(q: Tensor, cache: Cache) -> bool:
    """Whether one launch cannot scan the lengths, or number the units of all sequences in int32."""
    rows = q.shape[1] // cache.k.shape[1] * q.shape[2]
    items = cache.k.shape[1] * triton.cdiv(rows, padded(min(rows, 32)))
    units = q.shape[0] * items * (cache.capacity // schedule.UNIT.value + 1)
    if units >= 1 << 31 and q.shape[0] == 1:
        raise ValueError(
            f"one sequence's keys times KV heads must be below 2**35, got capacity {cache.capacity} and "
            f"{cache.k.shape[1]} heads"
        )
    return q.shape[0] > schedule.MAX_BATCH or units >= 1 << 31


def _somebody_watches() -> bool:
    """Whether a profiler has hooked into Triton's launches."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def simplified(mask: Mask, q_len: int) -> Mask:
    """Without the right border where it hides nothing: one query, which is the last key."""
    if q_len == 1 and mask.window_right >= 0 and mask.q_start is None and not mask.kv_block:
        return mask._replace(window_right=-1)
    return mask


def scan_width(batch: int) -> int:
    """Lengths that each program scans: few widths, so that batch sizes share a compiled kernel."""
    return next(width for width in (1, 32, 128, 512, schedule.MAX_BATCH) if width >= batch)


def _slope_strides(slopes: Tensor | None) -> tuple[int, int]:
    if slopes is None:
        return 0, 0
    return slopes.stride() if slopes.dim() == 2 else (0, slopes.stride(0))


def _scale_strides(scales: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if scales is None else scales.stride()


def _scale_kind(scales: Tensor | None, paged: bool) -> int:
    """0 no scales, 1 one a sequence's head, 2 one a key."""
    if scales is None:
        return 0
    return 2 if scales.stride(2) or (paged and scales.stride(0)) else 1


def _launch_in_halves(q, cache, mask, scale, out, lse, options, batch_invariant, workspace) -> None:
    half = q.shape[0] // 2
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
        )
