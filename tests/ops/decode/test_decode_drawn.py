"""Drawn cases of decode against the fp64 oracle under the error rule, on any number of programs."""

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.decode import schedule
from torch_fdattn.testing import (
    assert_launched,
    draw_decode,
    drawn_seeds,
    expected_attention,
    expected_path,
)

PATH = "decode_forward"


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", drawn_seeds(320))
def test_drawn(seed, device, record_drawn):
    case = draw_decode(seed, device)
    record_drawn("decode", case.features())
    with assert_launched(expected_path(PATH, device, case.dtype)):
        out, lse = torch_fdattn.decode(*case.inputs(device), **case.options(device))
    expected_attention(case, device, backward=False).check(lse, out=out)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_drawn_gradients(seed, device, record_drawn):
    """decode is differentiable through attention's streaming backward."""
    case = draw_decode(seed, device)
    record_drawn("decode with gradients", case.features())
    inputs = [x.requires_grad_() for x in case.inputs(device)]
    out, lse = torch_fdattn.decode(*inputs, **case.options(device))
    with assert_launched(expected_path("attention_backward", device, case.dtype)):
        dq, dk, dv = torch.autograd.grad([out, lse], inputs, case.output_gradients(device))
    expected_attention(case, device).check(lse, out=out, dq=dq, dk=dk, dv=dv)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("target", "group", "seed"),
    [
        pytest.param(*pieces, 2000 + seed, marks=pytest.mark.slow if (i + seed) % 3 else ())
        for i, pieces in enumerate([(1, 128), (2, 1), (3, 2), (7, 128), (40, 1), (40, 2)])
        for seed in range(3)
    ],
)
def test_any_number_of_splits(seed, target, group, kernel_device, monkeypatch):
    """Fewer than work tiles, several a work tile, more than there are keys; by groups of sequences."""
    monkeypatch.setattr(schedule, "GROUP", group)
    monkeypatch.setattr(schedule, "SHORT", 0)
    from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
    from torch_fdattn.ops.decode.launch import launch_decode
    from torch_fdattn.ops.options import DecodeOptions
    from torch_fdattn.ops.positions import Mask

    case = draw_decode(seed, kernel_device)
    q, k, v = case.inputs(kernel_device)
    options = case.options(kernel_device)
    left, right = options["window"] or (-1, -1)
    mask = Mask(
        options["kv_lens"], options["q_start"], options["kv_start"], left,
        0 if case.causal else right, case.kv_block, case.kv_stride,
    )  # fmt: skip
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], device=q.device)
    scale = case.scale or case.head_dim**-0.5
    with assert_launched(f"{PATH}/triton"):
        call = DecodeCall(q, Cache(k, v), DecodeOptions(mask, scale))
        launch_decode(call, out, lse, target_splits=target)
    expected_attention(case, kernel_device, backward=False).check(lse, out=out)
