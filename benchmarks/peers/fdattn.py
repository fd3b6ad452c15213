"""Ours, through the public entry points, lse included; decode is given lengths on the device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

import torch

from ..decode_inputs import DecodeInputs
from ..shapes import AttentionCase, DecodeCase
from .base import Attention, DecodeCall, Implementation


class Fdattn(Implementation):
    name = "fdattn"

    def available(self, device: torch.device) -> str | None:
        try:
            import torch_fdattn  # noqa: F401
        except ImportError as failure:
            return f"torch_fdattn does not import: {failure}"
        return None

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        from torch_fdattn import attention

        return lambda q, k, v: attention(q, k, v, causal=case.causal)[0]

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        if case.page is not None:
            self.refuse(case, cache=True)
            paged = _entry("paged_decode")
            return [
                functools.partial(paged, x.q, x.k, x.v, x.page_table, x.kv_lens) for x in copies
            ]
        if case.cache is not None:
            decode = _entry("decode", "k_scale")
            return [
                functools.partial(decode, x.q, x.k, x.v, x.kv_lens, k_scale=x.k_scale, v_scale=x.v_scale)
                for x in copies
            ]  # fmt: skip
        decode = _entry("decode")
        return [functools.partial(decode, x.q, x.k, x.v, x.kv_lens) for x in copies]


def _entry(name: str, keyword: str | None = None) -> Callable[..., object]:
    """A public function that takes `keyword`; one that this checkout lacks is said to be missing."""
    import torch_fdattn

    function = getattr(torch_fdattn, name, None)
    if function is None:
        raise NotImplementedError(f"not available: torch_fdattn has no {name}")
    if keyword is not None and keyword not in inspect.signature(function).parameters:
        raise NotImplementedError(f"not available: torch_fdattn.{name} takes no {keyword}")
    return function
