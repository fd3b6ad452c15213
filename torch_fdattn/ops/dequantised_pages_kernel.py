"""The kernel of `dequantised_pages`: a program has some rows, of a token and a head each, of a page of K or of V."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.attention.configs import device_capability
from torch_fdattn.ops.decode.configs import E4M3_CAPABILITY
from torch_fdattn.ops.decode.one_byte import unquantised
from torch_fdattn.ops.launch import cdiv, power_of_two

#: Elements of a program: a load of 16 bytes a thread.
_ELEMENTS = 2048


@triton.jit
def _copy_rows(
    cache_ptr, strides, scale_ptr, scale_strides, out_ptr, page, copy, page_size, heads, row,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of the page to rows of the copy (page, K, D); zeros of a page that is none."""
    slot, head = row // heads, row % heads
    d = tl.arange(0, BLOCK_D)[None, :]
    exists = (row < page_size * heads) & (page >= 0)
    at = page * strides[0] + head.to(tl.int64) * strides[1] + slot.to(tl.int64) * strides[2]
    real = exists[:, None] & (d < D)
    x = tl.load(cache_ptr + at[:, None] + d, mask=real)
    where_scale = page * scale_strides[0] + head.to(tl.int64) * scale_strides[1]
    where_scale += slot.to(tl.int64) * scale_strides[2]
    scale = tl.load(scale_ptr + where_scale, mask=exists, other=0.0)
    # By float16, which has every number of one byte.
    value = tl.where(real, unquantised(x, tl.float16).to(tl.float32) * scale[:, None], 0.0)
    to = (copy * page_size * heads + row.to(tl.int64)) * D
    inside = (row < page_size * heads)[:, None] & (d < D)
    tl.store(out_ptr + to[:, None] + d, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantise_pages_kernel(
    k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, pages_ptr, k_ptr, v_ptr,
    k_cache_strides, v_cache_strides, k_scale_strides, v_scale_strides, page_size, heads, blocks,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    copy, block = (program // (2 * blocks)).to(tl.int64), program % (2 * blocks)
    page = tl.load(pages_ptr + copy).to(tl.int64)
    row = block % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    if block < blocks:
        _copy_rows(
            k_cache_ptr, k_cache_strides, k_scale_ptr, k_scale_strides, k_ptr, page, copy, page_size, heads, row, D, BLOCK_D
        )  # fmt: skip
    else:
        _copy_rows(
            v_cache_ptr, v_cache_strides, v_scale_ptr, v_scale_strides, v_ptr, page, copy, page_size, heads, row, D, BLOCK_D
        )  # fmt: skip


def launch_dequantise_pages(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor, v_scale: Tensor, pages: Tensor, k: Tensor, v: Tensor
) -> None:  # fmt: skip
    """Caches (P, K, page, D), scales (P, K, page) and pages (n,) into k and v (n, page, K, D), contiguous."""
    _, heads, page_size, dims = k_cache.shape
    block_d = power_of_two(dims)
    block_r = power_of_two(min(page_size * heads, max(1, _ELEMENTS // block_d)))
    blocks = cdiv(page_size * heads, block_r)
    is_e4m3 = k_cache.dtype == torch.float8_e4m3fn
    if is_e4m3 and device_capability(k_cache.device) < E4M3_CAPABILITY:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    # None at the end, for the reason in `launch.kernel_options`.
    by_page = ((*x.stride()[:3], None) for x in (k_cache, v_cache, k_scale, v_scale))
    launch(
        _dequantise_pages_kernel, len(pages) * 2 * blocks,
        k_cache, v_cache, k_scale, v_scale, pages, k, v, *by_page, page_size, heads, blocks, dims, block_r, block_d,
        num_warps=4,
    )  # fmt: skip
