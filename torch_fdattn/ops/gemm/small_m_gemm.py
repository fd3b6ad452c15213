"""Products of few rows, whose time is what it takes to read the weights once.

A program has some columns of y, for all rows: wgmma multiplies the weights, 64 columns at a time, by the rows, which are
the narrow side of the product, and loads run as far ahead as shared memory allows. No sums of parts: on an H100, 128
rows, a second trip through the L2 takes 6 µs, while 80 programs of whole sums read at 2.9 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.decode.one_byte import unquantised
from torch_fdattn.ops.gemm.tile_product import (
    ProductTile,
    describable,
    describes,
    has_large_shared_memory,
    operands,
    product,
    triton_dtype,
)
from torch_fdattn.ops.launch import cdiv, power_of_two
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: Blocks of features whose sum is added to others'.
SUMMED = tl.constexpr(4)


@triton.jit
def columns_product(
    x, w, first_column, m, n, k, x_stride, w_strides, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_M) fp32: the weight's rows from first_column on times all of x's; LAYOUT of `GemmOperands`."""
    if LAYOUT is None:
        rows, columns = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        none = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # A sum of sums: one of all features would round as often as there are features.
        for first in range(0, k, SUMMED * BLOCK_K):
            acc += product(
                none, x, w, rows, columns, m, n, first, tl.minimum(k, first + SUMMED * BLOCK_K), x_stride, w_strides[0],
                w_strides[1], EVEN_K, BLOCK_K, STAGES, PRECISION,
            )  # fmt: skip
        return tl.trans(acc)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for at in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            few = x.load([0, at]).T
            weights = unquantised(w.load([first_column, at]), few.dtype)
            acc = tl.dot(weights, few, acc, input_precision=PRECISION)
        return acc


@triton.jit
def prefetch(w_ptr, first_column, n, k, stride, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr):
    """Brings the first AHEAD bytes of the weight's rows from first_column on into the L2."""
    LINES: tl.constexpr = AHEAD // 128
    PER_LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    rows = first_column + tl.arange(0, BLOCK_N)
    at = tl.arange(0, LINES) * PER_LINE
    address = (
        w_ptr
        + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * stride
        + tl.minimum(at, k - 1)[None, :]
    )
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def store_columns(y_ptr, y, first_column, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes y (BLOCK_M, BLOCK_N) to the columns from first_column on of a matrix (m, n)."""
    rows, columns = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(y_ptr + at, y, mask=(rows < m)[:, None] & (columns < n)[None, :])


#: Bytes of a weight's row that a program asks for before the launch ahead of it has ended, which waits for the wire
#: meanwhile. Two H100, 128 rows: 1 KiB takes 0.4 to 0.9 µs less than none; 4 KiB 5 µs more where a device has places left.
AHEAD = 1024


def tile_for(rows: int, like: Tensor) -> ProductTile:
    """m: the weight's rows, which are y's columns; n: all rows of x. As many stages as fit into shared memory: 80
    programs on 132 SMs are the faster the more each of them has in flight, to the last one that fits.

    like: of the product's dtype and device.
    """
    n = max(16, power_of_two(rows))
    if INTERPRET:
        return ProductTile(16, n, 32, 4, 1)
    if like.dtype.itemsize > 2:
        return ProductTile(64, n, 32, 4, 3)
    tile = ProductTile(64, n, 128, 4, 6) if n <= 64 else ProductTile(64, n, 64, 4, 9)
    return tile if has_large_shared_memory(like.device) else smaller(tile)


def smaller(tile: ProductTile) -> ProductTile:
    """Of what is loaded by pointers, and for devices with less shared memory."""
    return tile if INTERPRET else tile._replace(k=min(tile.k, 64), stages=3)


def is_described(x: Tensor, weight: Tensor) -> bool:
    """Whether x (M, K) times weight (N, K) is a product of one 16-bit dtype, loaded by descriptors."""
    dtypes = (torch.float16,) if INTERPRET else (torch.float16, torch.bfloat16)
    return (
        (x.is_cuda or INTERPRET)
        and x.dtype == weight.dtype
        and x.device == weight.device
        and x.shape[1] == weight.shape[1]
        and x.dtype in dtypes
        and len(x) > 0
        and describes(x.device, x.dtype)
        and describable(x)
        and describable(weight)
    )


def launch_by_columns(kernel, y: Tensor, x: Tensor, weight: Tensor, tile: ProductTile) -> None:
    """A program for each tile.m columns of y (M, N), of x and weight that `is_described`; the weight's first bytes are
    asked for before the launch ahead has ended."""
    (m, k), n = x.shape, y.shape[1]
    (w,), few, _ = operands((weight,), x, tile)
    pdl = uses_pdl(x)
    launch(
        kernel, cdiv(n, tile.m),
        y, few, w, weight, weight.stride(0), m, n, k, triton_dtype(x.dtype), tile.n, tile.m, tile.k, tile.stages,
        pdl, AHEAD if pdl else 0, num_warps=tile.warps, **pdl_option(pdl),
    )  # fmt: skip
