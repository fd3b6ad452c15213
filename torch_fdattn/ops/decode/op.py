"""The op `fdattn::decode`: a few query tokens against a preallocated cache.

    decode_forward(q, k_cache, v_cache, mask…) -> (out, lse)
    decode(q, k_cache, v_cache, kv_lens, …)    -> (out, lse), autograd and autocast

The gradient is attention's: the streaming backward from the saved lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.ops import library
from torch_fdattn.ops.attention.op import (
    MASK_SCHEMA,
    OPTIONS_SCHEMA,
    attend,
    check_inputs,
    copy_state,
    default_scale,
    empty_state,
    options_to_mask,
)
from torch_fdattn.ops.decode.reference import decode_reference
from torch_fdattn.ops.positions import Mask

MAX_QUERY_TOKENS = 16


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> None:
    check_inputs(q, k, v, mask, scale, ("q", "k_cache", "v_cache"))
    if not 1 <= q.shape[2] <= MAX_QUERY_TOKENS:
        raise ValueError(
            f"q must have 1 to {MAX_QUERY_TOKENS} query tokens (dimension 2), got {q.shape[2]}; "
            "use attention for longer queries"
        )


def _forward(q, k, v, *rest):
    *mask, scale, out_dtype = rest
    mask = Mask(*mask)
    _check(q, k, v, mask, scale)
    out, lse = empty_state(q, out_dtype)
    if library.use_triton(q):
        from torch_fdattn.ops.decode.kernel import launch_decode

        launch_decode(q, k, v, mask, scale, out, lse)
    else:
        library.launches["decode_forward/reference"] += 1
        copy_state(out, lse, decode_reference(q, k, v, mask, scale))
    return out, lse


def _forward_fake(q, k, v, *rest):
    *mask, scale, out_dtype = rest
    _check(q, k, v, Mask(*mask), scale)
    return empty_state(q, out_dtype)


library.define_raw(
    f"decode_forward(Tensor q, Tensor k_cache, Tensor v_cache, {MASK_SCHEMA}, "
    "ScalarType? out_dtype) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)


def _decode(
    q, k_cache, v_cache, kv_lens=None, q_start=None, kv_start=None, *, causal=True, window_left=-1,
    window_right=-1, kv_block=0, kv_stride=0, scale=None,
):  # fmt: skip
    mask = options_to_mask(
        kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    )
    forward = torch.ops.fdattn.decode_forward
    return attend(forward, q, k_cache, v_cache, mask, default_scale(q, scale))


library.define_composite(
    f"decode(Tensor q, Tensor k_cache, Tensor v_cache, "
    f"{OPTIONS_SCHEMA.format(causal='bool causal=True')}) -> (Tensor out, Tensor lse)",
    _decode,
    autocast_args=3,
)
