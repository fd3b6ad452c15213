"""The first half of an MLP, ``silu(x @ gate.T) * (x @ up.T)``, in one launch (arXiv:2002.05202); here of few rows.

A program has the same columns of both products, which is one pass over the joined weights; BLAS and SwiGLU's kernel
are two launches, and write and read what is between them. Gate and up are rounded to the dtype before, and their
product once, as those two round them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.gemm import persistent_swiglu_gemm
from torch_fdattn.ops.gemm.small_m_gemm import AHEAD, prefetch, tile_for
from torch_fdattn.ops.gemm.tile_product import (
    Tile,
    describable,
    describes,
    has_large_shared_memory,
    operands,
    triton_dtype,
)
from torch_fdattn.ops.launch import NUM_SMS, cdiv
from torch_fdattn.ops.library import INTERPRET, can_call_kernel, launches
from torch_fdattn.ops.pdl import pdl_option, uses_pdl
from torch_fdattn.ops.swiglu_kernel import rounded_swiglu

MAX_ROWS = 128


@triton.jit(do_not_specialize=["m"])
def _swiglu_gemm_kernel(
    y_ptr, x, w, w_ptr, w_stride, m, n, k, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """x (m, k), w (2n, k), gate's rows before up's, by descriptors -> y (m, n); m at most BLOCK_M."""
    first_column = tl.program_id(0) * BLOCK_N
    if AHEAD:
        prefetch(w_ptr, first_column, 2 * n, k, w_stride, BLOCK_N, AHEAD)
        prefetch(w_ptr, n + first_column, 2 * n, k, w_stride, BLOCK_N, AHEAD)
    await_previous(PDL)
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        few = x.load([0, at]).T
        gate = tl.dot(w.load([first_column, at]), few, gate, input_precision="ieee")
        up = tl.dot(w.load([n + first_column, at]), few, up, input_precision="ieee")
    pdl_trigger(PDL)
    inner = tl.trans(rounded_swiglu(gate, up, DTYPE))
    rows, columns = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(y_ptr + at, inner, mask=(rows < m)[:, None] & (columns < n)[None, :])


def _tile(columns: int, x: Tensor) -> Tile:
    """Two weights a stage in place of one; of 128 rows stages of two programs an SM, where there are as many."""
    tile = tile_for(len(x), x)
    if INTERPRET or not has_large_shared_memory(x.device):
        return tile
    if tile.n <= 64:
        return tile._replace(stages=4)
    return tile._replace(stages=5 if cdiv(columns, tile.m) <= NUM_SMS else 3)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `silu_mul_linear` can do it."""
    dtypes = (torch.float16,) if INTERPRET else (torch.float16, torch.bfloat16)
    alike = (
        (x.is_cuda or INTERPRET)
        and x.dtype == weight.dtype
        and x.device == weight.device
        and x.shape[1] == weight.shape[1]
        and len(weight) % 2 == 0
        and x.dtype in dtypes
        and len(x) > 0
        and describes(x.device, x.dtype)
        and describable(x)
        and describable(weight)
    )
    return alike and (len(x) <= MAX_ROWS or persistent_swiglu_gemm.fits(x, weight))


def can_launch_directly(x: Tensor, weight: Tensor) -> bool:
    """Whether `silu_mul_linear` may stand for the two ops: its sizes fit, and no gradient, mode or autocast needs them."""
    dispatches = torch.is_autocast_enabled(x.device.type) or not can_call_kernel(x, weight)
    return not dispatches and fits(x, weight)


def silu_mul_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) (M, N), of x (M, K) and weight (2N, K), gate's rows before up's, which it `fits`."""
    (m, k), n = x.shape, len(weight) // 2
    y = x.new_empty(m, n)
    if m > MAX_ROWS:
        persistent_swiglu_gemm.silu_mul_linear(x, weight, y)
        return y

    tile = _tile(n, x)
    (w,), few, _ = operands((weight,), x, tile)
    pdl = uses_pdl(x)
    launches["gemm/swiglu"] += 1
    launch(
        _swiglu_gemm_kernel, cdiv(n, tile.m),
        y, few, w, weight, weight.stride(0), m, n, k, triton_dtype(x.dtype), tile.n, tile.m, tile.k, tile.stages,
        pdl, AHEAD if pdl else 0, num_warps=tile.warps, **pdl_option(pdl),
    )  # fmt: skip
    return y
