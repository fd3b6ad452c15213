"""The op `fdattn::attention`: raw forward and backward, and the differentiable composite over them.

    attention_forward(q, k, v, mask…, scores…)                             -> (out, lse)
    attention_backward(dout, dlse, q, k, v, out, lse, mask…, scores…)      -> (dq, dk, dv)
    attention_backward_all(dout, dlse, q, k, v, out, lse, mask…, scores…)  -> (dq, dk, dv, dslopes, dsinks, dmask)
    attention_tangent(q, k, v, lse, tangents…, mask…, scores…)             -> tangents of (out, lse)
    attention(q, k, v, …)                            -> (out, lse), autograd and autocast

The backward serves every op whose forward is attention over some keys, `decode` and the distributed
ops included: it needs only the (global) out and lse. attention_backward_all is the same with gradients of
what modifies the scores, where they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.launch import prepared
from torch_fdattn.launch.prepared import PreparedCall
from torch_fdattn.ops import library
from torch_fdattn.ops.attention import dispatch, tuning
from torch_fdattn.ops.attention.autograd import TANGENT_SCHEMA, TANGENTS, attend, check_tangents
from torch_fdattn.ops.attention.dropout import NO_DROPOUT, Dropout
from torch_fdattn.ops.attention.reference import (
    attention_backward_reference,
    attention_reference,
    attention_tangent_reference,
)
from torch_fdattn.ops.determinism import seed_generator
from torch_fdattn.ops.launch import contiguous_mask
from torch_fdattn.ops.positions import FAR, Mask
from torch_fdattn.ops.row_ranges import empty_ranges
from torch_fdattn.ops.scores import NO_SCORES, Scores

#: The tail of every raw op's schema, in the order of `positions.Mask` and then scale.
MASK_SCHEMA = (
    "Tensor? kv_lens, Tensor? q_start, Tensor? kv_start, int window_left, int window_right, "
    "SymInt kv_block, SymInt kv_stride, float scale"
)
#: The tail of every composite's schema.
OPTIONS_SCHEMA = (
    "Tensor? kv_lens=None, Tensor? q_start=None, Tensor? kv_start=None, *, {causal}, "
    "int window_left=-1, int window_right=-1, SymInt kv_block=0, SymInt kv_stride=0, "
    "float? scale=None"
)
#: The end of attention's schemas, in the order of `scores.Scores` and then `dropout.Dropout`.
SCORES_SCHEMA = (
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, "
    "float dropout_p=0.0, Tensor? dropout_seed=None"
)
_MASKS, _SCORES = len(Mask._fields), len(Scores._fields)


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, names: tuple[str, str, str],
    scores: Scores = NO_SCORES, dropout: Dropout = NO_DROPOUT,
) -> None:  # fmt: skip
    """What attention asks of its inputs; metadata only."""
    checks.check_qkv(q, k, v, names)
    for name, tensor, what, most in (
        (names[0], q, "queries", FAR), (names[1], k, "keys", 2 * FAR),
    ):  # fmt: skip
        # Symbolic lengths are checked when the compiled op runs.
        if isinstance(tensor.shape[2], int) and tensor.shape[2] >= most:
            raise ValueError(
                f"{name} must hold fewer than 2**{most.bit_length() - 1} {what} a sequence, got "
                f"{tensor.shape[2]}"
            )
    checks.check_lengths("kv_lens", mask.kv_lens, q, bound=k.shape[2])
    checks.check_window(mask.window_left, mask.window_right)
    positions = mask.window_left >= 0 or mask.window_right >= 0 or scores.alibi_slopes is not None
    masked = positions or dropout.p > 0
    checks.check_positions(
        mask.q_start, mask.kv_start, mask.kv_block, mask.kv_stride, q, k.shape[2], masked
    )
    checks.check_scale(scale)
    checks.check_scores(scores.softcap, scores.alibi_slopes, scores.sinks, q)
    checks.check_attn_mask(scores.attn_mask, q, (*q.shape[:3], k.shape[2]))
    checks.check_dropout(dropout.p, dropout.seed, q)


def empty_state(
    q: Tensor,
    v: Tensor,
    out_dtype: torch.dtype | None = None,
    lse_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Unwritten (out, lse): out in q's order of memory, lse contiguous; for kernels and fakes alike."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(q.shape[:-1] if lse_shape is None else lse_shape, dtype=lse_dtype)
    v_dim, last = v.shape[-1], q.dim() - 1
    if v_dim == q.shape[-1]:
        return torch.empty_like(q, dtype=out_dtype or q.dtype), lse
    order = sorted(range(last), key=lambda dim: -q.stride(dim))
    out = torch.empty_permuted(
        (*q.shape[:-1], v_dim), (*order, last), dtype=out_dtype or q.dtype, device=q.device
    )
    return out, lse


class Call(NamedTuple):
    """What follows the tensors in a raw op's arguments."""

    mask: Mask
    scale: float
    dtype: torch.dtype | None
    scores: Scores
    dropout: Dropout


def call_of(rest: tuple) -> Call:
    """Of positional arguments; those that are defaults at the end do not come."""
    scores = rest[_MASKS + 2 :]
    dropout = Dropout(*scores[_SCORES:])
    mask = Mask(*rest[:_MASKS])
    return Call(mask, rest[_MASKS], rest[_MASKS + 1], Scores(*scores[:_SCORES]), dropout)


def _forward(q, k, v, *rest):
    key = key_of("attention_forward", q, k, v, *rest)
    call = prepared.checked(key)
    mask, scale, out_dtype, scores, dropout = call_of(rest)
    mask = mask.clamped
    if call is None:
        check_inputs(q, k, v, mask, scale, ("q", "k", "v"), scores, dropout)
        call = _prepared_forward(key, q, v, mask, scores, dropout)
    return _attend(call, q, k, v, mask, scale, out_dtype, scores, dropout)


def _prepared_forward(key, q, v, mask: Mask, scores: Scores, dropout) -> PreparedCall | None:
    """For a call that has passed its checks; None: it is the reference's."""
    way = dispatch.choose("forward", q, v, mask, scores, dropout)
    return prepared.prepare(key) if way == "triton" else None


def _attend(
    call: PreparedCall | None, q, k, v, mask: Mask, scale, out_dtype=None, scores=NO_SCORES,
    dropout=NO_DROPOUT,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = empty_state(q, v, out_dtype)
    if call is None:
        library.launches["attention_forward/reference"] += 1
        copy_state(out, lse, attention_reference(q, k, v, mask, scale, scores, None, dropout))
        return out, lse
    from torch_fdattn.ops.attention.forward import forward_launches

    mask, ranges = contiguous_mask(mask), empty_ranges(scores.attn_mask, q, k)
    tensors = q, k, v, out, lse, *mask[:3], *scores[1:], dropout.seed, ranges
    if call.by_driver(tensors):
        library.launches["attention_forward/triton"] += 1
    else:
        launches = forward_launches(q, k, v, mask, scale, out, lse, scores, dropout, ranges=ranges)
        call.run(tensors, launches)
    return out, lse


def key_of(name: str, q: Tensor, *others) -> tuple | None:
    """The key of a call with these tensors and options; None: it is not to be remembered."""
    # What else decides a launch: tiles that are not the table's, and torch's setting of tf32.
    if not q.is_cuda or tuning.state.active or q.dtype == torch.float32:
        return None
    return (
        name,
        *prepared.metadata(q),
        *[prepared.metadata(x)[0] if isinstance(x, Tensor) else x for x in others],
    )


def attend_prepared(
    call: PreparedCall | None, q, k, v, options: tuple
) -> tuple[Tensor, Tensor] | None:
    """By the driver; None: `attend_directly`. options: tensors of mask and scores, the explicit mask the last."""
    # The kernels take copies of strided lengths, which are not these.
    if call is None or not all(x is None or x.is_contiguous() for x in options[:3]):
        return None
    state, ranges = empty_state(q, v), empty_ranges(options[-1], q, k)
    if not call.by_driver((q, k, v, *state, *options, None, ranges)):
        return None
    library.launches["attention_forward/triton"] += 1
    return state


def attend_directly(
    key: tuple | None, q, k, v, mask: Mask, scale: float, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The raw forward's kernel where nobody sees the op; mask is clamped."""
    call = prepared.checked(key)
    if call is None:
        check_inputs(q, k, v, mask, scale, ("q", "k", "v"), scores)
        call = _prepared_forward(key, q, v, mask, scores, NO_DROPOUT)
    return _attend(call, q, k, v, mask, scale, scores=scores)


def _forward_fake(q, k, v, *rest):
    mask, scale, out_dtype, scores, dropout = call_of(rest)
    check_inputs(q, k, v, mask, scale, ("q", "k", "v"), scores, dropout)
    return empty_state(q, v, out_dtype)


def copy_state(out: Tensor, lse: Tensor, state: tuple[Tensor, Tensor]) -> None:
    out.copy_(state[0])
    lse.copy_(state[1])


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, grad_dtype: torch.dtype | None):
    return tuple(torch.empty_like(x, dtype=grad_dtype or x.dtype) for x in (q, k, v))


def _check_backward(dout, dlse, q, k, v, out, lse, call: Call):
    names = ("q", "k", "v")
    check_inputs(q, k, v, call.mask, call.scale, names, call.scores, call.dropout)
    for name, tensor in (("dout", dout), ("out", out)):
        checks.expect_shape(name, tensor, (*q.shape[:3], v.shape[3]), "q and v")
        checks.expect_device(name, tensor, q.device, "q")
    checks.expect_dtype("dout", dout, q.dtype, "q")
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is not None:
            checks.expect_shape(name, tensor, q.shape[:-1], "q")
            checks.expect_dtype(name, tensor, lse_dtype, "every lse of such inputs")
            checks.expect_device(name, tensor, q.device, "q")


def _gradients(
    dout, dlse, q, k, v, out, lse, rest, wanted: Scores, key: tuple | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); `wanted` holds the tensors for the other gradients, None where none is wanted.

    key: of `key_of`, where no other is.
    """
    known = prepared.checked(key)
    call = call_of(rest)
    call = call._replace(mask=call.mask.clamped)
    mask, scale, grad_dtype, scores, dropout = call
    if known is None:
        _check_backward(dout, dlse, q, k, v, out, lse, call)
        if dispatch.choose("backward", q, v, mask, scores, dropout) == "triton":
            known = prepared.prepare(key)
    targets = empty_gradients(q, k, v, grad_dtype)
    if known is not None:
        from torch_fdattn.ops.attention.backward import backward_launches, empty_rows

        mask, rows = contiguous_mask(mask), empty_rows(q)
        ranges = empty_ranges(scores.attn_mask, q, k)
        dlse, lse = None if dlse is None else dlse.contiguous(), lse.contiguous()
        state = dout, dlse, q, k, v, out, lse
        tensors = *state, *targets, *rows, *mask[:3], *scores[1:], dropout.seed, ranges
        if known.by_driver(tensors):
            library.launches["attention_backward/triton"] += 1
        else:
            launches = backward_launches(
                *state, mask, scale, *targets, scores, wanted, dropout, rows=rows, ranges=ranges
            )
            known.run(tensors, launches)
        return targets
    library.launches["attention_backward/reference"] += 1
    *found, of_scores = attention_backward_reference(
        dout, dlse, q, k, v, out, lse, mask, scale, scores, dropout
    )
    for target, gradient in zip((*targets, *wanted[1:]), (*found, *of_scores[1:]), strict=True):
        if target is not None:
            target.copy_(gradient)
    return targets


def _backward(dout, dlse, q, k, v, out, lse, *rest):
    state = dout, dlse, q, k, v, out, lse
    key = key_of("attention_backward", q, *state, *rest)
    return _gradients(*state, rest, NO_SCORES, key)


def _backward_fake(dout, dlse, q, k, v, out, lse, *rest):
    call = call_of(rest)
    _check_backward(dout, dlse, q, k, v, out, lse, call)
    return empty_gradients(q, k, v, call.dtype)


def wanted_of(scores: Scores, flags: tuple[bool, ...]) -> Scores:
    """Unwritten gradients of the options' tensors, each in its tensor's shape and dtype."""
    pairs = zip(scores[1:], flags, strict=True)
    return Scores(
        0.0, *(x.new_empty(x.shape) if flag and x is not None else None for x, flag in pairs)
    )


def or_nothing(q: Tensor, wanted: Scores) -> list[Tensor]:
    """Schemas know no optional results: what is not wanted is a tensor without elements."""
    return [q.new_empty(0) if x is None else x for x in wanted[1:]]


def _backward_all(dout, dlse, q, k, v, out, lse, *rest):
    flags, rest = rest[: len(GRADIENTS)], rest[len(GRADIENTS) :]
    wanted = wanted_of(call_of(rest).scores, flags)
    return *_gradients(dout, dlse, q, k, v, out, lse, rest, wanted), *or_nothing(q, wanted)


def _backward_all_fake(dout, dlse, q, k, v, out, lse, *rest):
    flags, rest = rest[: len(GRADIENTS)], rest[len(GRADIENTS) :]
    wanted = wanted_of(call_of(rest).scores, flags)
    return *_backward_fake(dout, dlse, q, k, v, out, lse, *rest), *or_nothing(q, wanted)


#: What attention_backward_all is told for each of the tensors in `Scores`.
GRADIENTS = tuple(f"bool {name}_gradient" for name in Scores._fields[1:])
STATE_SCHEMA = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"

library.define_raw(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {MASK_SCHEMA}, ScalarType? out_dtype, "
    f"{SCORES_SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
library.define_raw(
    f"attention_backward({STATE_SCHEMA}, {MASK_SCHEMA}, ScalarType? grad_dtype, {SCORES_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
library.define_raw(
    f"attention_backward_all({STATE_SCHEMA}, {', '.join(GRADIENTS)}, {MASK_SCHEMA}, ScalarType? grad_dtype, "
    f"{SCORES_SCHEMA}) -> (Tensor, Tensor, Tensor{', Tensor' * len(GRADIENTS)})",
    _backward_all,
    _backward_all_fake,
)


def _checked_tangent(q, k, v, lse, rest: tuple) -> tuple[Call, tuple[Tensor | None, ...]]:
    """The call, and the tangents by TANGENTS."""
    tangents, rest = rest[: len(TANGENTS)], rest[len(TANGENTS) :]
    call = call_of((*rest[: _MASKS + 1], None, *rest[_MASKS + 1 :]))
    call = call._replace(mask=call.mask.clamped)
    check_inputs(q, k, v, call.mask, call.scale, ("q", "k", "v"), call.scores, call.dropout)
    checks.expect_shape("lse", lse, q.shape[:-1], "q")
    check_tangents((q, k, v, *call.scores[1:]), tangents)
    return call, tangents


def _tangent(q, k, v, lse, *rest):
    (mask, scale, _, scores, dropout), (dq, dk, dv, *of_scores) = _checked_tangent(
        q, k, v, lse, rest
    )
    library.launches["attention_tangent/torch"] += 1
    out, dlse = empty_state(q, v)
    given = q, k, v, lse, dq, dk, dv, Scores(0.0, *of_scores)
    copy_state(out, dlse, attention_tangent_reference(*given, mask, scale, scores, dropout))
    return out, dlse


def _tangent_fake(q, k, v, lse, *rest):
    _checked_tangent(q, k, v, lse, rest)
    return empty_state(q, v)


library.define_raw(
    f"attention_tangent(Tensor q, Tensor k, Tensor v, Tensor lse, {TANGENT_SCHEMA}, {MASK_SCHEMA}, "
    f"{SCORES_SCHEMA}) -> (Tensor, Tensor)",
    _tangent,
    _tangent_fake,
)


def options_to_mask(
    kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
) -> Mask:  # fmt: skip
    """A composite's keywords as a mask; causal is a right window of 0."""
    checks.check_window(window_left, window_right)
    right = 0 if causal else window_right
    return Mask(kv_lens, q_start, kv_start, window_left, right, kv_block, kv_stride).clamped


def default_scale(q: Tensor, scale: float | None) -> float:
    checks.expect_tensor("q", q)
    if scale is not None:
        return scale
    # Where q has another rank than the op's, the raw op's checks say so.
    return q.shape[-1] ** -0.5 if q.dim() in (3, 4) and q.shape[-1] else 1.0


def _attention(
    q, k, v, kv_lens=None, q_start=None, kv_start=None, *, causal=False, window_left=-1,
    window_right=-1, kv_block=0, kv_stride=0, scale=None, softcap=0.0, alibi_slopes=None, sinks=None,
    attn_mask=None, dropout_p=0.0, dropout_seed=None,
):  # fmt: skip
    mask = options_to_mask(
        kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    )
    scores = Scores(softcap, alibi_slopes, sinks, attn_mask)
    scale = default_scale(q, scale)
    if dropout_p and dropout_seed is None:
        dropout_seed = drawn_seed(q)
    dropout = Dropout(dropout_p, dropout_seed)
    return attend(torch.ops.fdattn.attention_forward, q, k, v, mask, scale, scores, dropout)


def _dropout_seed(like: Tensor) -> Tensor:
    generator = seed_generator(like.device)
    limits = -(2**63), 2**63 - 1
    return torch.randint(*limits, (2,), device=like.device, dtype=torch.int64, generator=generator)


def drawn_seed(q: Tensor) -> Tensor:
    """Dropout's seed of a call that is given none."""
    # torch's own op knows vmap's randomness: one seed for all, one for each, or refused.
    return _dropout_seed(q) if library.in_vmap() else torch.ops.fdattn.dropout_seed(q.detach())


# An op of its own: what it draws from is known only when it runs, not when a graph is traced.
library.define_raw(
    "dropout_seed(Tensor like) -> Tensor",
    _dropout_seed,
    lambda like: like.new_empty(2, dtype=torch.int64),
    seeded=True,
)


library.define_composite(
    f"attention(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA.format(causal='bool causal=False')}, "
    f"{SCORES_SCHEMA}) -> (Tensor out, Tensor lse)",
    _attention,
    autocast_args=3,
)
