"""The raw ops of attention's derivatives.

    attention_backward(dout, dlse, q, k, v, out, lse, mask…, scores…)      -> (dq, dk, dv)
    attention_backward_all(dout, dlse, q, k, v, out, lse, mask…, scores…)  -> (dq, dk, dv, dslopes, dsinks, dmask)
    attention_tangent(q, k, v, lse, tangents…, mask…, scores…)             -> tangents of (out, lse)

The backward serves every op whose forward is attention over some keys, `decode` and the distributed
ops included: it needs only the (global) out and lse. attention_backward_all is the same with gradients of
what modifies the scores, where they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.launch import prepared
from torch_fdattn.launch.tile_counter import tile_counter
from torch_fdattn.ops import library
from torch_fdattn.ops.attention import dispatch
from torch_fdattn.ops.attention.autograd import TANGENT_SCHEMA, TANGENTS, check_tangents
from torch_fdattn.ops.attention.cpu import attention_backward_on_cpu
from torch_fdattn.ops.attention.inputs import (
    check_inputs,
    check_state,
    copy_state,
    empty_gradients,
    empty_state,
)
from torch_fdattn.ops.attention.op import key_of
from torch_fdattn.ops.attention.reference import attention_tangent_reference
from torch_fdattn.ops.determinism import is_deterministic
from torch_fdattn.ops.launch import contiguous_mask
from torch_fdattn.ops.options import MASK_SCHEMA, SCORES_SCHEMA, AttentionOptions
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.row_ranges import empty_ranges
from torch_fdattn.ops.scores import NO_SCORES, Scores

if TYPE_CHECKING:
    from torch_fdattn.launch.launches import Launch
    from torch_fdattn.launch.prepared import PreparedCall

#: What attention_backward_all is told for each of the tensors in `Scores`: whether its gradient is asked for.
FLAGS = tuple(f"bool {name}_gradient" for name in Scores._fields[1:])
STATE_SCHEMA = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"


def _check_backward(dout, dlse, q, k, v, out, lse, options: AttentionOptions) -> None:
    check_inputs(q, k, v, options)
    check_state(dout, dlse, out, lse, q, v, q.shape[:-1])


def _gradients(
    dout, dlse, q, k, v, out, lse, options: AttentionOptions, score_grads: Scores = NO_SCORES,
    key: tuple | None = None, *, in_order: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv); in_order: of sums, on every run (`determinism.py`).

    score_grads: tensors for the gradients of what modifies the scores, None for those that nobody asks for; key: of
    `key_of`, where there are none.
    """
    call = prepared.checked(key)
    if call is None:
        _check_backward(dout, dlse, q, k, v, out, lse, options)
        kernel = backward_kernel(dout, q, k, v, options, score_grads)
        if kernel != "cpu":
            call = prepared.prepare(key, label=f"attention_backward/{kernel}")
    grads = empty_gradients(q, k, v, options.dtype)
    mask, scale, scores, dropout, _ = options
    if call is not None:
        mask, scratch = contiguous_mask(mask), empty_scratch(call, q, in_order)
        ranges = None if call.label.endswith("/hopper") else empty_ranges(scores.attn_mask, q, k)
        dlse, lse = None if dlse is None else dlse.contiguous(), lse.contiguous()
        state = dout, dlse, q, k, v, out, lse
        tensors = *state, *grads, *mask[:3], *scores[1:], dropout.seed, ranges, *scratch
        if call.by_driver(tensors):
            library.launches[call.label] += 1
        else:
            given = options._replace(mask=mask)
            launches = state_launches(
                call, state, given, grads, score_grads, *scratch, ranges=ranges
            )
            call.run(tensors, launches)
        return grads
    library.launches["attention_backward/cpu"] += 1
    *found, of_scores = attention_backward_on_cpu(
        dout, dlse, q, k, v, out, lse, mask, scale, scores, dropout, score_grads=score_grads,
    )  # fmt: skip
    copy_gradients((*grads, *score_grads[1:]), (*found, *of_scores[1:]))
    return grads


def backward_kernel(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, score_grads: Scores,
    packed: Packed | None = None,
) -> str:  # fmt: skip
    """Which computes a checked call, with the gradients of what modifies its scores.

    Packed tensors here and below are by heads (`packed.by_heads`).
    """
    kernel = dispatch.choose("backward", q, k, v, options, packed)
    if kernel == "hopper":
        from torch_fdattn.ops.attention.hopper.backward.launch import gives
        from torch_fdattn.ops.attention.hopper.launch import is_describable

        if not is_describable(dout) or not gives(score_grads, q, options, packed):
            return "triton"
    return kernel


def empty_scratch(
    call: PreparedCall, q: Tensor, in_order: bool, packed: Packed | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What the kernels need beside the call's tensors: terms of rows; sums of dQ, where tiles of keys may add to it in any
    order; and a counter of tiles.
    """
    from torch_fdattn.ops.attention.backward import empty_rows

    rows = empty_rows(q, packed)
    if not call.label.endswith("/hopper"):
        return *rows, None, None
    from torch_fdattn.ops.attention.hopper.backward.launch import zero_sums

    sums = None if in_order else zero_sums(q, rows[0].shape[2])
    return *rows, sums, tile_counter(q.device)


def state_launches(
    call: PreparedCall, state: tuple, options: AttentionOptions, grads: tuple, score_grads: Scores,
    lse2: Tensor, delta: Tensor, sums: Tensor | None, counter: Tensor | None, packed: Packed | None = None, ranges: Tensor | None = None,
) -> Iterable[Launch]:  # fmt: skip
    """state: of STATE_SCHEMA; what follows score_grads is `empty_scratch`."""
    # As in the forward: addresses are no part of a call's key.
    if counter is not None:
        from torch_fdattn.ops.attention.hopper.backward.launch import hopper_backward_launches
        from torch_fdattn.ops.attention.hopper.launch import is_aligned

        dout, _, q, k, v, _, _ = state
        if is_aligned(dout, q, k, v):
            library.launches[call.label] += 1
            return hopper_backward_launches(
                *state, options, *grads, (lse2, delta), sums, counter, packed, score_grads
            )
    from torch_fdattn.ops.attention.backward import backward_launches

    return backward_launches(
        *state, options, *grads, score_grads, packed=packed, rows=(lse2, delta), ranges=ranges
    )


def copy_gradients(grads: tuple[Tensor | None, ...], computed: tuple[Tensor | None, ...]) -> None:
    for grad, value in zip(grads, computed, strict=True):
        if grad is not None:
            grad.copy_(value)


def _backward(dout, dlse, q, k, v, out, lse, *tail):
    state = dout, dlse, q, k, v, out, lse
    in_order = is_deterministic()  # once: another thread may change it
    key = key_of("attention_backward", q, *state, *tail, in_order)
    return _gradients(*state, AttentionOptions.from_raw(tail), key=key, in_order=in_order)


def raw_backward(dout, dlse, q, *tail) -> tuple[Tensor, Tensor, Tensor]:
    """The raw op, and the same without the dispatcher where nobody would see it."""
    if library.can_bypass_dispatcher(q, *[x for x in (dout, dlse, *tail) if isinstance(x, Tensor)]):
        return _backward(dout, dlse, q, *tail)
    return torch.ops.fdattn.attention_backward(dout, dlse, q, *tail)


def _backward_fake(dout, dlse, q, k, v, out, lse, *tail):
    options = AttentionOptions.from_raw(tail)
    _check_backward(dout, dlse, q, k, v, out, lse, options)
    return empty_gradients(q, k, v, options.dtype)


def empty_score_grads(scores: Scores, flags: tuple[bool, ...]) -> Scores:
    """Unwritten gradients of the options' tensors, each in its tensor's shape and dtype."""
    pairs = zip(scores[1:], flags, strict=True)
    return Scores(
        0.0, *(x.new_empty(x.shape) if flag and x is not None else None for x, flag in pairs)
    )


def returned(q: Tensor, score_grads: Scores) -> list[Tensor]:
    """Schemas know no optional results: a gradient that nobody asked for is a tensor without elements."""
    return [q.new_empty(0) if x is None else x for x in score_grads[1:]]


def _backward_all(dout, dlse, q, k, v, out, lse, *tail):
    flags, options = tail[: len(FLAGS)], AttentionOptions.from_raw(tail[len(FLAGS) :])
    score_grads = empty_score_grads(options.scores, flags)
    state = dout, dlse, q, k, v, out, lse
    grads = _gradients(*state, options, score_grads, in_order=is_deterministic())
    return *grads, *returned(q, score_grads)


def _backward_all_fake(dout, dlse, q, k, v, out, lse, *tail):
    flags, tail = tail[: len(FLAGS)], tail[len(FLAGS) :]
    score_grads = empty_score_grads(AttentionOptions.from_raw(tail).scores, flags)
    return *_backward_fake(dout, dlse, q, k, v, out, lse, *tail), *returned(q, score_grads)


library.define_raw(
    f"attention_backward({STATE_SCHEMA}, {MASK_SCHEMA}, ScalarType? grad_dtype, {SCORES_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
library.define_raw(
    f"attention_backward_all({STATE_SCHEMA}, {', '.join(FLAGS)}, {MASK_SCHEMA}, ScalarType? grad_dtype, "
    f"{SCORES_SCHEMA}) -> (Tensor, Tensor, Tensor{', Tensor' * len(FLAGS)})",
    _backward_all,
    _backward_all_fake,
)

_Tangents = tuple[Tensor | None, ...]


def _checked_tangent(q, k, v, lse, tail: tuple) -> tuple[AttentionOptions, _Tangents]:
    """The options, and the tangents by TANGENTS."""
    tangents, tail = tail[: len(TANGENTS)], tail[len(TANGENTS) :]
    options = AttentionOptions.from_raw(tail, has_dtype=False)
    check_inputs(q, k, v, options)
    checks.expect_shape("lse", lse, q.shape[:-1], "q")
    check_tangents((q, k, v, *options.scores[1:]), tangents)
    return options, tangents


def _tangent(q, k, v, lse, *tail):
    options, (dq, dk, dv, *of_scores) = _checked_tangent(q, k, v, lse, tail)
    mask, scale, scores, dropout, _ = options
    library.launches["attention_tangent/torch"] += 1
    out, dlse = empty_state(q, v)
    given = q, k, v, lse, dq, dk, dv, Scores(0.0, *of_scores)
    copy_state(out, dlse, attention_tangent_reference(*given, mask, scale, scores, dropout))
    return out, dlse


def _tangent_fake(q, k, v, lse, *tail):
    _checked_tangent(q, k, v, lse, tail)
    return empty_state(q, v)


library.define_raw(
    f"attention_tangent(Tensor q, Tensor k, Tensor v, Tensor lse, {TANGENT_SCHEMA}, {MASK_SCHEMA}, "
    f"{SCORES_SCHEMA}) -> (Tensor, Tensor)",
    _tangent,
    _tangent_fake,
)
