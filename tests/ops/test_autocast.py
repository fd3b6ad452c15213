"""Autocast casts q, k and v alone; everything else keeps its precision."""

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import make_tensor

# The interpreter's bfloat16 is wrong ; float16 shows the same.
HALF = torch.float16
OPS = pytest.mark.parametrize("op", [torch_fdattn.attention, torch_fdattn.decode])
pytestmark = pytest.mark.interpreter


def qkv(device, *dtypes):
    return [make_tensor((2, 2, 5, 16), dtype=dtype, device=device) for dtype in dtypes]


@OPS
def test_casts_q_k_v_and_nothing_else(op, device):
    q, k, v = qkv(device, *3 * [torch.float32])
    lens = torch.tensor([5, 3], dtype=torch.int32, device=device)
    with torch.autocast(device, dtype=HALF):
        out, lse = op(q, k, v, lens)
    assert (out.dtype, lse.dtype, lens.dtype) == (HALF, torch.float32, torch.int32)
    exact = op(q.to(HALF), k.to(HALF), v.to(HALF), lens)
    assert torch.equal(out, exact[0])
    assert torch.equal(lse, exact[1])


@OPS
def test_makes_mixed_inputs_equal(op, device):
    """A half-precision cache under a projection in fp32, as mixed precision leaves them."""
    q, k, v = qkv(device, torch.float32, HALF, HALF)
    with pytest.raises(
        TypeError, match=r"k.* must have dtype torch\.float32 like q, got torch\.float16"
    ):
        op(q, k, v)
    with torch.autocast(device, dtype=HALF):
        assert op(q, k, v)[0].dtype == HALF


@OPS
def test_gradients_come_back_in_the_inputs_dtype(op, device):
    inputs = [x.requires_grad_() for x in qkv(device, *3 * [torch.float32])]
    with torch.autocast(device, dtype=HALF):
        out, lse = op(*inputs)
    for gradient in torch.autograd.grad(out.float().sum() + lse.sum(), inputs):
        assert gradient.dtype == torch.float32


@OPS
def test_disabled_autocast_changes_nothing(op, device):
    q, k, v = qkv(device, *3 * [torch.float32])
    with torch.autocast(device, dtype=HALF), torch.autocast(device, enabled=False):
        assert op(q, k, v)[0].dtype == torch.float32


@OPS
def test_float64_stays(op):
    with torch.autocast("cpu", dtype=HALF):
        out, lse = op(*qkv("cpu", *3 * [torch.float64]))
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


def test_default_autocast_dtype(device):
    if device == "cpu" and torch_fdattn.ops.library.INTERPRET:
        pytest.skip("the interpreter has no bfloat16")
    with torch.autocast(device):
        out, _ = torch_fdattn.attention(*qkv(device, *3 * [torch.float32]))
    assert out.dtype == torch.get_autocast_dtype(device)


def test_merge_states_is_left_alone(device):
    outs, lses = (
        make_tensor((3, 1, 2, 5, 16), device=device),
        torch.randn(3, 1, 2, 5, device=device),
    )
    with torch.autocast(device, dtype=HALF):
        out, lse = torch_fdattn.merge_states(outs, lses)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def test_raw_ops_are_left_alone(device):
    with torch.autocast(device, dtype=HALF):
        out, _ = torch.ops.fdattn.attention_forward(
            *qkv(device, *3 * [torch.float32]), None, None, None, -1, -1, 0, 0, 0.25, None
        )
    assert out.dtype == torch.float32
