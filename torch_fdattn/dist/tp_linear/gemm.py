"""The matrix product inside the fused kernels, and their tiles.

Shape legend: x (M, K), weight (N, K): y = x @ weight.T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torch_fdattn.ops.decode.kernel import unquantised
from torch_fdattn.ops.library import INTERPRET


class Tile(NamedTuple):
    """What one program computes at a time. group: tiles of M that follow each other, so that they share weights in
    the L2."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8


def tile_for(rows: int, columns: int, dtype: torch.dtype) -> Tile:
    """By what is equal on all ranks: where tiles are what travels, ranks must agree on them. Not measured yet."""
    if INTERPRET:
        return Tile(16, 16, 32, 4, 1, 2)
    if dtype.itemsize > 2:
        return Tile(64, 64, 32, 4, 3)
    if rows <= 64:
        return Tile(64, 128, 64, 4, 4)
    if rows * columns <= 132 * 128 * 128:
        return Tile(128, 128, 64, 8, 4)
    return Tile(128, 256, 64, 8, 4)


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
