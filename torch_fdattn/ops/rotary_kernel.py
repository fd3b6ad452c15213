"""RMSNorm of heads and rotary positions, of q and k in one launch, which stores k and v in a paged cache where it is given one.

A program has a token and some of its heads, of q or of k: the angles are read once for them all. Norms are those of
torch's own kernel, fp32 and rounded to the dtype once (Zhang and Sennrich 2019); the rotation is fp32, rounded once.
Programs of k store the same heads of v. In a cache of one byte an element, a token's and head's scale is its largest
absolute value over the format's largest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.append_kv.arguments import QUANTISED
from torch_fdattn.ops.append_kv.kernel import FORMATS, as_bits
from torch_fdattn.ops.append_kv.rounding import encode
from torch_fdattn.ops.launch import cdiv, power_of_two
from torch_fdattn.ops.pdl import pdl_option, uses_pdl
from torch_fdattn.ops.rotary import SMALLEST_MAXIMUM, KVSlots

#: Elements of a program at most, but for one head: a load of 16 bytes a thread for each half.
_ELEMENTS = 2048

_SMALLEST_MAXIMUM = tl.constexpr(SMALLEST_MAXIMUM)


@triton.jit
def _largest(x):
    """Of each head's absolute values; NaN counts as infinity, so that all that is read back is NaN."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@triton.jit
def _store_heads(
    low, high, row, stride, scale_row, scale_stride, inverse, head, d, is_head,
    HALF: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Halves (heads, BLOCK_D) of heads to a token's row; FORMAT: of one byte, under scales that are stored too."""
    if FORMAT is not None:
        low, high = low.to(tl.float32), high.to(tl.float32)
        scale = tl.maximum(tl.maximum(_largest(low), _largest(high)), _SMALLEST_MAXIMUM) * inverse
        tl.store(scale_row + head * scale_stride, scale[:, None], mask=is_head)
        scales = tl.broadcast_to(scale[:, None], low.shape)
        low = encode(tl.div_rn(low, scales), FORMAT)
        high = encode(tl.div_rn(high, scales), FORMAT)
    to = row + head * stride + d
    tl.store(to, low, mask=is_head & (d < HALF))
    tl.store(to + HALF, high, mask=is_head & (d < HALF))


@triton.jit
def _turned(
    at, weight_ptr, eps, cos, sin, d, inside, dtype: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Halves (heads, BLOCK_D) of heads, in their dtype."""
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        mean = tl.sum(low * low + high * high, 1) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        of_low = tl.load(weight_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
        of_high = tl.load(weight_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        low = (low * scale * of_low).to(dtype).to(tl.float32)
        high = (high * scale * of_high).to(dtype).to(tl.float32)
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@triton.jit(do_not_specialize=["eps", "inverse"])
def _norm_rotate_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, v_out_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    pages_ptr, slots_ptr, k_scale_ptr, v_scale_ptr, eps, inverse,
    q_strides, k_strides, v_strides, k_out_strides, v_out_strides, k_scale_strides, v_scale_strides, angle_strides,
    tokens, q_heads, k_heads, q_blocks, blocks,
    HALF: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norms where there are weights; cos and sin by strides of batch and token; v is None, or k and it are stored."""
    await_previous(PDL)
    pdl_trigger(PDL)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    batch, token = row // tokens, row % tokens
    d = tl.arange(0, BLOCK_D)[None, :]
    angles = batch * angle_strides[0] + token * angle_strides[1] + d
    cos = tl.load(cos_ptr + angles, mask=d < HALF, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=d < HALF, other=0.0)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    # Names of their own in each branch: Triton merges equal ones, and their shapes may differ.
    if block < q_blocks:
        q_head = (block * BLOCK_Q + tl.arange(0, BLOCK_Q))[:, None]
        is_q = q_head < q_heads
        from_q = q_ptr + batch * q_strides[0] + token * q_strides[1] + q_head * q_strides[2] + d
        q_low, q_high = _turned(
            from_q, q_weight_ptr, eps, cos, sin, d, is_q & (d < HALF), dtype, HALF
        )  # fmt: skip
        q_row = q_out_ptr + row * q_heads * (2 * HALF)
        _store_heads(q_low, q_high, q_row, 2 * HALF, None, 0, 0.0, q_head, d, is_q, HALF, None)
    else:
        head = ((block - q_blocks) * BLOCK_K + tl.arange(0, BLOCK_K))[:, None]
        is_head = head < k_heads
        inside = is_head & (d < HALF)
        from_k = k_ptr + batch * k_strides[0] + token * k_strides[1] + head * k_strides[2] + d
        low, high = _turned(from_k, k_weight_ptr, eps, cos, sin, d, inside, dtype, HALF)
        if v_ptr is None:
            k_row = k_out_ptr + row * k_out_strides[1]
            _store_heads(
                low, high, k_row, k_out_strides[2], None, 0, 0.0, head, d, is_head, HALF, None
            )
        else:
            from_v = v_ptr + batch * v_strides[0] + token * v_strides[1] + head * v_strides[2] + d
            v_low = tl.load(from_v, mask=inside, other=0.0)
            v_high = tl.load(from_v + HALF, mask=inside, other=0.0)
            page = tl.load(pages_ptr + row).to(tl.int64)
            slot = tl.load(slots_ptr + row).to(tl.int64)
            is_head = is_head & (page >= 0)
            k_row = k_out_ptr + page * k_out_strides[0] + slot * k_out_strides[1]
            v_row = v_out_ptr + page * v_out_strides[0] + slot * v_out_strides[1]
            k_scales, v_scales, k_scale_stride, v_scale_stride = None, None, 0, 0
            if FORMAT is not None:
                k_scales = k_scale_ptr + page * k_scale_strides[0] + slot * k_scale_strides[1]
                v_scales = v_scale_ptr + page * v_scale_strides[0] + slot * v_scale_strides[1]
                k_scale_stride, v_scale_stride = k_scale_strides[2], v_scale_strides[2]
            _store_heads(
                low, high, k_row, k_out_strides[2], k_scales, k_scale_stride, inverse, head, d, is_head, HALF, FORMAT
            )  # fmt: skip
            _store_heads(
                v_low, v_high, v_row, v_out_strides[2], v_scales, v_scale_stride, inverse, head, d, is_head, HALF, FORMAT
            )  # fmt: skip


def launch_norm_rotate(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor | None, cos: Tensor, sin: Tensor, q_weight: Tensor | None,
    k_weight: Tensor | None, eps: float, v: Tensor | None = None, to: KVSlots | None = None,
) -> None:  # fmt: skip
    """q (B, T, H, D) and k (B, T, K, D) into q_out and k_out, contiguous; cos, sin (B or 1, 1, T, D / 2) of one
    layout; elements of heads and angles follow each other.

    v, to: in place of k_out: k and v (B, T, K, D) are stored there.
    """
    batch, tokens, q_heads, dims = q.shape
    k_heads, half = k.shape[2], dims // 2
    block_d = power_of_two(half)
    most = max(1, _ELEMENTS // (2 * block_d))
    block_q, block_k = (power_of_two(min(heads, most)) for heads in (q_heads, k_heads))
    q_blocks = cdiv(q_heads, block_q)
    blocks = q_blocks + cdiv(k_heads, block_k)
    pdl = uses_pdl(q)
    of_batch = cos.stride(0) if cos.shape[0] > 1 else 0
    v_out = pages = slots = k_scale = v_scale = form = None
    inverse = 0.0
    if to is not None:
        k_cache, v_cache, pages, slots, k_scale, v_scale = to
        k_out, v_out = as_bits(k_cache), as_bits(v_cache)
        if k_cache.dtype in QUANTISED:
            form, inverse = FORMATS[k_cache.dtype], 1 / QUANTISED[k_cache.dtype]
    order = (0, 1, 2) if to is None else (0, 2, 1)  # of a page, a slot and a head
    # None at the end, for the reason in `launch.kernel_options`.
    strides = [(*x.stride()[:3], None) if x is not None else None for x in (q, k, v)]
    for x in (k_out, v_out, k_scale, v_scale):
        strides.append(None if x is None else (*(x.stride(i) for i in order), None))
    launch(
        _norm_rotate_kernel, batch * tokens * blocks,
        q, k, v, q_out, k_out, v_out, cos, sin, q_weight, k_weight, pages, slots, k_scale, v_scale, eps, inverse, *strides,
        (of_batch, cos.stride(2), None), tokens, q_heads, k_heads, q_blocks, blocks, half, form, pdl, block_q, block_k, block_d,
        num_warps=4, **pdl_option(pdl),
    )  # fmt: skip
