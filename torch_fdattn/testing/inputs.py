"""Seeded tensors in every memory layout that users bring, with NaN wherever a kernel must not read.

A layout is the memory behind a logical (…, H, S, D) tensor, with any number of batch dims before H:

    bhsd        contiguous
    bshd        sequence outside heads, as projections leave it
    slice       positions taken out of a larger preallocated cache
    packed      heads and dims taken out of wider rows, as a fused QKV projection leaves them
    every_other every second position of a buffer
    expanded    one head repeated by stride 0
    transposed  the last dim is not contiguous

All but the first two and the last have NaN in the gaps.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("bhsd", "bshd", "slice", "packed", "every_other", "expanded", "transposed")
_NAN = float("nan")
_BEFORE, _AFTER = 3, 5  # rows of the larger cache on both sides of a slice


def make_tensor(
    shape: tuple[int, ...], layout: str = "bhsd", *, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", generator: torch.Generator | None = None, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """A normally distributed tensor of this shape and layout; the numbers depend on the seed only.

    Drawn on the CPU in fp32, so that one seed means one input on every device, dtype and layout.
    """
    values = torch.randn(shape, generator=generator) * scale
    if layout == "expanded":
        values = values[..., :1, :, :].expand(shape)
    values = values.to(device=device, dtype=dtype)
    *batch, heads, length, dim = shape

    def nans(*sizes: int) -> Tensor:
        return torch.full(sizes, _NAN, dtype=dtype, device=device)

    if layout == "bhsd":
        return values.contiguous()
    if layout == "bshd":
        return values.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "slice":
        view = nans(*batch, heads, _BEFORE + length + _AFTER, dim)[
            ..., _BEFORE : _BEFORE + length, :
        ]
    elif layout == "packed":
        view = nans(*batch, length, heads + 2, dim + 8)[..., 1 : heads + 1, 8:].transpose(-3, -2)
    elif layout == "every_other":
        view = nans(*batch, heads, 2 * length + 1, dim)[..., 1::2, :]
    elif layout == "expanded":
        return values[..., :1, :, :].contiguous().expand(shape)
    elif layout == "transposed":
        return values.mT.contiguous().mT
    else:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    return view.copy_(values)


def poison_beyond(x: Tensor, lengths: tuple[int, ...] | None) -> Tensor:
    """Writes NaN into x (B, H, S, D) beyond each sequence's length, in place: nobody may read it."""
    heads = x[:, :1] if x.stride(1) == 0 else x  # written once where heads share memory
    for b, length in enumerate(lengths or ()):
        heads[b, :, max(length, 0) :] = _NAN
    return x
