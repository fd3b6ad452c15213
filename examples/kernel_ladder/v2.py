"""v2: software-pipelined, with two buffers for K and V.

Mapping  As minimal-v2: one program for BLOCK_M query tokens of one head, grid (query tiles, H, B).
Adds     A double buffer: the loads of the next K and V tile are issued before this tile is computed, and
         waited for only when the loop comes round.
Gains    The latency of memory hides behind the matmuls and exponentials instead of
         standing between them. That is most where few programs share an SM, as in decode: there
         nobody else computes in the meantime.
Leaves   The second buffer takes registers, hence fewer programs fit. A new token still gives H programs.

Two ways to write it. Here the second buffer is written out: `k, v` and `next_k, next_v` are registers, and a
load delays nobody until its registers are read. The other way is one word, `tl.range(low, high, BLOCK_N,
num_stages=2)`, or num_stages at the launch for every loop: the compiler then makes a ring of that many buffers
in shared memory and fills it with asynchronous copies (LDGSTS in the machine code, in place of LDG and STS),
which take no registers but need a GPU that has them, Ampere or later. fdm does it that way.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _load(k_ptr, v_ptr, k_stride, v_stride, start, end, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """The K and V tiles from `start` on; zero, and not read, from `end` on."""
    key = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    inside = (key < end)[:, None]
    k = tl.load(k_ptr + key[:, None] * k_stride + d, mask=inside, other=0.0)
    v = tl.load(v_ptr + key[:, None] * v_stride + d, mask=inside, other=0.0)
    return k, v


@triton.jit
def _step(acc, row_max, row_sum, q, k, v, start, last, scale_log2, BORDER: tl.constexpr):
    """Adds one tile of keys to the running (acc, row_max, row_sum); maxima are in units of log2."""
    scores = tl.dot(q, k.T, input_precision="ieee")
    if BORDER:
        key = start + tl.arange(0, k.shape[0])
        scores = tl.where(key[None, :] <= last[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, new_max, row_sum * shrink + tl.sum(p, 1)


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def _v2_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_strides, k_strides, v_strides, out_strides,
    q_len, kv_len, group, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // group * k_strides[1]
    v_ptr += batch * v_strides[0] + head // group * v_strides[1]
    out_ptr += batch * out_strides[0] + head * out_strides[1]

    rows_in = (token < q_len)[:, None]
    q = tl.load(q_ptr + token[:, None] * q_strides[2] + d, mask=rows_in, other=0.0)
    last = kv_len - q_len + token
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    first_token = tl.program_id(0) * BLOCK_M
    # Keys before `whole` are in tiles that all tokens see whole; from `end` on the last one sees none.
    whole = (kv_len - q_len + first_token + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(kv_len, kv_len - q_len + first_token + BLOCK_M)
    k, v = _load(k_ptr, v_ptr, k_strides[2], v_strides[2], 0, end, D, BLOCK_N)
    for start in range(0, whole, BLOCK_N):
        next_k, next_v = _load(
            k_ptr, v_ptr, k_strides[2], v_strides[2], start + BLOCK_N, end, D, BLOCK_N
        )
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, k, v, start, last, scale_log2, False
        )
        k, v = next_k, next_v
    for start in range(whole, end, BLOCK_N):
        next_k, next_v = _load(
            k_ptr, v_ptr, k_strides[2], v_strides[2], start + BLOCK_N, end, D, BLOCK_N
        )
        acc, row_max, row_sum = _step(acc, row_max, row_sum, q, k, v, start, last, scale_log2, True)
        k, v = next_k, next_v

    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token[:, None] * out_strides[2] + d, out, mask=rows_in)


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
    scale = dim**-0.5 if scale is None else scale
    _v2_kernel[(triton.cdiv(q_len, block_m), heads, batch)](
        q, k, v, out, q.stride(), k.stride(), v.stride(), out.stride(), q_len, kv_len,
        heads // kv_heads, scale * math.log2(math.e),
        D=dim, BLOCK_M=block_m, BLOCK_N=block_n, num_stages=1,
    )  # fmt: skip
    return out
