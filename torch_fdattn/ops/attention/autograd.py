"""Autograd of whatever is attention of q over k and v: reverse mode for all, forward mode where it is asked for.

    attention_tangent(q, k, v, lse, tangents…, mask…, scores…) -> tangents of (out, lse)

Both need only what the forward left, its (global) out and lse. The tangents are computed by torch's own matmuls
in blocks of queries (`attention_tangent_reference`), on GPUs too: memory grows with the length, not its square,
but it takes several times the forward kernel. Neither is differentiable again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.determinism import is_ordered, ordered
from torch_fdattn.ops.options import AttentionOptions, with_dtype
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

_MASKS, _SCORES, _DROPOUT = (len(x._fields) for x in (Mask, Scores, Dropout))
#: Of the positional arguments of the functions below: the mask, the scale and the cap, between v and the slopes.
_NO_TENSORS = _MASKS + 2
#: Those behind v: a mask, the scale, scores and dropout.
_OPTIONS = _MASKS + 1 + _SCORES + _DROPOUT
#: The end of the tangent ops' state: what each of the inputs that may have a tangent has.
TANGENTS = ("q", "k", "v", *Scores._fields[1:])
TANGENT_SCHEMA = ", ".join(f"Tensor? {name}_tangent" for name in TANGENTS)


class _Saved:
    """What a forward left for a derivative, in the order of the raw ops."""

    def __init__(self, ctx) -> None:
        self.q, self.k, self.v, self.out, self.lse, *rest = ctx.saved_tensors
        pointers, tensors, (seed, *where) = rest[:3], rest[3 : 2 + _SCORES], rest[2 + _SCORES :]
        self.where = tuple(where)
        self.name = "varlen_attention" if where else "attention"
        self.mask_and_scale = *pointers, *ctx.options
        self.scores = ctx.softcap, *tensors, ctx.dropout_p, seed


def _save(
    ctx, results: tuple[Tensor, Tensor, Tensor | None], q, k, v, *rest
) -> tuple[Tensor | None, ...]:
    """Notes on ctx what `_Saved` reads, and returns what else is to be saved: tensors."""
    mask, scale, softcap = rest[:_MASKS], rest[_MASKS], rest[_MASKS + 1]
    tensors, rest = rest[_NO_TENSORS : _MASKS + 1 + _SCORES], rest[_MASKS + 1 + _SCORES :]
    dropout_p, dropout_seed, *where = rest
    ctx.ordered = is_ordered()
    ctx.options = *mask[3:], scale
    ctx.softcap, ctx.dropout_p = softcap, dropout_p
    # An unused output must come as None, not as zeros: zeros would be plain tensors among DTensors.
    ctx.set_materialize_grads(False)
    out, lse, kept = results
    return q, k, v, out if kept is None else kept, lse, *mask[:3], *tensors, dropout_seed, *where


#: Queries up to which the output is kept as it was summed, in float32, for a backward of 16 bits. What rounding it costs
#: is the backward's error where a row sees little more than one key beside a sink: there dP - D cancels. Among many
#: rows nothing comes of it.
FEW_QUERIES = 16


def _run(
    raw_forward: Callable, q, k, v, *rest, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse), out in q's dtype or this one."""
    options, where = rest[:_OPTIONS], rest[_OPTIONS:]
    return raw_forward(q, k, v, *where, *with_dtype(options, dtype))


def _run_for_backward(
    raw_forward: Callable, q, k, v, *rest
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, out in float32 where that is kept)."""
    packed = len(rest) > _OPTIONS
    queries = q.shape[-3 if packed else -2] if q.dim() > 2 else None
    # A symbolic number is not asked: that would be a guard.
    if q.dtype.itemsize != 2 or type(queries) is not int or queries > FEW_QUERIES:
        return *_run(raw_forward, q, k, v, *rest), None
    out, lse = _run(raw_forward, q, k, v, *rest, dtype=torch.float32)
    return out.to(q.dtype), lse, out


class _Attend(torch.autograd.Function):
    """Reverse mode of any raw forward whose result is attention.

    Its arguments: raw_forward, q, k, v, the fields of a mask, the scale, the fields of scores and of dropout, and
    (cu_seqlens_q, cu_seqlens_k) of packed sequences. `forward(ctx, …)` rather than `setup_context`, which costs
    33 µs more an eager call.
    """

    @staticmethod
    def forward(ctx, raw_forward, *inputs):
        results = _run_for_backward(raw_forward, *inputs)
        ctx.save_for_backward(*_save(ctx, results, *inputs))
        return results[:2]

    @staticmethod
    def backward(ctx, dout, dlse):
        saved = _Saved(ctx)
        library.refuse_double_backward(saved.name)
        return _gradients(ctx, saved, dout, dlse, lambda op, *args: op(*args))


def _gradients(ctx, saved: _Saved, dout, dlse, call: Callable) -> tuple[Tensor | None, ...]:
    after = (None,) * (_DROPOUT + len(saved.where))
    no_tensors, no_scores = (None,) * _NO_TENSORS, (None,) * (_SCORES - 1)
    if dout is None and dlse is None:
        return None, None, None, None, *no_tensors, *no_scores, *after
    if dout is None:
        dout = torch.zeros_like(saved.out, dtype=saved.q.dtype)
    state = dout, dlse, saved.q, saved.k, saved.v, saved.out, saved.lse, *saved.where
    options = *saved.mask_and_scale, None, *saved.scores
    flags = ctx.needs_input_grad[4 + _NO_TENSORS : 3 + _NO_TENSORS + _SCORES]
    with ordered() if ctx.ordered else nullcontext():
        if not any(flags):
            backward = getattr(torch.ops.fdattn, f"{saved.name}_backward")
            return None, *call(backward, *state, *options), *no_tensors, *no_scores, *after
        backward = getattr(torch.ops.fdattn, f"{saved.name}_backward_all")
        dq, dk, dv, *of_scores = call(backward, *state, *flags, *options)
    of_scores = [
        _placed_as(grad, tensor) if flag else None
        for grad, tensor, flag in zip(of_scores, saved.scores[1:_SCORES], flags, strict=True)
    ]
    return None, dq, dk, dv, *no_tensors, *of_scores, *after


def _placed_as(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Of DTensors: what is a sum over the ranks is reduced, so that optimizers find it as its parameter is."""
    if not hasattr(tensor, "placements"):
        return gradient
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if x.is_partial() else x for x in tensor.placements]
    return gradient.redistribute(placements=placements)


class _AttendForward(torch.autograd.Function):
    """`_Attend` with forward mode too, and for torch.func's transforms, which save nothing but outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(raw_forward, *inputs):
        return _run_for_backward(raw_forward, *inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        saved = _save(ctx, output, *inputs[1:])
        if output[2] is not None:
            ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx, dout, dlse, _):
        saved = _Saved(ctx)

        def once(op, *args):
            return library.Once.apply(saved.name, op, *args)

        return _gradients(ctx, saved, dout, dlse, once)

    @staticmethod
    def jvp(ctx, _, dq, dk, dv, *rest):
        saved = _Saved(ctx)
        tangents = dq, dk, dv, *rest[_NO_TENSORS : _MASKS + 1 + _SCORES]
        op = getattr(torch.ops.fdattn, f"{saved.name}_tangent")
        state = saved.q, saved.k, saved.v, saved.lse, *saved.where
        of_out, of_lse = library.Once.apply(
            saved.name, op, *state, *tangents, *saved.mask_and_scale, *saved.scores
        )
        return of_out, of_lse, None


def attend(
    raw_forward, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions,
    where: tuple[Tensor | None, ...] = (),
):  # fmt: skip
    """Calls a raw forward, through autograd only where a derivative is wanted.

    where: (cu_seqlens_q, cu_seqlens_k) of packed sequences, which are varlen_attention's to differentiate.
    """
    library.load_rules_for(q)
    inputs = q, k, v, *options.to_raw(has_dtype=False), *where
    tensors = q, k, v, *options.scores[1:]
    if library.in_forward_mode(*tensors):
        return _AttendForward.apply(raw_forward, *inputs)[:2]
    if torch.is_grad_enabled() and any(map(library.requires_grad, tensors)):
        return _Attend.apply(raw_forward, *inputs)
    return _run(raw_forward, *inputs)


def check_tangents(inputs: tuple[Tensor | None, ...], tangents: tuple[Tensor | None, ...]) -> None:
    """`inputs` by TANGENTS. A tangent has the shape, dtype and device of what it is of."""
    for name, tensor, tangent in zip(TANGENTS, inputs, tangents, strict=True):
        if tangent is None:
            continue
        if tensor is None:
            raise ValueError(f"{name}_tangent must be None where {name} is, got a tensor")
        checks.expect_shape(f"{name}_tangent", tangent, tensor.shape, name)
        checks.expect_dtype(f"{name}_tangent", tangent, tensor.dtype, name)
        checks.expect_device(f"{name}_tangent", tangent, tensor.device, name)
