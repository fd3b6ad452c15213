"""v1: the head dim shared out over programs.

Mapping  One program for BLOCK_M query tokens, one head and BLOCK_D of the D columns of V: grid (query tiles
         · D / BLOCK_D, H, B). Programs of one query tile are neighbours, so that the K tiles which one has
         read are in the L2 for the next.
Adds     Parallelism over the head dim: each program computes whole scores (they need every column of Q
         and K), but sums only its own columns of P·V and writes only those of the output.
Gains    D / BLOCK_D times as many programs, where minimal has too few to fill a GPU (a new token: one a
         head), and an accumulator that is as many times smaller.
Leaves   K is read, and the scores are computed, D / BLOCK_D times over. Where there were programs enough,
         as in a long prompt, that is a loss: a dimension that the work is summed over is a poor one to share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def _v1_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_strides, k_strides, v_strides, out_strides,
    q_len, kv_len, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    slices: tl.constexpr = D // BLOCK_D
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) // slices * BLOCK_M + tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    own = tl.program_id(0) % slices * BLOCK_D + tl.arange(0, BLOCK_D)  # its columns of V and out
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // group * k_strides[1]
    v_ptr += batch * v_strides[0] + head // group * v_strides[1]
    out_ptr += batch * out_strides[0] + head * out_strides[1]

    rows_in = (token < q_len)[:, None]
    q = tl.load(q_ptr + token[:, None] * q_strides[2] + d, mask=rows_in, other=0.0)
    last = kv_len - q_len + token
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for start in range(0, kv_len, BLOCK_N):
        keys_in = (start + key < kv_len)[:, None]
        k = tl.load(k_ptr + (start + key)[:, None] * k_strides[2] + d, mask=keys_in, other=0.0)
        v = tl.load(v_ptr + (start + key)[:, None] * v_strides[2] + own, mask=keys_in, other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale
        scores = tl.where((start + key)[None, :] <= last[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp(scores - new_max[:, None])
        shrink = tl.exp(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")

    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token[:, None] * out_strides[2] + own, out, mask=rows_in)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of the last T of N tokens: q (B, H, T, D), k and v (B, H_kv, N, D) -> like q."""
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    if dim not in (16, 32, 64, 128):
        raise ValueError(f"head_dim must be a power of two from 16 to 128, got {dim}")
    if heads % kv_heads or q_len > kv_len or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        raise ValueError(
            "needs H a multiple of H_kv, T <= N and unit last strides, got "
            f"{q.shape} and {k.shape}, strides {q.stride()}, {k.stride()} and {v.stride()}"
        )
    out = torch.empty_like(q)
    # fp32 dots are done in ordinary registers, and want small tiles.
    fp32 = q.element_size() == 4
    block_m, block_n = 16 if q_len <= 16 or fp32 else 64, 16 if fp32 else 64
    block_d = min(dim, 32)
    _v1_kernel[(triton.cdiv(q_len, block_m) * (dim // block_d), heads, batch)](
        q, k, v, out, q.stride(), k.stride(), v.stride(), out.stride(), q_len, kv_len,
        heads // kv_heads, dim**-0.5 if scale is None else scale,
        D=dim, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_N=block_n, num_stages=1,
    )  # fmt: skip
    return out
