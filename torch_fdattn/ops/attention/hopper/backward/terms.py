"""What the sweeps of Hopper's backward need of each row of queries: lse in log2, and delta."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.attention.backward_rows import PADDING, _row_terms_kernel
from torch_fdattn.ops.attention.hopper.backward.tiles import QUERIES

_NUMBERS_OF_A_PROGRAM = 8192


def terms_launch(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, rows: tuple[Tensor, Tensor], dim: int,
    packed: dict | None = None,
) -> Launch:  # fmt: skip
    """dim: the head dim, padded; packed: `packed.kernel_arguments`."""
    batch, heads, q_len, head_dim = out.shape
    lse2, delta = rows
    padded_len, block = lse2.shape[2], _NUMBERS_OF_A_PROGRAM // dim
    assert PADDING.value % block == 0
    return Launch(
        _row_terms_kernel, padded_len // block * heads * batch,
        out, dout, lse, dlse, lse2, delta, out.stride(), dout.stride(), q_len, padded_len, heads, head_dim,
        BLOCK_M=block, BLOCK_DV=dim, also=packed or {},
    )  # fmt: skip


def described_terms(x: Tensor) -> TensorDescriptor:
    """Of lse2 or delta: 64 rows of a head, whose rows are padded to more."""
    assert PADDING.value % QUERIES.value == 0
    layout = gl.NVMMASharedLayout(0, 32, 1)
    return TensorDescriptor(x, [x.numel()], [1], [QUERIES.value], layout)
