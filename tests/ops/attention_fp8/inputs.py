"""Inputs of attention_fp8, and what they stand for."""

import torch

import torch_fdattn


def quantised(q_shape, kv_shape, device="cpu", layout="bhsd"):
    """(q, k, v, q_scale, k_scale, v_scale), normally distributed."""
    shapes = q_shape, kv_shape, kv_shape
    pairs = [
        torch_fdattn.quantise_per_head(torch.randn(shape, device=device), layout=layout)
        for shape in shapes
    ]
    tensors, scales = zip(*pairs, strict=True)
    return *tensors, *scales


def doubles(q, k, v, *scales):
    """q, k and v dequantised, exactly."""
    return [
        x.double() * scale.double()[..., None, None]
        for x, scale in zip((q, k, v), scales, strict=True)
    ]
