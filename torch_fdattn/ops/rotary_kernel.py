"""RMSNorm of heads and rotary positions, of q and k in one launch, which stores k and v in a paged cache where it is given one.

A program has a token and some of its heads, of q or of k: the angles are read once for them all. Norms are those of
torch's own kernel, fp32 and rounded to the dtype once (Zhang and Sennrich 2019); the rotation is fp32, rounded once.
Programs of k copy the same heads of v into the cache.
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
    x_row, head_stride, out_row, out_stride, weight_ptr, eps, cos, sin, heads, first, kept,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Heads from `first` on of one token, x and out from the token's first element on; kept: whether out is written."""
    dtype: tl.constexpr = x_row.dtype.element_ty
    head, d = (first + tl.arange(0, BLOCK_H))[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (head < heads) & (d < HALF)
    at = x_row + head * head_stride + d
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        mean = tl.sum(low * low + high * high, 1) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        of_low = tl.load(weight_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
        of_high = tl.load(weight_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        low = (low * scale * of_low).to(dtype).to(tl.float32)
        high = (high * scale * of_high).to(dtype).to(tl.float32)
    to = out_row + head * out_stride + d
    tl.store(to, (low * cos - high * sin).to(dtype), mask=inside & kept)
    tl.store(to + HALF, (high * cos + low * sin).to(dtype), mask=inside & kept)


@triton.jit
def _copy_heads(
    x_row, head_stride, out_row, out_stride, heads, first, kept,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_turn_heads` that turns nothing."""
    head, d = (first + tl.arange(0, BLOCK_H))[:, None], tl.arange(0, 2 * BLOCK_D)[None, :]
    inside = (head < heads) & (d < 2 * HALF) & kept
    x = tl.load(x_row + head * head_stride + d, mask=inside)
    tl.store(out_row + head * out_stride + d, x, mask=inside)


@triton.jit(do_not_specialize=["eps"])
def _norm_rotate_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, v_out_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, pages_ptr, slots_ptr,
    eps, q_strides, k_strides, v_strides, k_out_strides, v_out_strides, angle_strides,
    tokens, q_heads, k_heads, q_blocks, blocks,
    HALF: tl.constexpr, PDL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norms where there are weights; cos and sin by strides of batch and token; v is None, or k and it are stored."""
    await_previous(PDL)
    pdl_trigger(PDL)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    batch, token = row // tokens, row % tokens
    d = tl.arange(0, BLOCK_D)
    angles = batch * angle_strides[0] + token * angle_strides[1] + d
    cos = tl.load(cos_ptr + angles, mask=d < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angles, mask=d < HALF, other=0.0)[None, :]
    if block < q_blocks:
        q_row = q_ptr + batch * q_strides[0] + token * q_strides[1]
        _turn_heads(
            q_row, q_strides[2], q_out_ptr + row * q_heads * (2 * HALF), 2 * HALF, q_weight_ptr, eps, cos, sin, q_heads,
            block * BLOCK_H, True, HALF, BLOCK_H, BLOCK_D,
        )  # fmt: skip
    else:
        first = (block - q_blocks) * BLOCK_H
        k_row = k_ptr + batch * k_strides[0] + token * k_strides[1]
        if v_ptr is None:
            k_to, kept = k_out_ptr + row * k_out_strides[1], True
        else:
            page = tl.load(pages_ptr + row).to(tl.int64)
            slot = tl.load(slots_ptr + row).to(tl.int64)
            k_to, kept = k_out_ptr + page * k_out_strides[0] + slot * k_out_strides[1], page >= 0
            v_row = v_ptr + batch * v_strides[0] + token * v_strides[1]
            v_to = v_out_ptr + page * v_out_strides[0] + slot * v_out_strides[1]
            _copy_heads(
                v_row, v_strides[2], v_to, v_out_strides[2], k_heads, first, kept, HALF, BLOCK_H, BLOCK_D
            )  # fmt: skip
        _turn_heads(
            k_row, k_strides[2], k_to, k_out_strides[2], k_weight_ptr, eps, cos, sin, k_heads, first, kept,
            HALF, BLOCK_H, BLOCK_D,
        )  # fmt: skip


def launch_norm_rotate(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None,
    k_weight: Tensor | None, eps: float, v: Tensor | None = None, v_out: Tensor | None = None,
    pages: Tensor | None = None, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """q (B, T, H, D) and k (B, T, K, D) into q_out and k_out, contiguous; cos, sin (B or 1, 1, T, D / 2) of one
    layout; elements of heads and angles follow each other.

    v: (B, T, K, D) as well; k_out and v_out are then pages (P, K, page, D), and pages and slots (B * T,) say where tokens go.
    """
    batch, tokens, q_heads, dims = q.shape
    k_heads, half = k.shape[2], dims // 2
    block_d = power_of_two(half)
    block_h = power_of_two(min(max(q_heads, k_heads), max(1, _ELEMENTS // (2 * block_d))))
    q_blocks = cdiv(q_heads, block_h)
    blocks = q_blocks + cdiv(k_heads, block_h)
    pdl = uses_pdl(q)
    of_batch = cos.stride(0) if cos.shape[0] > 1 else 0
    # None at the end, for the reason in `launch.kernel_options`.
    by_token = tuple(None if x is None else (*x.stride()[:3], None) for x in (q, k, v))
    if v is None:
        by_slot = (*k_out.stride()[:3], None), None
    else:  # of a page, a slot and a head
        by_slot = tuple((x.stride(0), x.stride(2), x.stride(1), None) for x in (k_out, v_out))
    launch(
        _norm_rotate_kernel, batch * tokens * blocks,
        q, k, v, q_out, k_out, v_out, cos, sin, q_weight, k_weight, pages, slots, eps, *by_token, *by_slot,
        (of_batch, cos.stride(2), None), tokens, q_heads, k_heads, q_blocks, blocks, half, pdl, block_h, block_d, num_warps=4,
        **pdl_option(pdl),
    )  # fmt: skip
