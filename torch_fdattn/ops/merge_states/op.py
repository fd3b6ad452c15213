"""The op `fdattn::merge_states`: partial attention states over disjoint keys into one.

merge_states_forward(outs, lses, dtype)                   -> (out, lse)
merge_states_backward(dout, dlse, outs, lses, out, lse)   -> (douts, dlses)
merge_states_tangent(outs, lses, lse, douts, dlses, dtype)  -> tangents of (out, lse)
merge_states(outs, lses, dtype=None)                      -> (out, lse), autograd
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.launch import prepared
from torch_fdattn.ops import library
from torch_fdattn.ops.merge_states.reference import (
    merge_states_backward_reference,
    merge_states_reference,
    merge_states_tangent_reference,
)


def _check(outs: Tensor, lses: Tensor, dtype: torch.dtype | None = None) -> None:
    checks.expect_tensor("outs", outs)
    checks.expect_tensor("lses", lses)
    if dtype is not None and dtype not in checks.DTYPES:
        raise TypeError(f"dtype must be bfloat16, float16, float32 or float64, got {dtype}")
    if outs.dim() != 5:
        raise ValueError(
            "outs must have 5 dimensions (parts, batch, heads, sequence, head_dim), "
            f"got shape {tuple(outs.shape)}"
        )
    if outs.dtype not in checks.DTYPES:
        raise TypeError(
            f"outs must be bfloat16, float16, float32 (or float64 on CPU), got {outs.dtype}"
        )
    checks.expect_shape("lses", lses, outs.shape[:-1], "outs")
    checks.expect_device("lses", lses, outs.device, "outs")
    expected = torch.float64 if outs.dtype == torch.float64 else torch.float32
    if lses.dtype != expected:
        raise TypeError(f"lses must be {expected}, got {lses.dtype}")


def _empty(outs: Tensor, lses: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:], dtype=dtype or outs.dtype), lses.new_empty(lses.shape[1:])


def _forward(outs, lses, dtype=None):
    key = None
    if isinstance(outs, Tensor) and outs.is_cuda:
        key = "merge_states_forward", *prepared.metadata(outs, lses), dtype
    call = prepared.checked(key)
    if call is None:
        _check(outs, lses, dtype)
        if library.use_triton(outs):
            call = prepared.prepare(key)
    out, lse = _empty(outs, lses, dtype)
    if call is None:
        library.launches["merge_states_forward/cpu"] += 1
        merged, merged_lse = merge_states_reference(outs, lses)
        out.copy_(merged)
        lse.copy_(merged_lse)
    elif lse.numel():
        library.launches["merge_states_forward/triton"] += 1
        tensors = outs, lses, out, lse
        if not call.by_driver(tensors):
            from torch_fdattn.ops.merge_states.kernel import merge_launch

            call.run(tensors, (merge_launch(*tensors),))
    return out, lse


def _forward_fake(outs, lses, dtype=None):
    _check(outs, lses, dtype)
    return _empty(outs, lses, dtype)


def merge_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out in `dtype`, lse) of a stack of rows (N, …, D + 1), each out and then lse, merged in the order of the stack.

    Not differentiable. Without the dispatcher where nobody would see the op.
    """
    merge = (
        _forward if library.can_bypass_dispatcher(rows) else torch.ops.fdattn.merge_states_forward
    )
    return merge(rows[..., :-1], rows[..., -1], dtype)


def _check_backward(dout, dlse, outs, lses, out, lse):
    _check(outs, lses)
    for name, tensor, shape in (
        ("dout", dout, outs.shape[1:]), ("out", out, outs.shape[1:]), ("lse", lse, lses.shape[1:]),
    ):  # fmt: skip
        checks.expect_shape(name, tensor, shape, "outs")
        checks.expect_device(name, tensor, outs.device, "outs")
    if dlse is not None:
        checks.expect_shape("dlse", dlse, lse.shape, "lse")


def _empty_gradients(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(outs), lses.new_empty(lses.shape)


def _backward(dout, dlse, outs, lses, out, lse):
    _check_backward(dout, dlse, outs, lses, out, lse)
    douts, dlses = _empty_gradients(outs, lses)
    if library.use_triton(outs):
        from torch_fdattn.ops.merge_states.kernel import launch_merge_backward

        dlse = dlse.contiguous() if dlse is not None else None
        launch_merge_backward(dout, dlse, outs, lses, out, lse.contiguous(), douts, dlses)
    else:
        library.launches["merge_states_backward/cpu"] += 1
        gradients = merge_states_backward_reference(dout, dlse, outs, lses, out, lse)
        douts.copy_(gradients[0])
        dlses.copy_(gradients[1])
    return douts, dlses


def _backward_fake(dout, dlse, outs, lses, out, lse):
    _check_backward(dout, dlse, outs, lses, out, lse)
    return _empty_gradients(outs, lses)


library.define_raw(
    "merge_states_forward(Tensor outs, Tensor lses, ScalarType? dtype=None) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
library.define_raw(
    "merge_states_backward(Tensor dout, Tensor? dlse, Tensor outs, Tensor lses, Tensor out, Tensor lse)"
    " -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _check_tangent(outs, lses, lse, douts, dlses, dtype):
    _check(outs, lses, dtype)
    checks.expect_shape("lse", lse, lses.shape[1:], "lses")
    for name, tangent, of in (("outs_tangent", douts, outs), ("lses_tangent", dlses, lses)):
        if tangent is not None:
            checks.expect_shape(name, tangent, of.shape, name[:4])
            checks.expect_dtype(name, tangent, of.dtype, name[:4])


def _tangent(outs, lses, lse, outs_tangent, lses_tangent, dtype=None):
    _check_tangent(outs, lses, lse, outs_tangent, lses_tangent, dtype)
    library.launches["merge_states_tangent/torch"] += 1
    out, dlse = _empty(outs, lses, dtype)
    found = merge_states_tangent_reference(outs, lses, lse, outs_tangent, lses_tangent)
    out.copy_(found[0])
    dlse.copy_(found[1])
    return out, dlse


def _tangent_fake(outs, lses, lse, outs_tangent, lses_tangent, dtype=None):
    _check_tangent(outs, lses, lse, outs_tangent, lses_tangent, dtype)
    return _empty(outs, lses, dtype)


library.define_raw(
    "merge_states_tangent(Tensor outs, Tensor lses, Tensor lse, Tensor? outs_tangent, Tensor? lses_tangent, "
    "ScalarType? dtype=None) -> (Tensor, Tensor)",
    _tangent,
    _tangent_fake,
)


def _exactly(outs, lses, dtype) -> tuple[Tensor, Tensor]:
    _check(outs, lses, dtype)
    # The gradient of lses takes differences with the merged out: rounded to `dtype` it would be wrong
    # by that rounding, so it is kept in the precision of lse.
    return torch.ops.fdattn.merge_states_forward(outs, lses, lses.dtype)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outs, lses, dtype):
        out, lse = _exactly(outs, lses, dtype)
        ctx.save_for_backward(outs, lses, out, lse)
        ctx.set_materialize_grads(False)
        return out.to(dtype or outs.dtype), lse

    @staticmethod
    def backward(ctx, dout, dlse):
        library.refuse_double_backward("merge_states")
        return *_gradients(ctx, dout, dlse, lambda op, *args: op(*args)), None


def _gradients(ctx, dout, dlse, call) -> tuple[Tensor | None, Tensor | None]:
    if dout is None and dlse is None:
        return None, None
    outs, lses, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    return call(torch.ops.fdattn.merge_states_backward, dout, dlse, outs, lses, out, lse)


class _MergeForward(torch.autograd.Function):
    """`_Merge` with forward mode too, and for torch.func's transforms; its out is in the precision of lse."""

    generate_vmap_rule = True

    @staticmethod
    def forward(outs, lses, dtype):
        return _exactly(outs, lses, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2], *output)
        ctx.save_for_forward(*inputs[:2], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        def once(op, *args):
            return library.Once.apply("merge_states", op, *args)

        return *_gradients(ctx, dout, dlse, once), None

    @staticmethod
    def jvp(ctx, douts, dlses, _):
        outs, lses, _, lse = ctx.saved_tensors
        tangent = torch.ops.fdattn.merge_states_tangent
        return library.Once.apply(
            "merge_states", tangent, outs, lses, lse, douts, dlses, lses.dtype
        )


def _merge_states(outs, lses, *, dtype=None):
    library.load_rules_for(outs)
    if library.in_forward_mode(outs, lses):
        out, lse = _MergeForward.apply(outs, lses, dtype)
        return out.to(dtype or outs.dtype), lse
    if torch.is_grad_enabled() and (library.requires_grad(outs) or library.requires_grad(lses)):
        return _Merge.apply(outs, lses, dtype)
    return torch.ops.fdattn.merge_states_forward(outs, lses, dtype)


# No autocast: states are merged in the precision they come in.
library.define_composite(
    "merge_states(Tensor outs, Tensor lses, *, ScalarType? dtype=None) -> (Tensor out, Tensor lse)",
    _merge_states,
    autocast_args=0,
)
