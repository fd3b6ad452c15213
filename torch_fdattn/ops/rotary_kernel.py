"""RMSNorm of heads and rotary positions, of q and k in one launch.

A program has a token and some of its heads, of q or of k: the angles are read once for them all. Norms are those of
torch's own kernel, fp32 and rounded to the dtype once (Zhang and Sennrich 2019); the rotation is fp32, rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.launch import cdiv, power_of_two
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: Elements of a program at most, but for one head: a load of 16 bytes a thread for each half.
_ELEMENTS = 2048


@triton.jit
def _turn_heads(
    x_ptr, strides, out_ptr, weight_ptr, eps, cos, sin, batch, token, tokens, heads, first,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Heads from `first` on of one token: x by strides of batch, token and head, out (B, T, heads, 2 HALF)."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    head, d = (first + tl.arange(0, BLOCK_H))[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (head < heads) & (d < HALF)
    at = x_ptr + batch * strides[0] + token * strides[1] + head * strides[2] + d
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        mean = tl.sum(low * low + high * high, 1) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        of_low = tl.load(weight_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
        of_high = tl.load(weight_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        low = (low * scale * of_low).to(dtype).to(tl.float32)
        high = (high * scale * of_high).to(dtype).to(tl.float32)
    to = out_ptr + ((batch * tokens + token) * heads + head) * (2 * HALF) + d
    tl.store(to, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(to + HALF, (high * cos + low * sin).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def _norm_rotate_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, eps, q_strides, k_strides,
    angle_strides, tokens, q_heads, k_heads, q_blocks, blocks,
    HALF: tl.constexpr, PDL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norms where there are weights; cos and sin by strides of batch and token."""
    await_previous(PDL)
    pdl_trigger(PDL)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    batch, token = row // tokens, row % tokens
    d = tl.arange(0, BLOCK_D)
    angles = batch * angle_strides[0] + token * angle_strides[1] + d
    cos = tl.load(cos_ptr + angles, mask=d < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angles, mask=d < HALF, other=0.0)[None, :]
    if block < q_blocks:
        _turn_heads(
            q_ptr, q_strides, q_out_ptr, q_weight_ptr, eps, cos, sin, batch, token, tokens, q_heads, block * BLOCK_H,
            HALF, BLOCK_H, BLOCK_D,
        )  # fmt: skip
    else:
        _turn_heads(
            k_ptr, k_strides, k_out_ptr, k_weight_ptr, eps, cos, sin, batch, token, tokens, k_heads,
            (block - q_blocks) * BLOCK_H, HALF, BLOCK_H, BLOCK_D,
        )  # fmt: skip


def launch_norm_rotate(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None,
    k_weight: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """q (B, T, H, D) and k (B, T, K, D) into q_out and k_out, contiguous; cos, sin (B or 1, 1, T, D / 2) of one
    layout; elements of heads and angles follow each other."""
    batch, tokens, q_heads, dims = q.shape
    k_heads, half = k.shape[2], dims // 2
    block_d = power_of_two(half)
    block_h = power_of_two(min(max(q_heads, k_heads), max(1, _ELEMENTS // (2 * block_d))))
    q_blocks = cdiv(q_heads, block_h)
    blocks = q_blocks + cdiv(k_heads, block_h)
    pdl = uses_pdl(q)
    of_batch = cos.stride(0) if cos.shape[0] > 1 else 0
    # None at the end, for the reason in `launch.kernel_options`.
    q_strides, k_strides = ((*x.stride()[:3], None) for x in (q, k))
    launch(
        _norm_rotate_kernel, batch * tokens * blocks,
        q, k, q_out, k_out, cos, sin, q_weight, k_weight, eps, q_strides, k_strides,
        (of_batch, cos.stride(2), None), tokens, q_heads, k_heads, q_blocks, blocks, half, pdl, block_h, block_d, num_warps=4,
        **pdl_option(pdl),
    )  # fmt: skip
