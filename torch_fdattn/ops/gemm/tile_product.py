"""The matrix product inside the fused kernels, and their tiles.

Shape legend: x (M, K), weight (N, K): y = x @ weight.T.

Two ways to load: by pointers, whatever the strides; and by tensor descriptors (`GemmOperands`), where the device has an
engine that copies whole tiles: at 4096 rows the product takes 0.99 to 1.02 of BLAS so, 1.2 to 1.6 by pointers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torch_fdattn.ops.attention.configs import device_capability
from torch_fdattn.ops.decode.one_byte import unquantised
from torch_fdattn.ops.launch import NUM_SMS, cdiv
from torch_fdattn.ops.library import INTERPRET

#: The first compute capability with tensor descriptors in hardware, and the first after it with less shared memory.
_DESCRIPTORS, _SMALLER = (9, 0), (12, 0)
IS_INTERPRETED = tl.constexpr(INTERPRET)


class ProductTile(NamedTuple):
    """What one program computes at a time. group: tiles of M that follow each other, so that they share weights in
    the L2."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8


def tile_for(rows: int, columns: int, ranks: int, like: Tensor) -> ProductTile:
    """Of a product of ranks × rows; by what is equal on all ranks: where tiles are what travels, all ranks must have the same ones.

    like: of the product's dtype and device. Ranks with GPUs of several kinds do not come here (`unsupported_reason`).
    """
    if INTERPRET:
        return ProductTile(16, 16, 32, 4, 1, 2)
    if like.dtype.itemsize > 2:
        return ProductTile(64, 64, 32, 4, 3)
    if rows <= 64:
        return ProductTile(64, 128, 64, 4, 4)
    if (
        not has_large_shared_memory(like.device) or columns % 16
    ):  # stores that are not wide need registers, too
        return ProductTile(128, 128, 64, 8, 3)
    wide, narrow = ProductTile(128, 256, 64, 8, 4), ProductTile(128, 128, 64, 4, 4)

    def waves(tile: ProductTile) -> int:
        return cdiv(ranks * cdiv(rows, tile.m) * cdiv(columns, tile.n), NUM_SMS)

    # A narrow tile takes 0.57 of a wide one's time on an H100.
    return wide if waves(wide) <= 0.57 * waves(narrow) else narrow


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether programs have the shared memory and the descriptors of datacentre GPUs from sm_90 on."""
    return _DESCRIPTORS <= device_capability(device) < _SMALLER


class GemmOperands(NamedTuple):
    """What a kernel loads tiles from: tensors, or their descriptors.

    layout: None of tensors; of descriptors how the weight lies, by "rows" (N, K) or by "columns" (K, N).
    """

    xs: tuple[Any, ...]
    weight: Any
    layout: str | None


def operands(xs: tuple[Tensor, ...], weight: Tensor, tile: ProductTile) -> GemmOperands:
    """Of xs (M, K) with one weight (N, K): descriptors where the device, the dtype, strides and addresses allow it."""
    by_rows = weight.stride(1) == 1
    matrices = *xs, weight if by_rows else weight.t()
    if not describes(weight.device, weight.dtype) or not all(map(describable, matrices)):
        return GemmOperands(xs, weight, None)
    block = (tile.n, tile.k) if by_rows else (tile.k, tile.n)
    blocks = [*((tile.m, tile.k) for _ in xs), block]
    *of_xs, of_weight = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
        for x, block in zip(matrices, blocks, strict=True)
    )
    return GemmOperands(tuple(of_xs), of_weight, "rows" if by_rows else "columns")


def describes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this dtype are loaded by descriptors there, of matrices that are `describable`."""
    return INTERPRET or (device_capability(device) >= _DESCRIPTORS and dtype.itemsize == 2)


def describable(x: Tensor) -> bool:
    """Whether a matrix lies as a tensor descriptor needs it."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return aligned and x.stride(1) == 1 and x.stride(0) >= x.shape[1] > 0 and len(x) > 0


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Of the three that `one_sided.DTYPES` lists."""
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


@triton.jit
def grouped(tile, m_tiles, n_tiles, GROUP: tl.constexpr):
    """(tile of M, tile of N): GROUP tiles of M under one of N, then the next of N."""
    group = tile // (GROUP * n_tiles)
    height = tl.minimum(m_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * n_tiles)
    return group * GROUP + within % height, within // height


@triton.jit
def product(
    acc, x_ptr, w_ptr, m, n, M, N, first_k, K, x_stride, w_stride_n, w_stride_k, EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc (BM, BN), fp32, plus rows m (BM,) of x times rows n (BN,) of the weight, over features [first_k, K).

    x's features are contiguous. Weights in float8 are converted, not scaled. Rows beyond M and N give what nobody stores. EVEN_K: whole blocks of features.
    """
    k = first_k + tl.arange(0, BLOCK_K)
    # Beyond the end, the last row again: no mask, and aligned all the same.
    x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_ptrs = w_ptr + n.to(tl.int64)[None, :] * w_stride_n + k.to(tl.int64)[:, None] * w_stride_k
    n_in = (n < N)[None, :]
    for i in tl.range(0, tl.cdiv(K - first_k, BLOCK_K), num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs, mask=n_in, other=0.0)
        else:
            inside = k < K - i * BLOCK_K
            x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=inside[:, None] & n_in, other=0.0)
        acc = tl.dot(x, unquantised(w, x.dtype), acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * w_stride_k
    return acc


@triton.jit
def tile_product(
    bias_ptr, x, base, first_row, M, w, first_column, N, K, x_stride, w_strides, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x's rows from base + first_row on times the weight's from first_column on, plus the bias (N,), if any: fp32.

    x, w and LAYOUT of `GemmOperands`. M rows of x from `base` on count; what others give is to be stored nowhere.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    n = first_column + tl.arange(0, BLOCK_N)
    if LAYOUT is None:
        m = first_row + tl.arange(0, BLOCK_M)
        acc = product(
            acc, x + tl.cast(base, tl.int64) * x_stride, w, m, n, M, N, 0, K, x_stride, w_strides[0], w_strides[1],
            EVEN_K, BLOCK_K, STAGES, PRECISION,
        )  # fmt: skip
    else:
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            a = x.load([base + first_row, k])
            if LAYOUT == "rows":
                b = w.load([first_column, k]).T
            else:
                b = w.load([k, first_column])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def order_descriptors():
    """Loads by descriptors from here on see what ordinary ones saw before: the two are not ordered otherwise (PTX ISA,
    async proxy)."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], tl.int32, is_pure=False, pack=1
        )  # fmt: skip
