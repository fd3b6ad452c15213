"""The references are the definition: against the oracle in fp64, and their gradients by gradcheck."""

import dataclasses

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.attention.reference import (
    QUERY_BLOCK,
    attention_backward_reference,
    attention_reference,
)
from torch_fdattn.ops.positions import Mask
from torch_fdattn.testing import draw_attention, expected_attention, make_tensor


@pytest.mark.parametrize("seed", range(100))
def test_fp64_agrees_with_the_oracle(seed):
    case = dataclasses.replace(draw_attention(seed), dtype=torch.float64)
    inputs = [x.requires_grad_() for x in case.inputs("cpu")]
    out, lse = torch_fdattn.attention(*inputs, **case.options("cpu"))
    dq, dk, dv = torch.autograd.grad([out, lse], inputs, case.output_gradients("cpu"))
    expected_attention(case, "cpu").check(lse, out=out, dq=dq, dk=dk, dv=dv)


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "lengths": {"kv_lens": (4, 7)},
    "sharded": {
        "causal": True,
        "q_start": (9, 14),
        "kv_start": (0, 2),
        "kv_block": 2,
        "kv_stride": 4,
    },
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(
    "op", [torch_fdattn.attention, pytest.param(torch_fdattn.decode, marks=pytest.mark.slow)]
)
def test_gradcheck_of_out_and_lse(op, options):
    options = {
        name: torch.tensor(value, dtype=torch.int32)
        if name in ("kv_lens", "q_start", "kv_start")
        else value
        for name, value in options.items()
    }
    q = torch.randn(2, 2, 3, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 1, 7, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    # A random projection of the derivative, not each of its columns.
    assert torch.autograd.gradcheck(lambda *x: op(*x, **options), (q, k, v), fast_mode=True)


def test_gradcheck_where_some_rows_see_nothing():
    """Finite differences of lse = -inf mean nothing; everything else must still be right."""
    lens = torch.tensor([0, 3], dtype=torch.int32)
    q = torch.randn(2, 2, 5, 16, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 1, 7, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def finite(*x):
        out, lse = torch_fdattn.attention(*x, lens, causal=True)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(finite, (q, k, v), fast_mode=True)


def test_many_query_blocks():
    """Longer than the reference's block of rows, with a ragged last one."""
    length = 2 * QUERY_BLOCK + 37
    q, k, v = (make_tensor((1, 2, length, 16), dtype=torch.float64) for _ in range(3))
    mask = Mask(window_right=0)
    out, lse = attention_reference(q, k, v, mask, 0.25)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, exact)
    dout = torch.randn_like(out)
    *found, _ = attention_backward_reference(dout, None, q, k, v, out, lse, mask, 0.25)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(tuple(found), torch.autograd.grad(exact, inputs, dout))


def test_backward_of_a_part_with_the_global_state():
    """P comes from the saved lse, so two halves of the keys give exactly the halves of the gradients."""
    q, k, v = (make_tensor((1, 2, 6, 16), dtype=torch.float64) for _ in range(3))
    mask, dout, dlse = Mask(), torch.randn(1, 2, 6, 16).double(), torch.randn(1, 2, 6).double()
    out, lse = attention_reference(q, k, v, mask, 0.25)
    whole = attention_backward_reference(dout, dlse, q, k, v, out, lse, mask, 0.25)
    parts = [
        attention_backward_reference(
            dout, dlse, q, k[:, :, keys], v[:, :, keys], out, lse, mask, 0.25
        )
        for keys in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(whole[0], parts[0][0] + parts[1][0])
    for i in (1, 2):
        torch.testing.assert_close(whole[i], torch.cat([parts[0][i], parts[1][i]], 2))


def test_garbage_beyond_the_lengths_is_ignored():
    """A preallocated cache holds anything there, NaN and infinity included."""
    lens = torch.tensor([3, 5], dtype=torch.int32)
    q, k, v = (make_tensor((2, 2, 8, 16)).requires_grad_() for _ in range(3))
    clean = torch_fdattn.attention(q, k, v, lens)
    clean_gradients = torch.autograd.grad(clean, (q, k, v), [torch.ones_like(x) for x in clean])
    with torch.no_grad():
        for x in (k, v):
            x[0, :, 3:] = float("nan")
            x[1, :, 5:] = float("inf")
    dirty = torch_fdattn.attention(q, k, v, lens)
    dirty_gradients = torch.autograd.grad(dirty, (q, k, v), [torch.ones_like(x) for x in dirty])
    for a, b in zip((*clean, *clean_gradients), (*dirty, *dirty_gradients), strict=True):
        assert torch.equal(a, b)
