"""Drawn calls of attention_fp8 that Hopper's kernel multiplies in float8, against the fp64 oracle, on an sm_90.

`tests/ops/test_hopper_draws.py` shows without a GPU that this kernel is what the draws come to.
"""

import os

import pytest
import torch

import torch_fdattn
from tests.ops.attention_fp8.inputs import doubles
from torch_fdattn.testing import assert_launched, attention_oracle, check_close, draw_hopper_fp8

SEEDS = range(int(os.environ.get("FDATTN_DRAWN", "24")))
PATHS = ("attention_fp8/hopper",)


def out_dtype_of(case):
    return (torch.bfloat16, torch.float16)[case.seed % 2]


def inputs_of(case, device):
    """(q, k, v, q_scale, k_scale, v_scale); scales of heads, or of heads of sequences."""
    generator = torch.Generator().manual_seed(case.seed + 6)
    scales = (
        torch.rand((heads,) if case.seed % 3 == i else (case.batch, heads), generator=generator) + 0.5
        for i, heads in enumerate((case.heads, case.kv_heads, case.kv_heads))
    )  # fmt: skip
    return *case.inputs(device), *(x.to(device) for x in scales)


def options_of(case, device):
    names = ("kv_lens", "causal", "window", "scale", "softcap")
    return {name: case.options(device)[name] for name in names} | case.parameters(device)


def run(case, device):
    """The call's inputs, and (out, lse)."""
    inputs = inputs_of(case, device)
    options = options_of(case, device) | dict(out_dtype=out_dtype_of(case))
    return inputs, torch_fdattn.attention_fp8(*inputs, **options)


def errors_of_rounded_weights(exact, q, k, v, out_dtype, **options):
    """Samples of what e4m3's rounding of weights, and out_dtype's of results, changes.

    A weight is rounded where its row's largest so far stands at 256: in a row of several blocks of keys, anywhere between
    powers of two. The largest of all has no rounding.
    """
    every = torch.eye(k.shape[2], dtype=torch.float64, device=k.device).expand(*k.shape[:3], -1)
    weights = attention_oracle(q, k, every, **options)[0]
    values = v.nan_to_num().repeat_interleave(q.shape[1] // v.shape[1], 1)
    top = weights.amax(-1, keepdim=True)
    for bits in (0.0, 0.25, 0.5, 0.75):
        unit = torch.where(top > 0, top, 1.0) * 2.0 ** (bits - 8)
        rounded = (weights / unit).float().to(torch.float8_e4m3fn).double() * unit
        rounded = torch.where(weights == top, weights, rounded)
        yield (rounded @ values).to(out_dtype).double() - exact


def check(case, inputs, found):
    """The error rule, where torch's error is that of rounded weights, and the lse's bound of products in float8."""
    options = options_of(case, inputs[0].device) | dict(kv_lens=case.kv_lens)
    tensors, out_dtype = doubles(*inputs), out_dtype_of(case)
    exact, exact_lse = attention_oracle(*tensors, **options)
    errors = list(errors_of_rounded_weights(exact, *tensors, out_dtype, **options))
    out, lse = found
    assert (out.dtype, lse.dtype) == (out_dtype, torch.float32)
    check_close("out", out, exact, errors, factor=case.error_factor)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=5e-3)
    assert (out[exact_lse == -torch.inf] == 0).all()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn(seed, device, record_drawn):
    case = draw_hopper_fp8(seed)
    record_drawn("attention_fp8 on Hopper", case.features())
    with assert_launched(*PATHS):
        inputs, found = run(case, device)
    check(case, inputs, found)


@pytest.mark.parametrize("seed", [5, 8])
def test_a_wrong_scale_fails_the_check(seed):
    """And dequantised inputs pass it."""
    case = draw_hopper_fp8(seed)
    inputs, (out, lse) = run(case, "cpu")
    check(case, inputs, (out, lse))
    with pytest.raises(AssertionError, match=r"out .* error"):
        check(case, inputs, (out * 1.2, lse))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(case, inputs, (out, lse + 0.1))
