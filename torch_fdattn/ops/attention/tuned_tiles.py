"""Tiles that `fdattn tune` measured on this machine, in the place of those of `configs.py`.

An entry speaks for a kernel, a padded head dim, a dtype and a class of masks, whatever the lengths; softcap, ALiBi, explicit
masks and dropout have the shipped tiles. fp32 entries are of exact dots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_fdattn import tables
from torch_fdattn.ops.attention import trials
from torch_fdattn.ops.attention.configs import (
    TileConfig,
    dot_precision,
    has_borders,
    is_short_window,
)
from torch_fdattn.ops.launch import padded
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.positions import Mask

#: A dtype that takes as long as another one, which was measured.
TIMED_AS = {torch.float16: torch.bfloat16}


def mask_class(mask: Mask, kv_capacity: int, packed: bool = False) -> str:
    """By what `forward_config` tells masks apart: "unmasked" where no tile is, "masked" or "short_window"."""
    if is_short_window(mask, kv_capacity):
        return "short_window"
    return "masked" if packed or has_borders(mask, kv_capacity) else "unmasked"


def with_tuned_tiles(
    op: str, config: Any, q: Tensor, v: Tensor, options: AttentionOptions, kv_capacity: int, packed: bool
) -> Any:  # fmt: skip
    """The config of "forward" or "backward" with the tuned tiles of its kernels; the config itself where there are none.

    Raises:
        ValueError: the file is broken, or has a tile that no kernel can have.
    """
    index = tables.index("attention_tiles", tables.Device.of(q.device))
    if not index or options.scores.changes_tiles or options.dropout.p:
        return config
    if dot_precision(q.dtype) != "ieee":
        return config
    dims, mask = padded(max(q.shape[3], v.shape[3])), mask_class(options.mask, kv_capacity, packed)
    parts = trials.parts_of(op, config)
    for kernel in parts:
        for dtype in (q.dtype, TIMED_AS.get(q.dtype)):
            key = kernel, dims, str(dtype).removeprefix("torch."), mask
            if key in index:
                parts[kernel] = _tile(index[key]["tile"])
                break
    return trials.with_parts(config, parts)


def _tile(text: str) -> TileConfig:
    try:
        return TileConfig.parse(text).checked()
    except ValueError as error:
        raise ValueError(
            f"the tuned table {tables.default_path()} has the tile {text!r} in attention_tiles: {error}"
        ) from None
