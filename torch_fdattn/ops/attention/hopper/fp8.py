"""Attention forward of float8_e4m3fn on Hopper: values are transposed first, and then it is the same kernel.

Products of 8 bits need the summed dim next to each other in both operands (PTX ISA, wgmma): of values, the keys. The
transposing kernel reads and writes each value once, which at 16k keys is 3 % of the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.attention.hopper.launch import forward_launch
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.tiles import program_coordinates

_KEYS, _COLUMNS = 128, 64  # of a program


def fp8_launches(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    options: AttentionOptions, out: Tensor, lse: Tensor, counter: Tensor,
) -> tuple[Launch, Launch]:  # fmt: skip
    """As `forward_launch`, of float8_e4m3fn.

    q_scale: fp32 (B, H), k_scale and v_scale: fp32 (B, H_kv), contiguous: what stored numbers are multiplied by.
    """
    batch, kv_heads, capacity, head_dim = v.shape
    turned = v.new_empty(batch, kv_heads, head_dim, cdiv(capacity, _KEYS) * _KEYS)
    scales = q_scale, k_scale, v_scale
    return (
        _transposing_launch(v, options.mask.kv_lens, turned),
        forward_launch(q, k, turned, options, out, lse, counter, scales=scales),
    )


def _transposing_launch(v: Tensor, kv_lens: Tensor | None, turned: Tensor) -> Launch:
    batch, kv_heads, capacity, head_dim = v.shape
    programs = cdiv(capacity, _KEYS) * cdiv(head_dim, _COLUMNS) * batch * kv_heads
    return Launch(
        transposing_kernel, programs, v.view(torch.uint8), turned.view(torch.uint8), kv_lens, v.stride(),
        kv_heads, capacity, head_dim, KEYS=_KEYS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["kv_heads", "capacity"])
def transposing_kernel(
    v_ptr, turned_ptr, kv_lens_ptr, v_strides, kv_heads, capacity, head_dim,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """turned[b, h, :, i] = v[b, h, key of i, :], and 0 beyond the length of b.

    A thread of the forward holds weights of keys 8 i + 2 j + l, i and l of 0 and 1, next to each other (`rows.as_operand`):
    their values come at 4 j + 2 i + l.
    """
    blocks = tl.cdiv(capacity, KEYS)
    block, part, head = program_coordinates(blocks, tl.cdiv(head_dim, COLUMNS))
    batch = head // kv_heads
    length = capacity
    if kv_lens_ptr is not None:
        length = tl.minimum(length, tl.maximum(tl.load(kv_lens_ptr + batch), 0)).to(tl.int32)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    place = block * KEYS + tl.arange(0, KEYS)
    key = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    v_ptr += batch.to(tl.int64) * v_strides[0] + (head % kv_heads).to(tl.int64) * v_strides[1]
    found = tl.load(
        v_ptr
        + key.to(tl.int64)[None, :] * v_strides[2]
        + columns.to(tl.int64)[:, None] * v_strides[3],
        mask=(key < length)[None, :] & (columns < head_dim)[:, None],
        other=0,
    )
    turned_ptr += head.to(tl.int64) * head_dim * (blocks * KEYS)
    rows = turned_ptr + columns.to(tl.int64)[:, None] * (blocks * KEYS)
    tl.store(rows + place[None, :], found, mask=(columns < head_dim)[:, None])
