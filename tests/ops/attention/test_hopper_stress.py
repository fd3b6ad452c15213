"""Hopper's forward a thousand times over: exact results of exact inputs, and the same bits, on an sm_90."""

import pytest
import torch

from tests.ops.attention.counting import ON_HOPPER, Checked, repeated
from tests.ops.attention.exact_inputs import (
    FP8,
    Form,
    call_of,
    exact,
    in_float32,
    normal,
    selecting,
    selecting_the_nearest,
    selecting_with_sinks,
)

pytestmark = ON_HOPPER

#: Tiles of 128 rows by 12 heads: most of these are more than an H100 has SMs.
FORMS = {
    "full": Form((1024,) * 3, (1024,) * 3),
    "full, ragged": Form((900,) * 2, (1000,) * 2),
    "causal": Form((1024,) * 3, (1024,) * 3, (-1, 0)),
    "causal, ragged": Form((900,) * 3, (1000,) * 3, (-1, 0)),
    "window": Form((1000,) * 3, (1000,) * 3, (300, 20)),
    "lengths": Form((700,) * 4, (1000, 0, 129, 513), (-1, 0), "lengths"),
    "packed": Form((500, 0, 1, 129, 64, 700), (700, 5, 128, 300, 30, 700), (-1, -1), "packed"),
    "packed, causal": Form((500, 0, 1, 129, 64, 700), (700, 5, 128, 300, 30, 700), (-1, 0), "packed"),
    "pages": Form((300, 1, 200, 700), (1000, 129, 200, 700), (-1, 0), "pages"),
    "pages, window": Form((300, 1, 200, 700), (1000, 129, 200, 700), (150, 0), "pages"),
    # Two heads share a tile: at most 64 queries of a sequence, and a tile of each head would be more than SMs.
    "few queries": Form((40,) * 12, (300,) * 12, (-1, 0)),
    "packed, few queries": Form((40, 1, 64, 0) * 4, (300, 5, 700, 30) * 4, (-1, 0), "packed"),
    "pages, few queries": Form((40, 1, 64, 17) * 4, (300, 5, 700, 129) * 4, (-1, 0), "pages"),
}  # fmt: skip
EACH_FORM = pytest.mark.parametrize("form", FORMS)
IN_FLOAT8 = pytest.mark.parametrize(
    "form", [x for x in FORMS if FORMS[x].layout in ("dense", "lengths")]
)
HEADS, KV_HEADS = 12, 6


def kernel_of(form: Form, dtype: torch.dtype) -> str:
    """As `launches` counts it."""
    if dtype == FP8:
        return "attention_fp8/hopper"
    dense = form.layout in ("dense", "lengths")
    return f"{'' if dense else 'varlen_'}attention_forward/hopper"


def selecting_alone(*given):
    return selecting(*given), {}


def check_exact(
    form: Form, head_dim: int, dtype: torch.dtype, drawn=selecting_alone, rounding: float = 0.0
) -> None:
    """Three inputs in turn, so that a register of the launch before holds something else; rounding: of results and lse."""
    calls = []
    for _ in range(3):
        sequences, options = drawn(form, head_dim, HEADS, KV_HEADS, "cuda")
        out, lse = exact(form, sequences, **options)
        call = call_of(form, sequences, dtype, **options)
        found_lse = call()[1]
        torch.testing.assert_close(found_lse.double(), lse, rtol=1e-5, atol=1e-5 + rounding)
        rounded = out.to(torch.bfloat16 if dtype == FP8 else dtype)
        torch.testing.assert_close(rounded.double(), out, rtol=rounding, atol=0.0)
        calls.append(Checked(call, (rounded, found_lse)))
    repeated(kernel_of(form, dtype), calls, 1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@EACH_FORM
def test_a_thousand_exact_results(form, head_dim, dtype):
    check_exact(FORMS[form], head_dim, dtype)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("form", ["full, ragged", "causal", "few queries"])
def test_a_thousand_exact_results_in_float32(form, head_dim):
    """As ring attention asks for them: they are stored from registers."""
    form, calls = FORMS[form], []
    for _ in range(3):
        sequences = selecting(form, head_dim, HEADS, KV_HEADS, "cuda")
        call = in_float32(form, sequences)
        calls.append(Checked(call, (exact(form, sequences)[0].float(), call()[1])))
    repeated("attention_forward/hopper", calls, 1000)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@IN_FLOAT8
def test_a_thousand_exact_results_of_float8(form, head_dim):
    check_exact(FORMS[form], head_dim, FP8)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@EACH_FORM
def test_a_thousand_exact_results_with_sinks(form, head_dim):
    check_exact(FORMS[form], head_dim, torch.bfloat16, selecting_with_sinks)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@EACH_FORM
def test_a_thousand_exact_results_with_alibi(form, head_dim):
    """Bfloat16 rounds the weights of all keys but the nearest away, and float32's errors of large biases too."""
    check_exact(FORMS[form], head_dim, torch.bfloat16, selecting_the_nearest, 2e-4)


def check_bits(form: Form, head_dim: int, dtype: torch.dtype, **options) -> None:
    call = call_of(form, normal(form, head_dim, HEADS, KV_HEADS, "cuda"), dtype, **options)
    out, lse = call()
    assert torch.isfinite(out).all()
    assert out.any()
    repeated(kernel_of(form, dtype), [Checked(call, (out, lse))], 100)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@EACH_FORM
def test_same_bits(form, head_dim):
    check_bits(FORMS[form], head_dim, torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@IN_FLOAT8
def test_same_bits_of_float8(form, head_dim):
    check_bits(FORMS[form], head_dim, FP8)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("form", ["causal", "packed, causal"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_same_bits_of_changed_scores(softcap, form, head_dim):
    slopes, sinks = torch.rand(HEADS, device="cuda") / 8, torch.randn(HEADS, device="cuda")
    options = dict(softcap=softcap, alibi_slopes=slopes, sinks=sinks)
    check_bits(FORMS[form], head_dim, torch.bfloat16, **options)
