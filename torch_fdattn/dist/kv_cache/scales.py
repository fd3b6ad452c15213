"""Caches of one byte an element: their formats, and the fp32 scales of each KV head.

A key is stored as k / scale, rounded to the format, and read back times scale. Scales are static: those of a
layer follow from the largest absolute value of each KV head in the first tokens that the layer stores,
and stay for the cache's life, because what is stored already cannot be rounded anew. So the longer the
first prompt (the first chunk of it), the better they fit; a cache may be given a typical text first
and be reset: `reset` keeps the scales. They are device tensors that never move: a captured CUDA graph reads
whatever they hold.

Later values can be larger than those of the first prompt, and beyond the format's largest value they
saturate. Hence the headroom: the amax of the first prompt is stored as largest / headroom. A float8
keeps its relative precision whatever the scale, over 2**14 (e4m3) and 2**29 (e5m2) of range, so headroom
is as good as free there; for int8 each doubling costs a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KVFormat(NamedTuple):
    """How an element is stored."""

    dtype: torch.dtype
    largest: float
    headroom: float


#: Names of `kv_dtype`. docs/notes/quantised-caches.md has the perplexities that the headrooms were chosen by.
KV_FORMATS = {
    "fp8_e4m3": KVFormat(torch.float8_e4m3fn, 448.0, 4.0),
    "fp8_e5m2": KVFormat(torch.float8_e5m2, 57344.0, 16.0),
    "int8": KVFormat(torch.int8, 127.0, 1.5),
}


def kv_format(kv_dtype: str | None) -> KVFormat | None:
    """The format of that name; None: keys and values are stored as they come."""
    if kv_dtype is None:
        return None
    if kv_dtype not in KV_FORMATS:
        raise ValueError(f"kv_dtype must be one of {(*KV_FORMATS, None)}, got {kv_dtype!r}")
    return KV_FORMATS[kv_dtype]


class KVScales:
    """The scales of all layers: 1 until a layer has stored its first tokens.

    Attributes:
        k, v: fp32 (layers, kv_heads).
    """

    def __init__(
        self, form: KVFormat, num_layers: int, kv_heads: int, device: torch.device | str
    ) -> None:
        self._form = form
        self.k = torch.ones(num_layers, kv_heads, device=device)
        self.v = torch.ones(num_layers, kv_heads, device=device)
        self._calibrated = [False] * num_layers

    @property
    def calibrated(self) -> bool:
        return all(self._calibrated)

    def is_calibrated(self, layer: int) -> bool:
        return self._calibrated[layer]

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """The ops' keywords, (1, kv_heads, 1): broadcastable over a cache and over pages alike."""
        return {"k_scale": self.k[layer, None, :, None], "v_scale": self.v[layer, None, :, None]}

    def calibrate(self, layer: int, k: Tensor, v: Tensor, real: Tensor | None) -> None:
        """Fixes a layer's scales from k and v (B, kv_heads, T, D); real (B, T): which tokens count."""
        for scales, x in ((self.k, k), (self.v, v)):
            x = x.detach().abs()
            if real is not None:  # padding may hold anything, NaN too
                x = x.masked_fill(~real[:, None, :, None], 0)
            found = x.amax((0, 2, 3)).float() * (self._form.headroom / self._form.largest)
            scales[layer] = torch.where(found > 0, found, 1.0)
        self._calibrated[layer] = True
