"""Where differentiation ends: raw ops and second derivatives refuse, with clear errors."""

import pytest
import torch
from torch.autograd import forward_ad

import torch_fdattn

MASK = (None, None, None, -1, -1, 0, 0, 0.25)


def inputs(requires_grad=True):
    return [torch.randn(1, 2, 5, 16, requires_grad=requires_grad) for _ in range(3)]


def raw_calls():
    q, k, v = inputs(False)
    out, lse = torch.ops.fdattn.attention_forward(q, k, v, *MASK, None)
    outs, lses = out[None], lse[None]
    ops = torch.ops.fdattn
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    begins = torch.tensor([0, 5], dtype=torch.int32), None
    varlen = [*begins, None, *MASK, None]
    packed_out, packed_lse = ops.varlen_attention_forward(*packed, *varlen)
    state = [packed_out, None, *packed, packed_out, packed_lse, *begins]
    return {
        "varlen_attention_forward": (ops.varlen_attention_forward, [*packed, *varlen]),
        "varlen_attention_backward": (ops.varlen_attention_backward, [*state, *MASK, None]),
        "attention_forward": (ops.attention_forward, [q, k, v, *MASK, None]),
        "attention_backward": (ops.attention_backward, [out, None, q, k, v, out, lse, *MASK, None]),
        "attention_backward_all": (
            ops.attention_backward_all,
            [out, None, q, k, v, out, lse, False, True, False, *MASK, None],
        ),
        "attention_tangent": (ops.attention_tangent, [q, k, v, lse, q, *[None] * 5, *MASK]),
        "varlen_attention_tangent": (
            ops.varlen_attention_tangent,
            [*packed, packed_lse, *begins, packed[0], *[None] * 5, *MASK],
        ),
        "merge_states_tangent": (ops.merge_states_tangent, [outs, lses, lse, outs, None]),
        "decode_forward": (ops.decode_forward, [q, k, v, *MASK, None]),
        "merge_states_forward": (ops.merge_states_forward, [outs, lses, None]),
        "merge_states_backward": (ops.merge_states_backward, [out, None, outs, lses, out, lse]),
    }


COMPOSITES = {
    "varlen_attention": lambda q, k, v: torch_fdattn.varlen_attention(
        *(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 2, 5], dtype=torch.int32)
    ),
    "attention": lambda q, k, v: torch_fdattn.attention(q, k, v),
    "decode": lambda q, k, v: torch_fdattn.decode(q, k, v),
    "merge_states": lambda q, k, v: torch_fdattn.merge_states(
        torch.stack([q, k]), torch.stack([k, v])[..., 0]
    ),
}


@pytest.mark.parametrize("name", raw_calls())
def test_raw_ops_refuse_autograd(name):
    op, args = raw_calls()[name]
    args[0] = args[0].clone().requires_grad_()
    with pytest.raises(
        NotImplementedError, match=f"fdattn.{name} is a raw op and not differentiable"
    ):
        op(*args)
    with torch.no_grad():
        op(*args)


@pytest.mark.parametrize("name", raw_calls())
def test_raw_ops_refuse_forward_mode(name):
    op, args = raw_calls()[name]
    with forward_ad.dual_level():
        op(*args)  # no tangent, no objection
        args[0] = forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        with pytest.raises(
            NotImplementedError, match=f"fdattn.{name} has no forward-mode derivative"
        ):
            op(*args)


@pytest.mark.parametrize("name", COMPOSITES)
def test_double_backward_is_an_error(name):
    """A gradient penalty would otherwise take dq for a constant and be silently wrong."""
    q, k, v = inputs()
    out, lse = COMPOSITES[name](q, k, v)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), create_graph=True)


@pytest.mark.parametrize("name", COMPOSITES)
def test_no_graph_without_gradients(name):
    out, lse = COMPOSITES[name](*inputs(False))
    assert not out.requires_grad
    assert not lse.requires_grad
    with torch.no_grad():
        out, lse = COMPOSITES[name](*inputs())
    assert not out.requires_grad
    with torch.inference_mode():
        COMPOSITES[name](*inputs())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_input_alone_may_require_gradients(which):
    tensors = inputs(False)
    tensors[which].requires_grad_()
    out, lse = torch_fdattn.attention(*tensors)
    (out.sum() + lse.sum()).backward()
    assert [x.grad is not None for x in tensors] == [i == which for i in range(3)]


def test_gradients_keep_the_inputs_layout():
    """dq, dk, dv in the memory order of q, k, v: no copy when they flow on into a projection."""
    tensors = [torch.randn(2, 5, 3, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    out, _ = torch_fdattn.attention(*tensors)
    assert out.stride() == tensors[0].stride()
    for x, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
        assert gradient.stride() == x.stride()
