"""Hopper's backward with gradients in float32, which ring attention asks for, compiled for sm_90 without a GPU.

Inputs are in bfloat16. At head dim 64 windows and packed sequences spill three to four times the bytes of the other masks.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.compiled import nvidia_usage
from tests.compile_only.test_hopper_backward import (
    check_gradient,
    check_sweep,
    check_sweep_without_dq,
    compiled_launches,
    packed_launches,
)
from torch_fdattn.ops.attention.hopper.backward.launch import HEAD_DIMS
from torch_fdattn.ops.positions import Mask

MASKS = "causal", "window", "lengths", "positions"


@pytest.mark.parametrize(
    ("mask", "head_dim"),
    [
        pytest.param(mask, dim, marks=() if (mask, dim) == ("causal", 128) else pytest.mark.slow)
        for mask in MASKS
        for dim in HEAD_DIMS
    ],
)
def test_compiles(mask, head_dim):
    terms, sweep, sums = compiled_launches(head_dim, mask, grad_dtype=torch.float32)
    assert nvidia_usage(terms)[1] == nvidia_usage(sums)[1] == 0
    most = {64: (720, 30) if mask == "window" else (200, 9), 128: (40, 0)}
    check_sweep(sweep, head_dim, *most[head_dim])


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_compiles_in_order(head_dim, mask):
    _, sweep, gradient = compiled_launches(head_dim, mask, ordered=True, grad_dtype=torch.float32)
    most = {64: (688, 26) if mask == "window" else (136, 0), 128: (40, 0)}
    check_sweep_without_dq(sweep, head_dim, *most[head_dim])
    check_gradient(gradient, 0, 0, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_compiles_wide_heads(mask):
    _, *gradients = compiled_launches(256, mask, grad_dtype=torch.float32)
    has_lengths = mask in ("lengths", "positions")
    limits = (24, 0), (88, 2), (216, 43) if has_lengths else (56, 2)
    for made, most in zip(gradients, limits, strict=True):
        check_gradient(made, *most)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [Mask(window_right=0), Mask(window_left=1500, window_right=100)],
    ids=["causal", "window"],
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_compiles_for_packed_sequences(head_dim, mask):
    sweep, _ = packed_launches(head_dim, mask, grad_dtype=torch.float32)
    check_sweep(sweep, head_dim, *{64: (760, 37), 128: (72, 0)}[head_dim])
    sweep, gradient = packed_launches(head_dim, mask, ordered=True, grad_dtype=torch.float32)
    check_sweep_without_dq(sweep, head_dim, *{64: (768, 38), 128: (64, 0)}[head_dim])
    check_gradient(gradient, 0, 0, head_dim)
