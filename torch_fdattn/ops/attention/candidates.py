"""Tiles worth trying in place of the configured ones, as data: for `autotune` and `benchmarks.sweep_attention`."""

from __future__ import annotations

import torch

from torch_fdattn.ops.attention.configs import TileConfig

#: By kernel and head dim, likely winners first; what does not fit a device is found out there.
CANDIDATES: dict[str, dict[int, str]] = {
    "forward": {
        64: "128x64w4s3 128x128w8s3 128x64w8s3 128x128w4s2 64x64w4s3 128x64w4s4 64x64w8s2",
        128: "128x64w8s3 128x128w8s2 128x64w8s2 128x64w4s3 64x64w4s3 128x128w8s3 128x32w8s4 64x32w8s2 128x32w4s2",
        256: "128x64w8s2 128x32w8s3 64x64w4s2 64x32w4s3 64x64w8s2 128x64w8s1 128x32w8s2 64x32w4s1",
        512: "32x32w8s1 64x32w8s1 32x16w4s1 16x16w4s1",
    },
    "dkdv": {
        64: "64x128w8s3 64x128w8s2 64x64w4s3 32x128w4s3 64x128w4s3 128x128w8s2 32x64w4s4 64x64w8s2",
        128: "64x128w8s2 64x128w8s3 32x128w8s3 64x64w4s2 64x64w4s3 32x128w4s2 128x128w8s2 32x64w4s3 32x64w8s2 32x32w8s1",
        256: "64x64w8s1 32x64w8s2 32x64w4s2 64x64w8s2 16x64w4s3 32x128w8s1 32x32w4s1",
        512: "16x16w8s1 16x32w8s1 32x16w8s1 16x16w4s1",
    },
    "dq": {
        64: "128x64w8s3 128x64w4s3 128x128w8s2 64x64w4s3 128x32w4s4 64x128w4s3 64x64w8s2",
        128: "128x64w8s2 128x64w8s3 128x32w8s3 64x64w4s2 64x64w4s3 128x128w8s2 64x32w4s3 64x64w8s2 32x32w8s1",
        256: "64x64w8s1 64x32w8s2 64x64w8s2 128x32w8s2 64x32w4s2 64x16w4s3 32x32w4s1",
        512: "16x16w8s1 16x32w8s1 32x16w8s1 16x16w4s1",
    },
}
#: fp32 dots take whole rows into registers: small tiles whatever the head dim.
FP32 = "32x32w8s1 32x16w8s1 64x16w8s1 16x32w8s1 16x16w4s1"


def candidates(kernel: str, head_dim: int, dtype: torch.dtype) -> list[TileConfig]:
    """Of a kernel for the larger head dim of K and V; none for kernels without candidates."""
    if kernel not in CANDIDATES:
        return []
    if dtype == torch.float32:
        return parse_configs(FP32)
    of_kernel = CANDIDATES[kernel]
    return parse_configs(of_kernel[min((d for d in of_kernel if d >= head_dim), default=512)])


def parse_configs(text: str) -> list[TileConfig]:
    """Configs from their short form, separated by commas or spaces."""
    return [TileConfig.parse(word) for word in text.replace(",", " ").split()]
