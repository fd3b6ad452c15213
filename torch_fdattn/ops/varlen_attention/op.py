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

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.launch import prepared
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.autograd import TANGENT_SCHEMA, TANGENTS, attend, check_tangents
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.attention.op import (
    GRADIENTS,
    MASK_SCHEMA,
    OPTIONS_SCHEMA,
    SCORES_SCHEMA,
    STATE_SCHEMA,
    Call,
    call_of,
    copy_state,
    default_scale,
    drawn_seed,
    empty_gradients,
    empty_state,
    key_of,
    options_to_mask,
    or_nothing,
    wanted_of,
)
from torch_fdattn.ops.launch import contiguous_mask
from torch_fdattn.ops.packed import Packed, by_heads
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores
from torch_fdattn.ops.varlen_attention.inputs import check_varlen
from torch_fdattn.ops.varlen_attention.reference import (
    varlen_attention_backward_reference,
    varlen_attention_reference,
    varlen_attention_tangent_reference,
)

_WHERE = "Tensor cu_seqlens_q, Tensor? cu_seqlens_k"


def _call_of(rest: tuple) -> Call:
    call = call_of(rest)
    return call._replace(mask=call.mask.clamped)


def _checked(q, k, v, packed: Packed, rest: tuple) -> Call:
    call = _call_of(rest)
    check_varlen(q, k, v, packed, call)
    return call


def _runs_kernels(q: Tensor, packed: Packed) -> bool:
    return library.use_triton(q) and packed.sequences > 0


def _empty_state(q: Tensor, v: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return empty_state(q, v, out_dtype, (q.shape[1], q.shape[0]))


def _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, *rest):
    packed = Packed(cu_seqlens_q, cu_seqlens_k, page_table)
    key = key_of("varlen_attention_forward", q, k, v, *packed, *rest)
    call = prepared.checked(key)
    if call is None:
        _checked(q, k, v, packed, rest)
        call = prepared.prepare(key) if _runs_kernels(q, packed) else None
    mask, scale, out_dtype, scores, dropout = _call_of(rest)
    out, lse = _empty_state(q, v, out_dtype)
    if call is not None:
        from torch_fdattn.ops.attention.forward import forward_launches

        mask = contiguous_mask(mask)
        keys = (k, v) if page_table is not None else (by_heads(k), by_heads(v))
        tensors = q, k, v, out, lse, *packed, *mask[:3], *scores[1:], dropout.seed
        if call.by_driver(tensors):
            library.launches["varlen_attention_forward/triton"] += 1
        else:
            launches = forward_launches(
                by_heads(q), *keys, mask, scale, by_heads(out), lse, scores, dropout, packed=packed
            )
            call.run(tensors, launches)
    elif library.use_triton(q):  # of no sequences
        copy_state(out, lse, (torch.zeros(()), torch.full((), float("-inf"))))
    else:
        library.launches["varlen_attention_forward/reference"] += 1
        found = varlen_attention_reference(q, k, v, packed, mask, scale, scores, dropout)
        copy_state(out, lse, found)
    return out, lse


def _forward_fake(q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, *rest):
    call = _checked(q, k, v, Packed(cu_seqlens_q, cu_seqlens_k, page_table), rest)
    return _empty_state(q, v, call.dtype)


def _check_backward(dout, dlse, q, k, v, out, lse, packed: Packed, rest: tuple) -> Call:
    call = _checked(q, k, v, packed, rest)
    for name, tensor in (("dout", dout), ("out", out)):
        checks.expect_shape(name, tensor, (*q.shape[:2], v.shape[2]), "q and v")
        checks.expect_device(name, tensor, q.device, "q")
    checks.expect_dtype("dout", dout, q.dtype, "q")
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is not None:
            checks.expect_shape(name, tensor, (q.shape[1], q.shape[0]), "q")
            checks.expect_dtype(name, tensor, lse_dtype, "every lse of such inputs")
            checks.expect_device(name, tensor, q.device, "q")
    return call


def _gradients(
    dout, dlse, q, k, v, out, lse, packed: Packed, rest: tuple, wanted: Scores, key: tuple | None = None
):  # fmt: skip
    """(dq, dk, dv); `wanted` and key as in attention."""
    known = prepared.checked(key)
    if known is None:
        _check_backward(dout, dlse, q, k, v, out, lse, packed, rest)
        known = prepared.prepare(key) if _runs_kernels(q, packed) else None
    mask, scale, grad_dtype, scores, dropout = _call_of(rest)
    targets = empty_gradients(q, k, v, grad_dtype)
    if known is not None:
        from torch_fdattn.ops.attention.backward import backward_launches, empty_rows

        mask, rows = contiguous_mask(mask), empty_rows(by_heads(q), packed)
        dlse, lse = None if dlse is None else dlse.contiguous(), lse.contiguous()
        given = *rows, *packed, *mask[:3], *scores[1:], dropout.seed
        tensors = dout, dlse, q, k, v, out, lse, *targets, *given
        if known.by_driver(tensors):
            library.launches["varlen_attention_backward/triton"] += 1
        else:
            launches = backward_launches(
                by_heads(dout), dlse, *map(by_heads, (q, k, v, out)), lse, mask, scale, *map(by_heads, targets), scores,
                wanted, dropout, packed=packed, rows=rows,
            )  # fmt: skip
            known.run(tensors, launches)
    elif library.use_triton(q):  # of no sequences
        for target in (*targets, *wanted[1:]):
            if target is not None:
                target.zero_()
    else:
        library.launches["varlen_attention_backward/reference"] += 1
        *found, of_scores = varlen_attention_backward_reference(
            dout, dlse, q, k, v, out, lse, packed, mask, scale, scores, dropout
        )
        for target, gradient in zip((*targets, *wanted[1:]), (*found, *of_scores[1:]), strict=True):
            if target is not None:
                target.copy_(gradient)
    return targets


def _backward(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *rest):
    packed = Packed(cu_seqlens_q, cu_seqlens_k)
    state = dout, dlse, q, k, v, out, lse
    key = key_of("varlen_attention_backward", q, *state, *packed, *rest)
    return _gradients(*state, packed, rest, NO_SCORES, key)


def _backward_fake(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *rest):
    packed = Packed(cu_seqlens_q, cu_seqlens_k)
    call = _check_backward(dout, dlse, q, k, v, out, lse, packed, rest)
    return empty_gradients(q, k, v, call.dtype)


def _backward_all(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *rest):
    flags, rest = rest[: len(GRADIENTS)], rest[len(GRADIENTS) :]
    packed, wanted = Packed(cu_seqlens_q, cu_seqlens_k), wanted_of(call_of(rest).scores, flags)
    found = _gradients(dout, dlse, q, k, v, out, lse, packed, rest, wanted)
    return *found, *or_nothing(q, wanted)


def _backward_all_fake(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *rest):
    flags, rest = rest[: len(GRADIENTS)], rest[len(GRADIENTS) :]
    found = _backward_fake(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *rest)
    return *found, *or_nothing(q, wanted_of(call_of(rest).scores, flags))


def _checked_tangent(q, k, v, lse, packed: Packed, rest: tuple):
    """The call, and the tangents by TANGENTS."""
    tangents, rest = rest[: len(TANGENTS)], rest[len(TANGENTS) :]
    after_scale = len(Mask._fields) + 1
    call = _checked(q, k, v, packed, (*rest[:after_scale], None, *rest[after_scale:]))
    checks.expect_shape("lse", lse, (q.shape[1], q.shape[0]), "q")
    check_tangents((q, k, v, *call.scores[1:]), tangents)
    return call, tangents


def _tangent(q, k, v, lse, cu_seqlens_q, cu_seqlens_k, *rest):
    packed = Packed(cu_seqlens_q, cu_seqlens_k)
    (mask, scale, _, scores, dropout), (dq, dk, dv, *of_scores) = _checked_tangent(
        q, k, v, lse, packed, rest
    )
    library.launches["varlen_attention_tangent/torch"] += 1
    out, dlse = _empty_state(q, v, None)
    found = varlen_attention_tangent_reference(
        q, k, v, lse, packed, dq, dk, dv, Scores(0.0, *of_scores), mask, scale, scores, dropout
    )
    copy_state(out, dlse, found)
    return out, dlse


def _tangent_fake(q, k, v, lse, cu_seqlens_q, cu_seqlens_k, *rest):
    _checked_tangent(q, k, v, lse, Packed(cu_seqlens_q, cu_seqlens_k), rest)
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
    f"varlen_attention_backward_all({STATE_SCHEMA}, {_WHERE}, {', '.join(GRADIENTS)}, {MASK_SCHEMA}, "
    f"ScalarType? grad_dtype, {SCORES_SCHEMA}) -> (Tensor, Tensor, Tensor{', Tensor' * len(GRADIENTS)})",
    _backward_all,
    _backward_all_fake,
)


library.define_raw(
    f"varlen_attention_tangent(Tensor q, Tensor k, Tensor v, Tensor lse, {_WHERE}, {TANGENT_SCHEMA}, "
    f"{MASK_SCHEMA}, {SCORES_SCHEMA}) -> (Tensor, Tensor)",
    _tangent,
    _tangent_fake,
)


def _differentiable_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest):
    return torch.ops.fdattn.varlen_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, *rest
    )


def _varlen_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k=None, page_table=None, kv_lens=None, q_start=None, kv_start=None, *,
    causal=False, window_left=-1, window_right=-1, kv_block=0, kv_stride=0, scale=None, softcap=0.0,
    alibi_slopes=None, sinks=None, attn_mask=None, dropout_p=0.0, dropout_seed=None,
):  # fmt: skip
    mask = options_to_mask(
        kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    )
    scores, scale = Scores(softcap, alibi_slopes, sinks, attn_mask), default_scale(q, scale)
    if dropout_p and dropout_seed is None:
        dropout_seed = drawn_seed(q)
    dropout = Dropout(dropout_p, dropout_seed)
    if page_table is None:
        where = cu_seqlens_q, cu_seqlens_k
        return attend(_differentiable_forward, q, k, v, mask, scale, scores, dropout, where)
    library.meet(q)
    return library.run_without_derivatives(
        "varlen_attention", "where page_table is given", torch.ops.fdattn.varlen_attention_forward,
        q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, *mask, scale, None, *scores, *dropout,
    )  # fmt: skip


library.define_composite(
    f"varlen_attention(Tensor q, Tensor k, Tensor v, {_WHERE}=None, Tensor? page_table=None, "
    f"{OPTIONS_SCHEMA.format(causal='bool causal=False')}, {SCORES_SCHEMA}) -> (Tensor out, Tensor lse)",
    _varlen_attention,
    autocast_args=3,
)
