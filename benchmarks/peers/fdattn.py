"""Ours, through the public entry points, lse included; decode is given lengths on the device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from .. import features
from ..decode_inputs import DecodeInputs
from ..shapes import AttentionCase, DecodeCase
from .base import Attention, DecodeCall, Implementation


class Fdattn(Implementation):
    name = "fdattn"
    options: Mapping[str, object] = MappingProxyType({})

    def available(self, device: torch.device) -> str | None:
        try:
            import torch_fdattn  # noqa: F401
        except ImportError as failure:
            return f"torch_fdattn does not import: {failure}"
        return None

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        from torch_fdattn import attention

        extras = features.extras_of(case, device)
        if extras.cu_seqlens is not None:
            return functools.partial(_packed, extras.cu_seqlens)
        options: dict[str, object] = {"causal": case.causal}
        if case.feature == "softcap":
            options["softcap"] = features.SOFTCAP
        elif case.feature == "dropout":
            options["dropout_p"] = features.DROPOUT
        elif extras.window is not None:
            options["window"] = (extras.window - 1, 0)
        elif extras.kv_lens is not None:  # queries stay where they are
            options |= dict(kv_lens=extras.kv_lens, q_start=torch.zeros_like(extras.kv_lens))
        named = dict(attn_mask=extras.bias, alibi_slopes=extras.slopes, sinks=extras.sinks)
        options |= {name: x for name, x in named.items() if x is not None}
        return lambda q, k, v: attention(q, k, v, **options)[0]

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        if case.page is not None:
            self.refuse(case, cache=True)
            paged = _entry("paged_decode")
            return [
                functools.partial(paged, x.q, x.k, x.v, x.page_table, x.kv_lens, **self.options)
                for x in copies
            ]
        return _contiguous(case, copies, [x.kv_lens for x in copies], self.options)


class FullCache(Fdattn):
    """Without lengths: the call that SDPA's backends are given, which know none either."""

    name = "fdattn/full"

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        raise NotImplementedError(f"{self.name} is {super().name} where there is no cache")

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        self.refuse(case, paged=True, ragged=True)
        return _contiguous(case, copies, [None] * len(copies), self.options)


class BatchInvariant(Fdattn):
    """With splits of a fixed size, so that a sequence's bits do not depend on its batch: what that costs."""

    name = "fdattn/invariant"
    options: Mapping[str, object] = MappingProxyType({"batch_invariant": True})

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        raise NotImplementedError(f"{self.name} is {super().name} where there is no cache")


def _packed(cu_seqlens: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """varlen_attention of (1, H, S, D) tensors, taken as (S, H, D) by their strides."""
    from torch_fdattn import varlen_attention

    # squeeze, not x[0], whose gradient would be copied into zeros.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    out, _ = varlen_attention(q, k, v, cu_seqlens, causal=True)
    return out.transpose(0, 1)[None]


def _contiguous(
    case: DecodeCase,
    copies: Sequence[DecodeInputs],
    lengths: Sequence[torch.Tensor | None],
    options: Mapping[str, object],
) -> list[DecodeCall]:
    scaled = case.cache is not None
    decode = _entry("decode", "k_scale" if scaled else None)
    return [
        functools.partial(
            decode, x.q, x.k, x.v, lens, **options,
            **(dict(k_scale=x.k_scale, v_scale=x.v_scale) if scaled else {}),
        )
        for x, lens in zip(copies, lengths, strict=True)
    ]  # fmt: skip


def _entry(name: str, keyword: str | None = None) -> Callable[..., object]:
    """A public function that takes `keyword`; one that this checkout lacks is said to be missing."""
    import torch_fdattn

    function = getattr(torch_fdattn, name, None)
    if function is None:
        raise NotImplementedError(f"not available: torch_fdattn has no {name}")
    if keyword is not None and keyword not in inspect.signature(function).parameters:
        raise NotImplementedError(f"not available: torch_fdattn.{name} takes no {keyword}")
    return function
