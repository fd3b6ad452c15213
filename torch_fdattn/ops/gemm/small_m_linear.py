"""``x @ weight.T`` of up to 16 rows in one launch, where BLAS's kernels are made for many.

Up to 16 rows are one side of one tile, so a row's bits depend neither on the other rows nor on how many there are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.gemm.small_m_gemm import (
    columns_product,
    is_described,
    launch_by_columns,
    prefetch,
    store_columns,
    tile_for,
)
from torch_fdattn.ops.inference_linear import MAX_ROWS
from torch_fdattn.ops.library import launches


@triton.jit(do_not_specialize=["m"])
def _small_m_linear_kernel(
    y_ptr, x, w, w_ptr, w_stride, m, n, k, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """x (m, k), w (n, k), by descriptors -> y (m, n); m at most BLOCK_M."""
    first_column = tl.program_id(0) * BLOCK_N
    if AHEAD:
        prefetch(w_ptr, first_column, n, k, w_stride, BLOCK_N, AHEAD)
    await_previous(PDL)
    acc = columns_product(
        x, w, first_column, m, n, k, None, None, "rows", None, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, "ieee"
    )  # fmt: skip
    pdl_trigger(PDL)
    store_columns(y_ptr, tl.trans(acc).to(DTYPE), first_column, m, n, BLOCK_M, BLOCK_N)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `small_m_linear` can do it."""
    return len(x) <= MAX_ROWS and is_described(x, weight)


def small_m_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T (M, N), of x (M, K) and weight (N, K), which it `fits`."""
    y = x.new_empty(len(x), len(weight))
    launches["gemm/small_m_linear"] += 1
    launch_by_columns(_small_m_linear_kernel, y, x, weight, tile_for(len(x), x))
    return y
