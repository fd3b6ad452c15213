"""minimal: FlashAttention in one loop, with the simplest causal mask.

Mapping  One program for BLOCK_M query tokens of one head: grid (query tiles, H, B). It keeps its queries,
         walks over all N keys in tiles of BLOCK_N, and writes its BLOCK_M rows of the output once.
         Query head h reads KV head h // group.
Adds     The online softmax (arXiv:1805.02867): of each row only the running maximum, the running sum and
         the running output are kept. When a tile raises the maximum, what was summed is scaled down.
Gains    Scores live in registers: memory traffic falls from O(T · N) to Q, K, V and O.
Leaves   Tiles above the diagonal are loaded, computed and thrown away: half of a prompt's work. Every
         tile pays for the mask. One new token gives H programs, each walking the whole cache alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def _minimal_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_strides, k_strides, v_strides, out_strides,
    q_len, kv_len, group, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + head // group * k_strides[1]
    v_ptr += batch * v_strides[0] + head // group * v_strides[1]
    out_ptr += batch * out_strides[0] + head * out_strides[1]

    rows_in = (token < q_len)[:, None]
    q = tl.load(q_ptr + token[:, None] * q_strides[2] + d, mask=rows_in, other=0.0)
    last = kv_len - q_len + token  # the last key each row sees: queries are the last tokens
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    for start in range(0, kv_len, BLOCK_N):
        keys_in = (start + key < kv_len)[:, None]
        k = tl.load(k_ptr + (start + key)[:, None] * k_strides[2] + d, mask=keys_in, other=0.0)
        v = tl.load(v_ptr + (start + key)[:, None] * v_strides[2] + d, mask=keys_in, other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale
        scores = tl.where((start + key)[None, :] <= last[:, None], scores, float("-inf"))
        # Every row sees key 0, so its maximum is finite from the first tile on.
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp(scores - new_max[:, None])
        shrink = tl.exp(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")

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
    _minimal_kernel[(triton.cdiv(q_len, block_m), heads, batch)](
        q, k, v, out, q.stride(), k.stride(), v.stride(), out.stride(), q_len, kv_len,
        heads // kv_heads, dim**-0.5 if scale is None else scale,
        D=dim, BLOCK_M=block_m, BLOCK_N=block_n, num_stages=1,
    )  # fmt: skip
    return out
