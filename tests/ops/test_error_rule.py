"""The error rule itself: it passes torch's own arithmetic and rejects the faults it is there for."""

from dataclasses import replace

import pytest
import torch

from torch_fdattn.testing import attention_oracle, draw_attention, expected_attention
from torch_fdattn.testing.errors import check_close


def tf32(x):
    """x with the 10 mantissa bits that tf32 keeps."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def drawn(dtype, count):
    """The first `count` drawn cases of a dtype, with lengths of several tiles."""
    cases = (draw_attention(seed) for seed in range(1000))
    return [c for c in cases if c.dtype == dtype and c.kv_lens is None][:count]


def check(case, change=lambda q, k, v: (q, k, v), **options):
    """The rule on the out of torch's formula at the case's dtype, with changed inputs or options."""
    out, _ = attention_oracle(*change(*case.inputs("cpu")), **{**case.oracle_options(), **options})
    expected = expected_attention(case, "cpu", backward=False)
    expected.check(expected.lse, out=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_torch_itself_passes(dtype):
    for case in drawn(dtype, 4):
        check(case)


def test_tf32_is_no_fp32():
    for case in drawn(torch.float32, 8):
        with pytest.raises(AssertionError, match=r"out .* error"):
            check(case, lambda q, k, v: (tf32(q), tf32(k), v))
        with pytest.raises(AssertionError, match=r"out .* error"):
            check(case, lambda q, k, v: (q, k, tf32(v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_key_too_few(dtype):
    for case in drawn(dtype, 8):
        case = replace(case, causal=False, window=None, q_start=None, kv_start=None)
        with pytest.raises(AssertionError, match=r"out .* error"):
            check(case, kv_lens=(case.kv_len - 1,) * case.batch)


def test_a_small_head_counts_as_much_as_a_large_one():
    exact = torch.randn(1, 2, 8, 16, dtype=torch.float64) * torch.tensor([1.0, 0.02]).view(
        1, 2, 1, 1
    )
    value = exact.half()
    check_close("out", value, exact, [torch.zeros_like(exact)])
    value[:, 1] *= 1.02  # far below the first head's rounding
    with pytest.raises(AssertionError, match="Frobenius error of head 1"):
        check_close("out", value, exact, [torch.zeros_like(exact)])


def test_nan_fails():
    exact = torch.randn(1, 1, 4, 16, dtype=torch.float64)
    value = exact.float()
    value[0, 0, 2, 3] = float("nan")
    with pytest.raises(AssertionError, match=r"worst at \(0, 0, 2, 3\), 1 NaN"):
        check_close("out", value, exact, [torch.zeros_like(exact)])
