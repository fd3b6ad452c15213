"""Ours with other tile sizes than the table's: one implementation for each combination that is asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch

from ..shapes import AttentionCase
from .base import Attention, Implementation

#: What `torch_fdattn.tiles` takes, and the letter of each in a name: fdattn/m128n64w8s3.
SIZES = {"block_m": "m", "block_n": "n", "num_warps": "w", "num_stages": "s"}


class Tiled(Implementation):
    """An implementation of ours under `torch_fdattn.tiles`; sizes that are not given stay as the table has them."""

    def __init__(self, impl: Implementation, sizes: Mapping[str, int]) -> None:
        self._impl, self._sizes = impl, sizes
        tile = "".join(f"{SIZES[name]}{size}" for name, size in sizes.items())
        self.name, self.forward_with_grad = f"{impl.name}/{tile}", impl.forward_with_grad

    def available(self, device: torch.device) -> str | None:
        return self._impl.available(device)

    def session(self) -> contextlib.AbstractContextManager:
        import torch_fdattn

        return torch_fdattn.tiles(**self._sizes)

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        return self._impl.attention(case, device)


def swept(impl: Implementation, sizes: Mapping[str, Sequence[int]]) -> list[Implementation]:
    """One for each combination of the sizes; none where none are given. Sizes no kernel has are refused here."""
    from torch_fdattn.ops.attention.configs import TileConfig

    if not sizes:
        return []
    combined = [
        dict(zip(sizes, chosen, strict=True)) for chosen in itertools.product(*sizes.values())
    ]
    for given in combined:
        dataclasses.replace(TileConfig(16, 16, 1, 1), **given).checked()
    return [Tiled(impl, given) for given in combined]
