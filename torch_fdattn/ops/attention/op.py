"""The op `fdattn::attention`: raw forward and backward, and the differentiable composite over them.

    attention_forward(q, k, v, mask…)                         -> (out, lse)
    attention_backward(dout, dlse, q, k, v, out, lse, mask…)  -> (dq, dk, dv)
    attention(q, k, v, …)                                     -> (out, lse), autograd and autocast

The backward serves every op whose forward is attention over some keys, `decode` and the distributed
ops included: it needs only the (global) out and lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.reference import attention_backward_reference, attention_reference
from torch_fdattn.ops.positions import FAR, Mask

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


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, names: tuple[str, str, str]
) -> None:
    """What both attention and decode ask of their inputs; metadata only."""
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
    masked = mask.window_left >= 0 or mask.window_right >= 0
    checks.check_positions(
        mask.q_start, mask.kv_start, mask.kv_block, mask.kv_stride, q, k.shape[2], masked
    )
    checks.check_scale(scale)


def empty_state(q: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Unwritten (out, lse): out in q's memory layout, lse contiguous; for kernels and fakes alike."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q, dtype=out_dtype or q.dtype), q.new_empty(
        q.shape[:-1], dtype=lse_dtype
    )


def _forward(q, k, v, *rest):
    *mask, scale, out_dtype = rest
    mask = Mask(*mask).clamped
    check_inputs(q, k, v, mask, scale, ("q", "k", "v"))
    out, lse = empty_state(q, out_dtype)
    if library.use_triton(q):
        from torch_fdattn.ops.attention.forward import launch_forward

        launch_forward(q, k, v, mask, scale, out, lse)
    else:
        library.launches["attention_forward/reference"] += 1
        copy_state(out, lse, attention_reference(q, k, v, mask, scale))
    return out, lse


def _forward_fake(q, k, v, *rest):
    *mask, scale, out_dtype = rest
    check_inputs(q, k, v, Mask(*mask), scale, ("q", "k", "v"))
    return empty_state(q, out_dtype)


def copy_state(out: Tensor, lse: Tensor, state: tuple[Tensor, Tensor]) -> None:
    out.copy_(state[0])
    lse.copy_(state[1])


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, grad_dtype: torch.dtype | None):
    return tuple(torch.empty_like(x, dtype=grad_dtype or x.dtype) for x in (q, k, v))


def _check_backward(dout, dlse, q, k, v, out, lse, mask, scale):
    check_inputs(q, k, v, mask, scale, ("q", "k", "v"))
    for name, tensor, shape in (
        ("dout", dout, q.shape), ("out", out, q.shape),
    ):  # fmt: skip
        checks.expect_shape(name, tensor, shape, "q")
        checks.expect_device(name, tensor, q.device, "q")
    checks.expect_dtype("dout", dout, q.dtype, "q")
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is not None:
            checks.expect_shape(name, tensor, q.shape[:-1], "q")
            checks.expect_dtype(name, tensor, lse_dtype, "every lse of such inputs")
            checks.expect_device(name, tensor, q.device, "q")


def _backward(dout, dlse, q, k, v, out, lse, *rest):
    *mask, scale, grad_dtype = rest
    mask = Mask(*mask).clamped
    _check_backward(dout, dlse, q, k, v, out, lse, mask, scale)
    dq, dk, dv = _empty_gradients(q, k, v, grad_dtype)
    if library.use_triton(q):
        from torch_fdattn.ops.attention.backward import launch_backward

        dlse = dlse.contiguous() if dlse is not None else None
        launch_backward(dout, dlse, q, k, v, out, lse.contiguous(), mask, scale, dq, dk, dv)
    else:
        library.launches["attention_backward/reference"] += 1
        gradients = attention_backward_reference(dout, dlse, q, k, v, out, lse, mask, scale)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)
    return dq, dk, dv


def _backward_fake(dout, dlse, q, k, v, out, lse, *rest):
    *mask, scale, grad_dtype = rest
    _check_backward(dout, dlse, q, k, v, out, lse, Mask(*mask), scale)
    return _empty_gradients(q, k, v, grad_dtype)


library.define_raw(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {MASK_SCHEMA}, ScalarType? out_dtype) "
    "-> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
library.define_raw(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {MASK_SCHEMA}, ScalarType? grad_dtype) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


_NO_GRADIENTS = (None,) * (len(Mask._fields) + 1)  # of the mask and the scale


class _Attend(torch.autograd.Function):
    """Autograd of any raw forward whose result is attention: the backward needs only (out, lse).

    `forward(ctx, …)` rather than `setup_context`, which costs 33 µs more an eager call.
    """

    @staticmethod
    def forward(ctx, raw_forward, q, k, v, *mask_and_scale):
        out, lse = raw_forward(q, k, v, *mask_and_scale, None)
        ctx.save_for_backward(q, k, v, out, lse, *mask_and_scale[:3])
        ctx.options = mask_and_scale[3:]
        # An unused output must come as None, not as zeros: zeros would be plain tensors among DTensors.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        library.refuse_double_backward("attention")
        if dout is None and dlse is None:
            return None, None, None, None, *_NO_GRADIENTS
        q, k, v, out, lse, *pointers = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv = torch.ops.fdattn.attention_backward(
            dout, dlse, q, k, v, out, lse, *pointers, *ctx.options, None
        )
        return None, dq, dk, dv, *_NO_GRADIENTS


def attend(raw_forward, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float):
    """Calls a raw forward, through autograd only where a gradient is wanted."""
    library.meet(q)
    if torch.is_grad_enabled() and any(library.requires_grad(x) for x in (q, k, v)):
        return _Attend.apply(raw_forward, q, k, v, *mask, scale)
    return raw_forward(q, k, v, *mask, scale, None)


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
    # Where q is no (B, H, S, D) tensor, the raw op's checks say so.
    return q.shape[3] ** -0.5 if q.dim() == 4 and q.shape[3] else 1.0


def _attention(
    q, k, v, kv_lens=None, q_start=None, kv_start=None, *, causal=False, window_left=-1,
    window_right=-1, kv_block=0, kv_stride=0, scale=None,
):  # fmt: skip
    mask = options_to_mask(
        kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
    )
    return attend(torch.ops.fdattn.attention_forward, q, k, v, mask, default_scale(q, scale))


library.define_composite(
    f"attention(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA.format(causal='bool causal=False')}) "
    "-> (Tensor out, Tensor lse)",
    _attention,
    autocast_args=3,
)
