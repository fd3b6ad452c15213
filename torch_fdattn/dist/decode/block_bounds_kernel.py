"""The kernel of `block_bounds.py`: a program a sequence."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.launch import power_of_two
from torch_fdattn.ops.pdl import pdl_option, uses_pdl
from torch_fdattn.ops.positions import FAR as _FAR

FAR = tl.constexpr(_FAR)


@triton.jit(
    do_not_specialize=[
        "q_len",
        "count",
        "each",
        "rank",
        "world_size",
        "length_limit",
        "pages_apart",
        "batch",
    ]
)
def _bounds_kernel(
    kv_lens_ptr, q_start_ptr, bounds_ptr, q_len, block, count, each, rank, world_size, length_limit, pages_apart, batch,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    pdl_trigger(PDL)
    b = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    length = tl.minimum(tl.maximum(tl.load(kv_lens_ptr + b), 0), length_limit).to(tl.int32)
    q_start = length - q_len
    if q_start_ptr is not None:
        q_start = tl.minimum(tl.maximum(tl.load(q_start_ptr + b), -FAR), FAR).to(tl.int32)
    start = ((i // each * world_size + rank) * each + i % each) * block
    filled = tl.minimum(tl.maximum(length - start, 0), block)
    bounds_ptr += b * count + i
    of_row = batch * count
    inside = i < count
    tl.store(bounds_ptr, filled, mask=inside)
    tl.store(bounds_ptr + of_row, tl.zeros_like(i) + q_start, mask=inside)
    tl.store(bounds_ptr + 2 * of_row, start, mask=inside)
    tl.store(bounds_ptr + 3 * of_row, b * pages_apart + i, mask=inside)


def launch_bounds(
    kv_lens: Tensor, q_start: Tensor | None, bounds: Tensor, q_len: int, block: int, each: int, rank: int,
    world_size: int, length_limit: int, pages_apart: int,
) -> None:  # fmt: skip
    """Writes bounds (4, B, blocks) int32."""
    (batch, count), pdl = bounds.shape[1:], uses_pdl(bounds)
    q_start = None if q_start is None else q_start.contiguous()
    launch(
        _bounds_kernel, batch, kv_lens.contiguous(), q_start, bounds, q_len, block, count, each, rank, world_size, length_limit,
        pages_apart, batch, BLOCK=power_of_two(count), PDL=pdl, num_warps=1, **pdl_option(pdl),
    )  # fmt: skip
