"""The op `fdattn::varlen_attention`: attention over packed sequences, keys packed too or on pages.

    varlen_attention_forward(q, k, v, cu_seqlens…, page_table, mask…, scores…)          -> (out, lse)
    varlen_attention_backward(dout, dlse, q, k, v, out, lse, cu_seqlens…, mask…, scores…)  -> (dq, dk, dv)
    varlen_attention_backward_all(…)                                -> and gradients of what modifies the scores
    varlen_attention_tangent(q, k, v, lse, cu_seqlens…, tangents…, mask…, scores…)     -> tangents of (out, lse)
    varlen_attention(q, k, v, cu_seqlens_q, …)                      -> (out, lse), autograd and autocast

Mask, scores and dropout are attention's, and so are the kernels: programs look up which sequence's block they
hold (`ops/packed.py`). Keys on pages have no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.launch import prepared
from torch_fdattn.launch.tile_counter import tile_counter
from torch_fdattn.ops import library
from torch_fdattn.ops.attention import dispatch
from torch_fdattn.ops.attention.autograd import TANGENT_SCHEMA, TANGENTS, attend, check_tangents
from torch_fdattn.ops.attention.cpu import LARGE, attention_backward_on_cpu, attention_on_cpu
from torch_fdattn.ops.attention.derivative_op import (
    FLAGS,
    STATE_SCHEMA,
    backward_kernel,
    copy_gradients,
    empty_score_grads,
    empty_scratch,
    returned,
    state_launches,
)
from torch_fdattn.ops.attention.inputs import check_state, copy_state, empty_gradients, empty_state
from torch_fdattn.ops.attention.op import key_of, seeded_dropout
from torch_fdattn.ops.attention.reference import accumulated
from torch_fdattn.ops.determinism import is_deterministic
from torch_fdattn.ops.launch import contiguous_mask
from torch_fdattn.ops.layout import Layout, check_layout, to_bhsd
from torch_fdattn.ops.options import (
    COMPOSITE_SCHEMA,
    LAYOUT_SCHEMA,
    MASK_SCHEMA,
    SCORES_SCHEMA,
    AttentionOptions,
    default_scale,
    options_to_mask,
)
from torch_fdattn.ops.packed import Packed, by_heads
from torch_fdattn.ops.scores import NO_SCORES, Scores
from torch_fdattn.ops.varlen_attention.cpu import attend_packed
from torch_fdattn.ops.varlen_attention.inputs import check_varlen
from torch_fdattn.ops.varlen_attention.reference import (
    varlen_attention_backward_reference,
    varlen_attention_reference,
    varlen_attention_tangent_reference,
)

if TYPE_CHECKING:
    from torch_fdattn.launch.launches import Launch

_WHERE = "Tensor cu_seqlens_q, Tensor? cu_seqlens_k"


def _runs_kernels(q: Tensor, packed: Packed) -> bool:
    return library.use_triton(q) and packed.sequences > 0


def _lse_shape(q: Tensor) -> tuple[int, int]:
    return q.shape[1], q.shape[0]


def _empty_state(q: Tensor, v: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return empty_state(q, v, out_dtype, _lse_shape(q))


def _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, *tail):
    packed = Packed(cu_seqlens_q, cu_seqlens_k, page_table)
    return attend_eagerly(q, k, v, packed, AttentionOptions.from_raw(tail))


def attend_eagerly(q, k, v, packed: Packed, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """The raw forward."""
    page_table = packed.page_table
    key = key_of("varlen_attention_forward", q, k, v, *packed, *options.to_raw())
    call = prepared.checked(key)
    if call is None:
        check_varlen(q, k, v, packed, options)
        if _runs_kernels(q, packed):
            by_head = by_heads(q), *_keys_by_heads(k, v, packed)
            kernel = dispatch.choose("forward", *by_head, options, packed)
            call = prepared.prepare(key, label=f"varlen_attention_forward/{kernel}")
    mask, scale, scores, dropout, _ = options
    out, lse = _empty_state(q, v, options.dtype)
    if call is not None:
        mask = contiguous_mask(mask)
        counter = tile_counter(q.device) if call.label.endswith("/hopper") else None
        tensors = q, k, v, out, lse, *packed, *mask[:3], *scores[1:], dropout.seed, counter
        if call.by_driver(tensors):
            library.launches[call.label] += 1
        else:
            launches = _launches(q, k, v, packed, options._replace(mask=mask), out, lse, counter)
            call.run(tensors, launches)
    elif library.use_triton(q):  # of no sequences
        copy_state(out, lse, (torch.zeros(()), torch.full((), float("-inf"))))
    else:
        library.launches["varlen_attention_forward/cpu"] += 1
        if page_table is None and q.numel() + k.numel() <= LARGE:
            q, k, v = map(accumulated, (q, k, v))  # once, in place of each sequence's own
        call_of_all = q, k, v, packed, mask, scale, scores, dropout
        if not attend_packed(*call_of_all, (out, lse)):
            varlen_attention_reference(*call_of_all, attention_on_cpu, (out, lse))
    return out, lse


def _keys_by_heads(k: Tensor, v: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    return (k, v) if packed.page_table is not None else (by_heads(k), by_heads(v))


def _launches(
    q, k, v, packed: Packed, options: AttentionOptions, out, lse, counter: Tensor | None
) -> Iterable[Launch]:  # fmt: skip
    by_head = by_heads(q), *_keys_by_heads(k, v, packed), options, by_heads(out), lse
    # As in attention: addresses are no part of a call's key.
    if counter is not None:
        from torch_fdattn.ops.attention.hopper.launch import forward_launch, is_aligned

        if is_aligned(q, k, v):
            library.launches["varlen_attention_forward/hopper"] += 1
            return (forward_launch(*by_head, counter, packed),)
    from torch_fdattn.ops.attention.forward import forward_launches

    return forward_launches(*by_head, packed=packed)


def _forward_fake(q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, *tail):
    options = AttentionOptions.from_raw(tail)
    check_varlen(q, k, v, Packed(cu_seqlens_q, cu_seqlens_k, page_table), options)
    return _empty_state(q, v, options.dtype)


def _check_backward(dout, dlse, q, k, v, out, lse, packed: Packed, options: AttentionOptions) -> None:  # fmt: skip
    check_varlen(q, k, v, packed, options)
    check_state(dout, dlse, out, lse, q, v, _lse_shape(q))


def _gradients(
    dout, dlse, q, k, v, out, lse, packed: Packed, options: AttentionOptions, score_grads: Scores = NO_SCORES,
    key: tuple | None = None, *, in_order: bool,
):  # fmt: skip
    """(dq, dk, dv); score_grads, key and in_order as in attention."""
    call = prepared.checked(key)
    if call is None:
        _check_backward(dout, dlse, q, k, v, out, lse, packed, options)
        if _runs_kernels(q, packed):
            by_head = by_heads(dout), by_heads(q), by_heads(k), by_heads(v)
            kernel = backward_kernel(*by_head, options, score_grads, packed)
            call = prepared.prepare(key, label=f"varlen_attention_backward/{kernel}")
    grads = empty_gradients(q, k, v, options.dtype)
    mask, scale, scores, dropout, _ = options
    if call is not None:
        mask, scratch = contiguous_mask(mask), empty_scratch(call, by_heads(q), in_order, packed)
        dlse, lse = None if dlse is None else dlse.contiguous(), lse.contiguous()
        given = *scratch, *packed, *mask[:3], *scores[1:], dropout.seed
        tensors = dout, dlse, q, k, v, out, lse, *grads, *given
        if call.by_driver(tensors):
            library.launches[call.label] += 1
        else:
            state = by_heads(dout), dlse, *map(by_heads, (q, k, v, out)), lse
            options, by_head_grads = options._replace(mask=mask), tuple(map(by_heads, grads))
            launches = state_launches(
                call, state, options, by_head_grads, score_grads, *scratch, packed=packed
            )
            call.run(tensors, launches)
    elif library.use_triton(q):  # of no sequences
        for grad in (*grads, *score_grads[1:]):
            if grad is not None:
                grad.zero_()
    else:
        library.launches["varlen_attention_backward/cpu"] += 1
        *found, of_scores = varlen_attention_backward_reference(
            dout, dlse, q, k, v, out, lse, packed, mask, scale, scores, dropout,
            functools.partial(attention_backward_on_cpu, score_grads=score_grads),
        )  # fmt: skip
        copy_gradients((*grads, *score_grads[1:]), (*found, *of_scores[1:]))
    return grads


def _backward(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *tail):
    packed = Packed(cu_seqlens_q, cu_seqlens_k)
    state = dout, dlse, q, k, v, out, lse
    in_order = is_deterministic()
    key = key_of("varlen_attention_backward", q, *state, *packed, *tail, in_order)
    return _gradients(*state, packed, AttentionOptions.from_raw(tail), key=key, in_order=in_order)


def _backward_fake(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *tail):
    packed, options = Packed(cu_seqlens_q, cu_seqlens_k), AttentionOptions.from_raw(tail)
    _check_backward(dout, dlse, q, k, v, out, lse, packed, options)
    return empty_gradients(q, k, v, options.dtype)


def _backward_all(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *tail):
    flags, options = tail[: len(FLAGS)], AttentionOptions.from_raw(tail[len(FLAGS) :])
    packed, score_grads = Packed(cu_seqlens_q, cu_seqlens_k), empty_score_grads(options.scores, flags)  # fmt: skip
    state = dout, dlse, q, k, v, out, lse
    grads = _gradients(*state, packed, options, score_grads, in_order=is_deterministic())
    return *grads, *returned(q, score_grads)


def _backward_all_fake(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *tail):
    flags, tail = tail[: len(FLAGS)], tail[len(FLAGS) :]
    score_grads = empty_score_grads(AttentionOptions.from_raw(tail).scores, flags)
    grads = _backward_fake(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *tail)
    return *grads, *returned(q, score_grads)


def _checked_tangent(q, k, v, lse, packed: Packed, tail: tuple):
    """The options, and the tangents by TANGENTS."""
    tangents, tail = tail[: len(TANGENTS)], tail[len(TANGENTS) :]
    options = AttentionOptions.from_raw(tail, has_dtype=False)
    check_varlen(q, k, v, packed, options)
    checks.expect_shape("lse", lse, _lse_shape(q), "q")
    check_tangents((q, k, v, *options.scores[1:]), tangents)
    return options, tangents


def _tangent(q, k, v, lse, cu_seqlens_q, cu_seqlens_k, *tail):
    packed = Packed(cu_seqlens_q, cu_seqlens_k)
    options, (dq, dk, dv, *of_scores) = _checked_tangent(q, k, v, lse, packed, tail)
    mask, scale, scores, dropout, _ = options
    library.launches["varlen_attention_tangent/torch"] += 1
    out, dlse = _empty_state(q, v, None)
    tangents = varlen_attention_tangent_reference(
        q, k, v, lse, packed, dq, dk, dv, Scores(0.0, *of_scores), mask, scale, scores, dropout
    )
    copy_state(out, dlse, tangents)
    return out, dlse


def _tangent_fake(q, k, v, lse, cu_seqlens_q, cu_seqlens_k, *tail):
    _checked_tangent(q, k, v, lse, Packed(cu_seqlens_q, cu_seqlens_k), tail)
    return _empty_state(q, v, None)


library.define_raw(
    f"varlen_attention_forward(Tensor q, Tensor k, Tensor v, {_WHERE}, Tensor? page_table, {MASK_SCHEMA}, "
    f"ScalarType? out_dtype, {SCORES_SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
library.define_raw(
    f"varlen_attention_backward({STATE_SCHEMA}, {_WHERE}, {MASK_SCHEMA}, ScalarType? grad_dtype, "
    f"{SCORES_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
library.define_raw(
    f"varlen_attention_backward_all({STATE_SCHEMA}, {_WHERE}, {', '.join(FLAGS)}, {MASK_SCHEMA}, "
    f"ScalarType? grad_dtype, {SCORES_SCHEMA}) -> (Tensor, Tensor, Tensor{', Tensor' * len(FLAGS)})",
    _backward_all,
    _backward_all_fake,
)


library.define_raw(
    f"varlen_attention_tangent(Tensor q, Tensor k, Tensor v, Tensor lse, {_WHERE}, {TANGENT_SCHEMA}, "
    f"{MASK_SCHEMA}, {SCORES_SCHEMA}) -> (Tensor, Tensor)",
    _tangent,
    _tangent_fake,
)


def _differentiable_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *tail):
    return torch.ops.fdattn.varlen_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, *tail
    )


def pages_to_bhsd(layout: Layout, k: Tensor, v: Tensor, page_table: Tensor | None):
    """(k, v), of which pages alone have a layout: packed tokens are (T, H, D) in both."""
    check_layout(layout)
    if layout == "bhsd" or page_table is None:
        return k, v
    return to_bhsd(layout, k=k, v=v)


def _varlen_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k=None, page_table=None, kv_lens=None, q_start=None, kv_start=None, *,
    causal=False, window_left=-1, window_right=-1, kv_block=0, kv_stride=0, scale=None, softcap=0.0,
    alibi_slopes=None, sinks=None, attn_mask=None, dropout_p=0.0, dropout_seed=None, layout="bhsd",
):  # fmt: skip
    k, v = pages_to_bhsd(layout, k, v, page_table)
    mask = options_to_mask(
        kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    )
    scores = Scores(softcap, alibi_slopes, sinks, attn_mask)
    dropout = seeded_dropout(q, dropout_p, dropout_seed)
    options = AttentionOptions(mask, default_scale(q, scale), scores, dropout)
    if page_table is None:
        return attend(_differentiable_forward, q, k, v, options, (cu_seqlens_q, cu_seqlens_k))
    library.load_rules_for(q)
    return library.run_without_derivatives(
        "varlen_attention", "where page_table is given", torch.ops.fdattn.varlen_attention_forward,
        q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, *options.to_raw(),
    )  # fmt: skip


library.define_composite(
    f"varlen_attention(Tensor q, Tensor k, Tensor v, {_WHERE}=None, Tensor? page_table=None, "
    f"{COMPOSITE_SCHEMA.format(causal='bool causal=False')}, {SCORES_SCHEMA}, {LAYOUT_SCHEMA}) "
    "-> (Tensor out, Tensor lse)",
    _varlen_attention,
    autocast_args=3,
)
