"""The first half of an MLP, ``silu(x @ gate.T) * (x @ up.T)``, in one launch (arXiv:2002.05202); here of few rows.

A program has the same columns of both products, which is one pass over the joined weights; BLAS and SwiGLU's kernel
are two launches, and write and read what is between them. Gate and up are rounded to the dtype before, and their
product once, as those two round them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.gemm import persistent_swiglu_gemm
from torch_fdattn.ops.gemm.small_m_gemm import (
    is_described,
    launch_by_columns,
    prefetch,
    store_columns,
    tile_for,
)
from torch_fdattn.ops.gemm.tile_product import ProductTile, has_large_shared_memory
from torch_fdattn.ops.launch import NUM_SMS, cdiv
from torch_fdattn.ops.library import INTERPRET, can_bypass_torch, launches
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
    store_columns(y_ptr, inner, first_column, m, n, BLOCK_M, BLOCK_N)


def _tile(columns: int, x: Tensor) -> ProductTile:
    """Two weights a stage in place of one; of 128 rows stages of two programs an SM, where there are as many."""
    tile = tile_for(len(x), x)
    if INTERPRET or not has_large_shared_memory(x.device):
        return tile
    if tile.n <= 64:
        return tile._replace(stages=4)
    return tile._replace(stages=5 if cdiv(columns, tile.m) <= NUM_SMS else 3)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `silu_mul_linear` can do it."""
    if len(weight) % 2 or not is_described(x, weight):
        return False
    return len(x) <= MAX_ROWS or persistent_swiglu_gemm.fits(x, weight)


def can_launch_directly(x: Tensor, weight: Tensor) -> bool:
    """Whether `silu_mul_linear` may stand for the two ops: its sizes fit, and no gradient, mode or autocast needs them."""
    return can_bypass_torch(x, weight) and fits(x, weight)


def silu_mul_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) (M, N), of x (M, K) and weight (2N, K), gate's rows before up's, which it `fits`."""
    n = len(weight) // 2
    y = x.new_empty(len(x), n)
    if len(x) > MAX_ROWS:
        persistent_swiglu_gemm.silu_mul_linear(x, weight, y)
        return y
    launches["gemm/swiglu"] += 1
    launch_by_columns(_swiglu_gemm_kernel, y, x, weight, _tile(n, x))
    return y
