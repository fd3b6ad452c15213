"""``silu(x @ gate.T) * (x @ up.T)`` of many rows in one launch: neither product is written, nor read again
(arXiv:2002.05202).

A persistent program takes tile after tile, of the same columns of both products. One descriptor brings their weights:
gate and up lie one after the other, as a matrix (2, N, K), so both are one operand of 2 × 128 columns for wgmma.
`flatten` lets a tile's loads begin while the last one is stored.

One H100, eleven sizes from 2 × 3072 × 1024 to 2 × 28672 × 8192, 512 to 8192 rows: 0.80 to 0.99 of BLAS and SwiGLU's kernel
where the last wave of tiles is full (`swiglu.fills_waves`), up to 1.2 where it is not; six of them under load 0.89 to 0.98.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torch_fdattn.launch.device import num_sms
from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.gemm.tile_product import (
    ProductTile,
    grouped,
    has_large_shared_memory,
    triton_dtype,
)
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.swiglu import SWIGLU_TILE
from torch_fdattn.ops.swiglu_kernel import rounded_swiglu

#: n: columns of each of the two products. Groups of 16 tiles take 0.99 of the time of groups of 8 on an H100.
_TILE = (
    ProductTile(16, 16, 32, 4, 1, 2)
    if INTERPRET
    else ProductTile(SWIGLU_TILE, SWIGLU_TILE, 64, 8, 4, 16)
)


@triton.jit(do_not_specialize=["m"])
def _persistent_swiglu_gemm_kernel(
    y, x, w, m, n, k, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x (m, k), w (2, n, k) -> y (m, n), all by descriptors."""
    m_tiles, n_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = grouped(tile, m_tiles, n_tiles, GROUP)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for at in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            both = tl.reshape(w.load([0, column, at]), [2 * BLOCK_N, BLOCK_K])
            acc = tl.dot(x.load([row, at]), both.T, acc, input_precision="ieee")
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
        y.store([row, column], rounded_swiglu(gate, up, DTYPE))


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `silu_mul_linear` can do it; the rest `swiglu_gemm.fits` asks for."""
    row_bytes = len(weight) // 2 * x.element_size()  # of the result, which a descriptor stores
    return row_bytes % 16 == 0 and (INTERPRET or has_large_shared_memory(x.device))


def silu_mul_linear(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Writes silu(x @ gate.T) * (x @ up.T) into y (M, N), rows contiguous, of x (M, K) and weight (2N, K), gate's rows
    before up's, which it `fits`."""
    (m, k), n, tile = x.shape, len(weight) // 2, _TILE
    launches["gemm/persistent_swiglu"] += 1
    of_weight = [n * weight.stride(0), weight.stride(0), 1]
    launch(
        _persistent_swiglu_gemm_kernel, min(num_sms(x.device), cdiv(m, tile.m) * cdiv(n, tile.n)),
        TensorDescriptor(y, [m, n], [y.stride(0), 1], [tile.m, tile.n]),
        TensorDescriptor(x, [m, k], [x.stride(0), 1], [tile.m, tile.k]),
        TensorDescriptor(weight, [2, n, k], of_weight, [2, tile.n, tile.k]),
        m, n, k, triton_dtype(x.dtype), tile.m, tile.n, tile.k, tile.stages, tile.group, num_warps=tile.warps,
    )  # fmt: skip
