"""The Python entry of attention: keywords with defaults, one frame above `torch.ops.fdattn.attention`.

The defaults of softcap and dropout_p are the int 0: of a float, torch.compile(dynamic=True) makes an input of the
graph and traces the function twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.launch import prepared
from torch_fdattn.ops import library
from torch_fdattn.ops.attention import op
from torch_fdattn.ops.layout import Layout, from_bhsd, to_bhsd
from torch_fdattn.ops.options import (
    AttentionOptions,
    default_scale,
    options_to_mask,
    window_bounds,
)
from torch_fdattn.ops.scores import Scores


def attention(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = False, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
    softcap: float = 0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    attn_mask: Tensor | None = None, dropout_p: float = 0, dropout_seed: Tensor | None = None,
    layout: Layout = "bhsd",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention with its log-sum-exp: ``softmax(scale · q kᵀ + mask) v``.

    Args:
        q: queries (B, H, S, D), bfloat16, float16 or float32 (float64 on the CPU), any strides;
            D from 1 to 512 (above 256 tuned on sm_90 alone; slower where it is no multiple of 8).
        k, v: keys (B, H_kv, S_kv, D) and values (B, H_kv, S_kv, DV), H a multiple of H_kv (GQA, MQA), any
            strides; DV as D.
        kv_lens: int32 (B,) on q's device; how many keys of each sequence are valid, clamped to
            [0, S_kv]. None: all.
        causal: a query sees keys up to its own position.
        window: (left, right): a query at position p sees keys at p - left … p + right; -1 is unbounded, and
            beyond 2**29 is 2**29. torch.compile compiles anew for each left and right.
        scale: of the scores; default D ** -0.5. Positive; a 0-dim tensor is read, which waits for its device and which no graph can.
        q_start: int32 (B,), position of the first query, clamped to ±2**29. Default: the queries are the
            last of the keys (bottom-right alignment).
        kv_start: int32 (B,), position of the first key, clamped to ±2**29. Default 0.
        kv_block, kv_stride: key j stands at ``kv_start + (j // kv_block) · kv_stride + j % kv_block``,
            the position map of a cache sharded round-robin, below 2**29; 0: contiguous.
        softcap: scores become ``softcap · tanh(score / softcap)``; 0: none.
        alibi_slopes: (H,) or (B, H): scores lose ``slope · |q_pos - k_pos|``, after the cap.
        sinks: (H,): a logit that joins each row's softmax and adds nothing to its output. The lse
            returned includes it, so that ``exp(score - lse)`` are the weights.
        attn_mask: as torch's SDPA, of any shape broadcastable to (B, H, S, S_kv) and any strides, read where it
            is: boolean (True: visible), or of any float dtype, added to the scores after all else. It joins causal,
            window and kv_lens; key j is its column j, wherever that key stands. -inf hides a key, and so do entries
            below -1e38 (SDPA would weigh keys by them where a row has no others); +inf counts as 1e38, so that
            such keys share the row between them. Its gradient is summed over the dims by which it is broadcast,
            one program for each tile of the mask, which takes long for a mask of few elements.
            Derivatives take their weights from the float32 lse. Where every key that a row sees has an entry beyond
            1e5 in size, they lose digits (0.3 % there), and beyond 1e8 (padding by -1e9, several +inf) each such key
            counts as if it were alone: hide by -inf.
        dropout_p: each weight is dropped with this probability, rounded to a multiple of 2**-16, and the others
            are divided by 1 - p; lse is that without dropout. Which ones follows from seed, batch, head and
            positions alone, on every device the same (`ops/attention/dropout.py`).
        dropout_seed: int64 (2,) on q's device: seed and offset; or (3,), with the number of q's first head, where q has a part
            of the heads. Default: drawn on the device from torch's generator, or as `set_deterministic` says; within
            vmap by its `randomness`. Of DTensors it must be given.
        layout: "bshd": q, k, v and out are (B, S, H, D), as flash-attn's; nothing is copied. The lse stays (B, H, S),
            and attn_mask broadcasts to (B, H, S, S_kv).

    Returns:
        out (B, H, S, DV) in q's dtype and memory layout, and lse (B, H, S) float32 (float64 for float64 inputs), natural
        logarithm.
        A query that sees no key has out 0 and lse -inf (or its head's sink). Both are differentiable in q, k,
        v, alibi_slopes, sinks and a floating attn_mask, once: in reverse mode, in forward mode (torch.func.jvp,
        torch.autograd.forward_ad) and in torch.func's transforms. Tangents are computed by torch's own matmuls, in
        memory linear in the lengths; with dropout they wait for the device. Derivatives of derivatives raise.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Source: FlashAttention-2, arXiv:2307.08691.

    Examples:
        >>> q = torch.randn(2, 8, 128, 64)
        >>> k, v = torch.randn(2, 2, 2, 128, 64)  # each KV head serves 4 query heads
        >>> out, lse = torch_fdattn.attention(q, k, v, causal=True, window=(32, 0))
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([2, 8, 128]))

        Padding on the right costs nothing as lengths:

        >>> lens = torch.tensor([128, 40], dtype=torch.int32)
        >>> out, _ = torch_fdattn.attention(q, k, v, lens)

        Tensors of (B, S, H, D):

        >>> q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        >>> torch_fdattn.attention(q, k, v, causal=True, layout="bshd")[0].shape
        torch.Size([2, 128, 8, 64])
    """
    if layout != "bhsd":
        q, k, v = to_bhsd(layout, q=q, k=k, v=v)
    if scale is not None:
        scale = checks.number("scale", scale)
    tensors = kv_lens, q_start, kv_start, alibi_slopes, sinks, attn_mask
    drops = dropout_seed is not None or type(dropout_p) not in (int, float) or dropout_p != 0
    unseen = not drops and library.can_bypass_dispatcher(q, k, v, *tensors)
    key = None
    if unseen and (window is None or type(window) is tuple):
        numbers = causal, window, scale, kv_block, kv_stride, softcap
        key = op.key_of("attention", q, k, v, *tensors, *numbers)
        state = op.attend_prepared(prepared.checked(key), q, k, v, tensors)
        if state is not None:
            return state if layout == "bhsd" else from_bhsd(state)
    left, right = window_bounds(window)
    checks.expect_types(
        (("q", q), ("k", k), ("v", v)), (kv_lens, q_start, kv_start), scale, softcap, dropout_p,
        alibi_slopes=alibi_slopes, sinks=sinks, attn_mask=attn_mask, dropout_seed=dropout_seed,
    )  # fmt: skip
    checks.expect_int64(kv_block=kv_block, kv_stride=kv_stride)
    checks.expect_bool(causal=causal)
    if unseen:
        strided = checks.plain_int("kv_block", kv_block), checks.plain_int("kv_stride", kv_stride)
        mask = options_to_mask(kv_lens, q_start, kv_start, causal, left, right, *strided)
        scores = Scores(checks.plain_float("softcap", softcap), alibi_slopes, sinks, attn_mask)
        scale = checks.plain_float("scale", default_scale(q, scale))
        state = op.attend_eagerly(key, q, k, v, AttentionOptions(mask, scale, scores))
        return state if layout == "bhsd" else from_bhsd(state)
    state = torch.ops.fdattn.attention(
        q, k, v, kv_lens, q_start, kv_start, causal=causal, window_left=left, window_right=right,
        kv_block=kv_block, kv_stride=kv_stride, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, attn_mask=attn_mask, dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
    return state if layout == "bhsd" else from_bhsd(state)
