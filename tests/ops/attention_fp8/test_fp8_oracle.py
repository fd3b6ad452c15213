"""attention_fp8 on CPU tensors against the oracle of the dequantised inputs."""

import dataclasses

import pytest
import torch

import torch_fdattn
from tests.ops.attention_fp8.inputs import doubles, quantised
from torch_fdattn.ops import launches
from torch_fdattn.ops.attention_fp8 import op as attention_fp8_op
from torch_fdattn.ops.attention_fp8.reference import dequantised
from torch_fdattn.testing import (
    assert_launched,
    attention_oracle,
    check_close,
    check_lse,
    draw_features,
    drawn_seeds,
    expected_path,
)

PATHS = "attention_fp8/dequantised", expected_path("attention_forward", "cpu", torch.float32)


def check(found, inputs, out_dtype=torch.bfloat16, factor=2.0, **options):
    """The error rule at out_dtype, and float32's bound of the lse."""
    exact, exact_lse = attention_oracle(*doubles(*inputs), **options)
    rounded = attention_oracle(*(x.to(out_dtype) for x in doubles(*inputs)), **options)[0]
    out, lse = found
    assert (out.dtype, lse.dtype) == (out_dtype, torch.float32)
    check_close("out", out, exact, [rounded.double() - exact], factor=factor)
    check_lse(lse, exact_lse, torch.float32)


def drawn_case(seed):
    """A drawn call of attention without what attention_fp8 does not take."""
    return dataclasses.replace(
        draw_features(seed), dtype=torch.float8_e4m3fn, v_dim=0, mask="", dropout_p=0.0, q_start=None,
        kv_start=None, kv_block=0, kv_stride=0,
    )  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", drawn_seeds(40, "FDATTN_DRAWN"))
def test_drawn(seed, record_drawn):
    """Any layout, NaN in every gap and beyond the lengths; scales of heads, or of heads of sequences."""
    case = drawn_case(seed)
    record_drawn("attention_fp8", case.features())
    scales = [
        torch.rand((heads,) if seed % 3 == i else (case.batch, heads)) + 0.5
        for i, heads in enumerate((case.heads, case.kv_heads, case.kv_heads))
    ]
    inputs = *case.inputs("cpu"), *scales
    names = "kv_lens", "causal", "window", "scale"
    options = {name: case.options("cpu")[name] for name in names}
    parameters = case.parameters("cpu") | dict(softcap=case.softcap)
    out_dtype = (torch.bfloat16, torch.float16)[seed % 2]
    with assert_launched(*PATHS):
        found = torch_fdattn.attention_fp8(*inputs, **options, **parameters, out_dtype=out_dtype)
    options["kv_lens"] = case.kv_lens
    check(found, inputs, out_dtype, case.error_factor, **options, **parameters)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 70), (30, 100), (64, 64), (20, 7)])
def test_shapes(queries, keys, causal):
    """With rows that see no key where queries are more than keys."""
    inputs = quantised((2, 6, queries, 40), (2, 2, keys, 40))
    check(torch_fdattn.attention_fp8(*inputs, causal=causal), inputs, causal=causal)


def test_rows_without_keys():
    inputs = quantised((3, 4, 9, 16), (3, 4, 5, 16))
    lens = torch.tensor([0, -3, 2], dtype=torch.int32)
    out, lse = torch_fdattn.attention_fp8(*inputs, lens, causal=True)
    check((out, lse), inputs, kv_lens=[0, 0, 2], causal=True)
    assert (out[:2] == 0).all()
    assert (lse[:2] == -torch.inf).all()
    assert (lse[2, :, :7] == -torch.inf).all()


@pytest.mark.parametrize("shape", [(0, 4, 5, 16), (2, 4, 0, 16)])
def test_nothing_to_compute(shape):
    inputs = quantised(shape, (shape[0], 2, 7, 16))
    out, lse = torch_fdattn.attention_fp8(*inputs)
    assert (out.shape, lse.shape) == (shape, shape[:3])


def test_no_keys():
    out, lse = torch_fdattn.attention_fp8(*quantised((2, 4, 5, 16), (2, 2, 0, 16)))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_layout():
    inputs = quantised((2, 4, 9, 16), (2, 2, 12, 16))
    turned = [x.transpose(1, 2).contiguous() for x in inputs[:3]]
    expected = torch_fdattn.attention_fp8(*inputs, causal=True)
    for op in (torch_fdattn.attention_fp8, torch.ops.fdattn.attention_fp8):
        out, lse = op(*turned, *inputs[3:], causal=True, layout="bshd")
        assert out.is_contiguous()
        assert torch.equal(out.transpose(1, 2), expected[0])
        assert torch.equal(lse, expected[1])


def test_what_a_number_is_rounded_to():
    """The product with its scale, once."""
    x = torch.randn(2, 4, 30, 16).to(torch.float8_e4m3fn)
    for scale in (torch.rand(4), torch.rand(2, 4)):
        exact = x.double() * scale.double()[..., None, None]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(dequantised(x, scale, dtype), exact.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 512])
def test_other_gpus_compute_attention_of_dequantised_inputs(head_dim, out_dtype, monkeypatch):
    """Each time: through Triton, bound, and by the driver."""
    monkeypatch.setattr(attention_fp8_op, "device_capability", lambda device: (8, 0))
    inputs = quantised((2, 4, 70, head_dim), (2, 2, 300, head_dim), "cuda")
    rounded = [
        dequantised(x, scale, out_dtype) for x, scale in zip(inputs[:3], inputs[3:], strict=True)
    ]
    expected = torch_fdattn.attention(*rounded, causal=True)
    for _ in range(4):
        launches.clear()
        found = torch_fdattn.attention_fp8(*inputs, causal=True, out_dtype=out_dtype)
        assert launches["attention_fp8/dequantised"] == 1
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_quantise_per_head(dtype, layout):
    x = torch.randn(2, 4, 30, 16).to(dtype) * torch.tensor([1e-3, 1.0, 100.0, 0.0]).to(dtype)[:, None, None]  # fmt: skip
    given = x if layout == "bhsd" else x.transpose(1, 2)
    stored, scale = torch_fdattn.quantise_per_head(given, layout=layout)
    assert (stored.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert stored.shape == given.shape
    assert stored.stride() == given.stride()
    stored = stored if layout == "bhsd" else stored.transpose(1, 2)
    assert (stored[:, :3].float().abs().amax((2, 3)) == 448.0).all()
    assert (scale[:, 3] == 1).all()
    exact = x.double() / scale.double()[..., None, None]
    error = (stored.double() - exact).abs()
    assert (error <= exact.abs().clamp(min=2.0**-6) * 2.0**-4 * (1 + 1e-6)).all()


@pytest.mark.parametrize("shape", [(2, 4, 0, 16), (0, 4, 5, 16), (2, 0, 5, 16)])
def test_quantise_nothing(shape):
    stored, scale = torch_fdattn.quantise_per_head(torch.randn(shape))
    assert stored.shape == shape
    assert (scale == torch.ones(shape[:2])).all()
