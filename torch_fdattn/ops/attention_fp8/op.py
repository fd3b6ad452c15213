"""The op `fdattn::attention_fp8`: attention of float8_e4m3fn tensors with scales by head, without derivatives.

    attention_fp8_forward(q, k, v, scales, kv_lens, window…, scores…)  -> (out, lse), the raw op
    attention_fp8(q, k, v, q_scale, k_scale, v_scale, …)                -> (out, lse), with defaults and layout

Hopper's kernel multiplies in float8. Elsewhere the inputs are dequantised, and attention's own forward computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.launch.tile_counter import tile_counter
from torch_fdattn.ops import library
from torch_fdattn.ops.attention import hopper
from torch_fdattn.ops.attention.configs import device_capability
from torch_fdattn.ops.attention.inputs import empty_state
from torch_fdattn.ops.attention.op import attend_eagerly, key_of
from torch_fdattn.ops.attention_fp8.inputs import check_fp8_inputs, refuse_derivatives
from torch_fdattn.ops.attention_fp8.reference import dequantised
from torch_fdattn.ops.launch import contiguous_mask
from torch_fdattn.ops.options import (
    LAYOUT_SCHEMA,
    AttentionOptions,
    default_scale,
    options_to_mask,
)
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor? kv_lens"
)
_SCORES = "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None"


def _options(
    kv_lens, window_left, window_right, scale, out_dtype, softcap=0.0, alibi_slopes=None, sinks=None
) -> AttentionOptions:  # fmt: skip
    """Of the raw op's last arguments."""
    mask = Mask(kv_lens, window_left=window_left, window_right=window_right).clamped
    scores = Scores(softcap, alibi_slopes, sinks, None)
    return AttentionOptions(mask, scale, scores, dtype=out_dtype)


def _forward(q, k, v, q_scale, k_scale, v_scale, *tail):
    scales, options = (q_scale, k_scale, v_scale), _options(*tail)
    check_fp8_inputs(q, k, v, scales, options)
    kernel = _kernel(q, k, v, options)
    library.launches[f"attention_fp8/{kernel}"] += 1
    attend = _multiply_in_float8 if kernel == "hopper" else _attend_dequantised
    return attend(q, k, v, scales, options)


def _kernel(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    """What computes checked inputs; also the end of the launch counter's name."""
    if device_capability(q.device) != (9, 0) or not 32 < q.shape[3] <= 256:
        return "dequantised"
    if not hopper.is_importable():
        return "dequantised"
    from torch_fdattn.ops.attention.hopper.launch import is_aligned, takes_fp8

    return "hopper" if is_aligned(q, k) and takes_fp8(q, k, v, options) else "dequantised"


def _multiply_in_float8(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor, Tensor], options: AttentionOptions
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from torch_fdattn.launch.launches import run
    from torch_fdattn.ops.attention.hopper.fp8 import fp8_launches

    out, lse = empty_state(q, v, options.dtype)
    by_head = (
        scale.expand(x.shape[:2]).contiguous() for x, scale in zip((q, k, v), scales, strict=True)
    )
    options = options._replace(mask=contiguous_mask(options.mask))
    run(fp8_launches(q, k, v, *by_head, options, out, lse, tile_counter(q.device)))
    return out, lse


def _attend_dequantised(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor, Tensor], options: AttentionOptions
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """By attention's forward: in out_dtype, or on a CPU in float32, of which out is rounded at the end."""
    dtype = options.dtype if q.is_cuda else torch.float32
    q, k, v = (dequantised(x, scale, dtype) for x, scale in zip((q, k, v), scales, strict=True))
    in_dtype = options._replace(dtype=None)
    key = key_of("attention_forward", q, k, v, *in_dtype.to_raw())
    out, lse = attend_eagerly(key, q, k, v, in_dtype)
    return out.to(options.dtype), lse


def _forward_fake(q, k, v, q_scale, k_scale, v_scale, *tail):
    options = _options(*tail)
    check_fp8_inputs(q, k, v, (q_scale, k_scale, v_scale), options)
    return empty_state(q, v, options.dtype)


library.define_raw(
    f"attention_fp8_forward({_INPUTS}, int window_left, int window_right, float scale, ScalarType out_dtype, "
    f"{_SCORES}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)


def _attention_fp8(
    q, k, v, q_scale, k_scale, v_scale, kv_lens=None, *, causal=False, window_left=-1, window_right=-1,
    scale=None, softcap=0.0, alibi_slopes=None, sinks=None, out_dtype=torch.bfloat16,
):  # fmt: skip
    refuse_derivatives(
        q=q, k=k, v=v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, alibi_slopes=alibi_slopes,
        sinks=sinks,
    )  # fmt: skip
    mask = options_to_mask(kv_lens, None, None, causal, window_left, window_right, 0, 0)
    return torch.ops.fdattn.attention_fp8_forward(
        q, k, v, q_scale, k_scale, v_scale, kv_lens, mask.window_left, mask.window_right,
        default_scale(q, scale), out_dtype, softcap, alibi_slopes, sinks,
    )  # fmt: skip


library.define_composite(
    f"attention_fp8({_INPUTS}=None, *, bool causal=False, int window_left=-1, int window_right=-1, "
    f"float? scale=None, {_SCORES}, ScalarType out_dtype=bfloat16, {LAYOUT_SCHEMA}) -> (Tensor out, Tensor lse)",
    _attention_fp8,
    autocast_args=0,
    in_layout=("q", "k", "v"),
)
