"""fdm: flash-decode, the keys shared out over programs.

Mapping  One program for BLOCK_M packed rows of one KV head and one share of the keys: grid (splits, row
         tiles, B · H_kv). Row r is token r // group, query head r % group of that KV head: the heads of a
         group lie in one tile, next to each other, and the tokens of a tile are neighbours.
Adds     1. Split keys (Flash-Decoding): a share's output and its log-sum-exp are written to memory, and a
            second kernel adds the shares up, each weighed by exp2(lse - largest lse). Softmax over all keys
            is exactly that sum, in whatever order the shares were done.
         2. Packed heads: K and V are read once for the whole group instead of once a query head.
         3. The double buffer of v2, by the compiler: num_stages.
Gains    One new token gives splits · H_kv programs instead of H, as many as fit on the GPU, each with
         a short piece of the cache: decode is then bound by what memory can deliver and not by how fast one
         program walks. A long prompt has programs enough; there splits is 1, and the output is written at
         once, with no second kernel.
Leaves   The partial results are written and read, 4 · (D + 1) bytes a share and row, and there is a second
         launch. Prompts want what today's GPUs have for matmuls (TMA, warp specialization): see
         torch_fdattn/ops/attention. Ragged batches and paged caches: torch_fdattn/ops/decode.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 64


@triton.jit
def _step(
    acc, row_max, row_sum, q, k_ptr, v_ptr, k_stride, v_stride, start, kv_len, last, scale_log2,
    BORDER: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the running (acc, row_max, row_sum); maxima are in units of log2."""
    key = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    inside = (key < kv_len)[:, None] if BORDER else None
    other = 0.0 if BORDER else None
    k = tl.load(k_ptr + key[:, None] * k_stride + d, mask=inside, other=other)
    v = tl.load(v_ptr + key[:, None] * v_stride + d, mask=inside, other=other)
    scores = tl.dot(q, k.T, input_precision="ieee")
    if BORDER:
        scores = tl.where(key[None, :] <= last[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # New: a share may hold no key that a row sees. Its maximum is then -inf, and -inf - -inf is NaN.
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores * scale_log2 - safe_max[:, None])
    shrink = tl.exp2(row_max - safe_max)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, new_max, row_sum * shrink + tl.sum(p, 1)


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def _split_kernel(
    q_ptr, k_ptr, v_ptr, outs_ptr, lses_ptr,
    q_strides, k_strides, v_strides, outs_strides, lses_strides,
    q_len, kv_len, kv_heads, group, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split, kv_head = tl.program_id(0), tl.program_id(2) % kv_heads
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // group, kv_head * group + row % group
    d = tl.arange(0, D)
    k_ptr += batch * k_strides[0] + kv_head * k_strides[1]
    v_ptr += batch * v_strides[0] + kv_head * v_strides[1]

    rows_in = token < q_len
    q_ptr += batch * q_strides[0]
    q_rows = head * q_strides[1] + token * q_strides[2]
    q = tl.load(q_ptr + q_rows[:, None] + d, mask=rows_in[:, None], other=0.0)
    last = kv_len - q_len + token
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    first_token = tl.program_id(1) * BLOCK_M // group
    last_token = (tl.program_id(1) * BLOCK_M + BLOCK_M - 1) // group
    end = tl.minimum(kv_len, kv_len - q_len + last_token + 1)
    # Its share, in whole tiles: empty (low >= high) where the shares before took everything.
    share = tl.cdiv(tl.cdiv(end, BLOCK_N), tl.num_programs(0)) * BLOCK_N
    low = split * share
    high = tl.minimum(low + share, end)
    whole = (kv_len - q_len + first_token + 1) // BLOCK_N * BLOCK_N
    whole = tl.maximum(tl.minimum(whole, high), low)
    for start in range(low, whole, BLOCK_N):
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, k_ptr, v_ptr, k_strides[2], v_strides[2], start, kv_len, last,
            scale_log2, False, D, BLOCK_N,
        )  # fmt: skip
    for start in range(whole, high, BLOCK_N):
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, k_ptr, v_ptr, k_strides[2], v_strides[2], start, kv_len, last,
            scale_log2, True, D, BLOCK_N,
        )  # fmt: skip

    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    out = (acc / row_sum[:, None]).to(outs_ptr.dtype.element_ty)
    lse = tl.where(empty, float("-inf"), row_max + tl.log2(row_sum))
    outs_ptr += split.to(tl.int64) * outs_strides[0] + batch * outs_strides[1]
    lses_ptr += split.to(tl.int64) * lses_strides[0] + batch * lses_strides[1]
    out_rows = head * outs_strides[2] + token * outs_strides[3]
    tl.store(outs_ptr + out_rows[:, None] + d, out, mask=rows_in[:, None])
    tl.store(lses_ptr + head * lses_strides[2] + token * lses_strides[3], lse, mask=rows_in)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    outs_ptr, lses_ptr, out_ptr, outs_strides, lses_strides, out_strides, splits,
    D: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program adds up the shares of one row: grid (T, H, B)."""
    token, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    split = tl.arange(0, MAX_SPLITS).to(tl.int64)
    d = tl.arange(0, D)
    lses_ptr += batch * lses_strides[1] + head * lses_strides[2] + token * lses_strides[3]
    outs_ptr += batch * outs_strides[1] + head * outs_strides[2] + token * outs_strides[3]
    out_ptr += batch * out_strides[0] + head * out_strides[1] + token * out_strides[2]

    inside = split < splits
    lse = tl.load(lses_ptr + split * lses_strides[0], mask=inside, other=float("-inf"))
    # The maximum is finite: the first share holds key 0, which every row sees.
    weight = tl.exp2(lse - tl.max(lse, 0))
    outs = tl.load(outs_ptr + split[:, None] * outs_strides[0] + d, mask=inside[:, None], other=0.0)
    out = tl.sum(weight[:, None] * outs, 0) / tl.sum(weight, 0)
    tl.store(out_ptr + d, out.to(out_ptr.dtype.element_ty))


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
    group = heads // kv_heads
    # fp32 dots are done in ordinary registers, and want small tiles.
    fp32 = q.element_size() == 4
    block_m, block_n = 16 if q_len * group <= 16 or fp32 else 64, 16 if fp32 else 64
    tiles = triton.cdiv(q_len * group, block_m)

    # Two programs for each SM, none without a tile of its own.
    splits = 2 * _processors(q.device) // (tiles * batch * kv_heads)
    splits = max(1, min(splits, triton.cdiv(kv_len, block_n), MAX_SPLITS))
    parts = dict(dtype=torch.float32, device=q.device)
    lses = torch.empty((splits, batch, heads, q_len), **parts)
    outs = torch.empty((splits, *q.shape), **parts) if splits > 1 else out[None]
    scale = dim**-0.5 if scale is None else scale
    _split_kernel[(splits, tiles, batch * kv_heads)](
        q, k, v, outs, lses, q.stride(), k.stride(), v.stride(), outs.stride(), lses.stride(),
        q_len, kv_len, kv_heads, group, scale * math.log2(math.e),
        D=dim, BLOCK_M=block_m, BLOCK_N=block_n, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(q_len, heads, batch)](
            outs, lses, out, outs.stride(), lses.stride(), out.stride(), splits,
            D=dim, MAX_SPLITS=MAX_SPLITS,
        )  # fmt: skip
    return out


def _processors(device: torch.device) -> int:
    """SMs of a GPU; a few for the interpreter, so that it splits too."""
    if device.type == "cpu":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
