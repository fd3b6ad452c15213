"""The order of a tensor's dims that a call names: "bhsd" is the ops' own, "bshd" flash-attn's.

Kernels take any strides, so a call in "bshd" is the same call on transposed views; nothing is copied.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
from torch import Tensor

from torch_fdattn import checks

#: "bhsd": (batch, heads, sequence, head dim), and pages (pages, heads, page, head dim); "bshd": with heads third.
Layout = Literal["bhsd", "bshd"]
LAYOUTS = ("bhsd", "bshd")
_PACKAGES = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
)


def check_layout(layout: object) -> None:
    checks.expect_str(layout=layout)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def to_bhsd(layout: Layout, **tensors: Tensor) -> tuple[Tensor, ...]:
    """Views in the ops' own order of the tensors of a call that is not in it."""
    check_layout(layout)
    for name, tensor in tensors.items():
        if tensor is not None:
            checks.expect_4d(name, tensor, "(batch, sequence, heads, head_dim)")
    return tuple(x if x is None else x.transpose(1, 2) for x in tensors.values())


def from_bhsd(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) as a call in "bshd" returns them: the lse is (B, H, S) in both layouts."""
    return state[0].transpose(1, 2), state[1]


def warn_of_exchanged_dims(q: Tensor, k: Tensor) -> None:
    """Of a causal call, aligned at the last key, whose first queries see no key, as if heads were the sequence; once."""
    (heads, queries), (kv_heads, keys) = q.shape[1:3], k.shape[1:3]
    numbers = heads, queries, kv_heads, keys
    if all(type(x) is int for x in numbers) and keys < queries < heads == kv_heads:
        _warn_once()


@functools.cache  # Python's own filter forgets what it has shown whenever some library changes the filters
def _warn_once() -> None:
    frame = _callers_frame()
    warnings.warn_explicit(
        "causal attention of more queries than keys: the first queries see no key. There are more heads than queries, "
        'as if q, k and v were (batch, sequence, heads, head_dim): layout="bshd" takes these',
        UserWarning, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"),
    )  # fmt: skip


def _callers_frame() -> FrameType:
    """The innermost frame outside of this package and torch: how deep an op runs depends on who calls it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return frame
