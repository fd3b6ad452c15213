"""What a layer's attention is asked for besides being causal: its window, its softcap, its scale."""

from __future__ import annotations

from typing import NamedTuple


class MaskOptions(NamedTuple):
    """How a layer attends; `keywords` are what a cache's `attend` and `torch_fdattn.attention` take.

    Args:
        window_left: how many keys before its own position a query sees; -1: all.
        softcap: scores become ``softcap · tanh(score / softcap)``; 0: none.
        scale: of the scores; None: head_dim ** -0.5.

    Examples:
        >>> torch_fdattn.dist.MaskOptions(window_left=4095, softcap=50.0).keywords()
        {'window': (4095, 0), 'softcap': 50.0}
        >>> torch_fdattn.dist.MaskOptions().keywords()  # a cache that knows no options is not asked for any
        {}
    """

    window_left: int = -1
    softcap: float = 0.0
    scale: float | None = None

    def keywords(self) -> dict[str, object]:
        """The keywords of what is set, so that a cache without them refuses a layer that has them."""
        given: dict[str, object] = {}
        if self.window_left >= 0:
            given["window"] = (self.window_left, 0)
        if self.softcap:
            given["softcap"] = self.softcap
        if self.scale is not None:
            given["scale"] = self.scale
        return given
