"""SwiGLU's product, ``silu(gate) * up``, in one pass without gradients (arXiv:2002.05202)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.ops.launch import NUM_SMS
from torch_fdattn.ops.library import INTERPRET, can_call_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: (rows from, to, inner features at least, features at least) of which a product with SwiGLU in its own launch takes less
#: time than BLAS and SwiGLU's. One H100, thirteen sizes from 2 × 3072 × 1024 to 2 × 25600 × 5120: 1 to 64 rows 0.81 to
#: 0.99; 128 rows 0.90 to 0.99 from 5120 inner features on, to 1.09 below and with 1536 features; 96 rows, for which BLAS
#: has tiles, 0.94 to 1.11.
IN_PRODUCT = ((1, 64, 3072, 1024), (113, 128, 5120, 4096))
#: (rows, inner features, features) from which on products by tiles take less, where `fills_waves` (`gemm/persistent_swiglu_gemm.py`).
BY_TILES = (512, 3072, 1024)
#: Rows of such a tile, and columns of each of its products.
SWIGLU_TILE = 128
#: How much of all waves of tiles must be tiles.
_FULL = 0.95


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` for two tensors (…, N) of one shape and dtype, contiguous.

    On GPUs and without gradients one kernel, which rounds once; elsewhere PyTorch's two, which round twice.
    """
    if torch.compiler.is_compiling() or not can_call_kernel(gate, up) or not _fits(gate, up):
        return F.silu(gate) * up
    from torch_fdattn.ops.swiglu_kernel import launch_silu_mul  # imports triton

    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    launch_silu_mul(gate, up, out, _row(gate), _row(up))
    return out


def is_better_in_product(rows: int, inner: int, features: int) -> bool:
    """Whether (rows, features) @ (features, 2 × inner) and SwiGLU are faster as one launch (`ops/gemm/swiglu_gemm.py`)."""
    few = any(
        first <= rows <= last and inner >= least and features >= deep
        for first, last, least, deep in IN_PRODUCT
    )
    return few or is_better_by_tiles((rows,), inner, features)


def is_better_by_tiles(chunks: Sequence[int], inner: int, features: int) -> bool:
    """`is_better_in_product`, of many rows, in so many launches of so many rows each."""
    sizes = sum(chunks), inner, features
    many = all(size >= least for size, least in zip(sizes, BY_TILES, strict=True))
    return many and fills_waves(chunks, inner)


def fills_waves(chunks: Sequence[int], inner: int) -> bool:
    """Whether hardly an SM is idle while the last tiles are multiplied, by launches of at least a wave on average."""
    across = -(-inner // SWIGLU_TILE)
    tiles = across * sum(-(-rows // SWIGLU_TILE) for rows in chunks)
    waves = -(-tiles // NUM_SMS)
    # What chunks fill up to whole tiles is work for nothing.
    needed = across * sum(chunks) / SWIGLU_TILE
    full = tiles >= _FULL * waves * NUM_SMS and needed >= _FULL * tiles
    return full and waves > 1 and tiles >= len(chunks) * NUM_SMS


def _fits(gate: Tensor, up: Tensor) -> bool:
    dtypes = (torch.float16, torch.float32) if INTERPRET else DTYPES
    return (
        (gate.is_cuda or INTERPRET)
        and gate.shape == up.shape
        and gate.dtype == up.dtype
        and gate.device == up.device
        and gate.dtype in dtypes
        and gate.numel() > 0
        and _row(gate) is not None
        and _row(up) is not None
    )


def _row(x: Tensor) -> int | None:
    """The stride of rows of a tensor whose rows are contiguous and follow each other evenly, else None."""
    if x.dim() < 1 or x.stride(-1) != 1:
        return None
    # Sizes of 1 may have any stride.
    dims = [pair for pair in zip(x.shape[:-1], x.stride(), strict=False) if pair[0] > 1]
    for (_, outer), (size, inner) in itertools.pairwise(dims):
        if outer != size * inner:
            return None
    return dims[-1][1] if dims else x.shape[-1]
