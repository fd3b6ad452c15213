"""What attention does besides plain causal masks: every feature by the best way that an implementation has.

`Featured` turns an implementation into one that is given the case's feature: ours through its keywords,
FlexAttention through score and mask functions, `sdpa` through scaled_dot_product_attention with what the
feature amounts to written out as one additive or boolean mask (dropout through its own argument), and `sdpa-mask`
the same where `sdpa` needs no mask, being told that it is causal.

    plain, bias (1, H, S, S), bias-grad (with its gradient), alibi, softcap, windowW, sinks, dropout,
    varlen (documents packed one after the other, each attending to itself)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .peers import OURS, Attention, Implementation
from .peers.flex import Flex
from .runner import DTYPES, generator
from .shapes import AttentionCase

DROPOUT, SOFTCAP = 0.1, 30.0
#: Features for which causal SDPA needs no mask, and its dropout there.
NO_MASK = {"plain": 0.0, "dropout": DROPOUT}
#: Keys that a written-out sink adds: SDPA wants masks whose rows are multiples of 16 bytes.
SINK_KEYS = 8
#: Where varlen's documents end, in parts of the whole.
DOCUMENTS = (0.4, 0.65, 0.85, 0.95, 1.0)


class Extras(NamedTuple):
    """A case's tensors beside q, k, v; None where its feature has none."""

    device: torch.device
    bias: Tensor | None = None  # (1, H, S, S), of q's dtype
    slopes: Tensor | None = None  # (H,) fp32
    sinks: Tensor | None = None  # (H,) fp32
    window: int | None = None
    cu_seqlens: Tensor | None = None  # (documents + 1,) int32

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """What wants a gradient besides q, k, v."""
        return tuple(x for x in self[1:4] if x is not None and x.requires_grad)

    def documents(self, length: int) -> Tensor:
        """(length,): which document each position belongs to; 0 without documents."""
        position = torch.arange(length, device=self.device)
        if self.cu_seqlens is None:
            return torch.zeros_like(position)
        return torch.searchsorted(self.cu_seqlens[1:], position, right=True)


@functools.lru_cache(maxsize=1)  # every implementation of a case is given the same ones
def extras_of(case: AttentionCase, device: torch.device) -> Extras:
    made = generator(device, 1)
    heads, length, feature = case.heads, case.seq_len, case.feature or ""
    if feature.startswith("bias"):
        bias = torch.empty(1, heads, length, length, dtype=DTYPES[case.dtype], device=device)
        return Extras(device, bias.normal_(generator=made).requires_grad_(feature == "bias-grad"))
    if feature == "alibi":
        powers = torch.arange(1, heads + 1, device=device) / heads
        return Extras(device, slopes=2.0 ** (-8 * powers))
    if feature == "sinks":
        return Extras(device, sinks=torch.randn(heads, generator=made, device=device))
    if feature.startswith("window"):
        return Extras(device, window=int(feature.removeprefix("window")))
    if feature == "varlen":
        ends = [0, *(round(part * length) for part in DOCUMENTS)]
        return Extras(device, cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device))
    if feature not in ("plain", "softcap", "dropout"):
        raise ValueError(f"feature must be one of those in cases.py, got {feature!r}")
    return Extras(device)


class Featured(Implementation):
    """An implementation, asked for the cases' features."""

    def __init__(self, impl: Implementation, call_of: Callable[..., Attention]) -> None:
        self.name, self.forward_with_grad = impl.name, impl.forward_with_grad
        self._impl, self._call_of = impl, call_of

    def available(self, device: torch.device) -> str | None:
        return self._impl.available(device)

    def session(self) -> contextlib.AbstractContextManager:
        return self._impl.session()

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        return self._call_of(case, extras_of(case, device))


class Sdpa(Implementation):
    """scaled_dot_product_attention, its backend chosen by torch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def available(self, device: torch.device) -> str | None:
        return None


def chosen(names: str) -> tuple[Implementation, ...]:
    """Ours and the comma-separated peers of flex, sdpa, sdpa-mask; `all` and `none` are understood."""
    peers = {
        "flex": Featured(Flex(), with_flex),
        "sdpa": Featured(Sdpa("sdpa"), with_sdpa),
        "sdpa-mask": Featured(Sdpa("sdpa-mask"), with_sdpa_and_mask),
    }
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    wanted = {"all": list(peers), "none": []}.get(names.strip(), wanted)
    unknown = [name for name in wanted if name not in peers]
    if unknown:
        raise ValueError(f"--vs must name peers of {sorted(peers)}, got {', '.join(unknown)}")
    return (Featured(OURS, with_ours), *(peers[name] for name in dict.fromkeys(wanted)))


def with_ours(case: AttentionCase, extras: Extras) -> Attention:
    import torch_fdattn

    if extras.cu_seqlens is not None:
        return functools.partial(packed, extras.cu_seqlens)
    options: dict[str, object] = {}
    if case.feature == "softcap":
        options["softcap"] = SOFTCAP
    elif case.feature == "dropout":
        options["dropout_p"] = DROPOUT
    elif extras.window is not None:
        options["window"] = (extras.window - 1, 0)
    named = dict(attn_mask=extras.bias, alibi_slopes=extras.slopes, sinks=extras.sinks)
    options |= {name: x for name, x in named.items() if x is not None}
    return lambda q, k, v: torch_fdattn.attention(q, k, v, causal=True, **options)[0]


def packed(cu_seqlens: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """varlen_attention of (1, H, S, D) tensors, taken as (S, H, D) by their strides."""
    import torch_fdattn

    # squeeze, not x[0], whose gradient would be copied into zeros.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    out, _ = torch_fdattn.varlen_attention(q, k, v, cu_seqlens, causal=True)
    return out.transpose(0, 1)[None]


def with_flex(case: AttentionCase, extras: Extras) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.feature == "dropout":
        raise NotImplementedError("flex has no dropout")
    device, bias, slopes, sinks, window, cu_seqlens = extras
    length = case.seq_len
    document = extras.documents(length)

    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if bias is not None:
            return score + bias[0, h, q, k]
        if slopes is not None:
            return score - slopes[h] * (q - k)
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cu_seqlens is not None:
            return (q >= k) & (document[q] == document[k])
        return (q >= k) if window is None else (q >= k) & (q - k < window)

    mask = create_block_mask(seen, None, None, length, length, device=device)
    modifies = bias is not None or slopes is not None or case.feature == "softcap"
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    common = dict(
        score_mod=modified if modifies else None,
        block_mask=mask,
        enable_gqa=case.heads != case.kv_heads,
    )
    if sinks is None:
        return lambda q, k, v: compiled(q, k, v, **common)

    def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = compiled(q, k, v, return_lse=True, **common)
        return out * torch.sigmoid(lse - sinks[:, None]).to(out.dtype)[..., None]

    return with_sinks


def with_sdpa(case: AttentionCase, extras: Extras) -> Attention:
    gqa = case.heads != case.kv_heads
    if case.feature == "softcap":
        raise NotImplementedError("sdpa has no softcap")
    if case.feature in NO_MASK:
        return functools.partial(
            F.scaled_dot_product_attention, is_causal=True, enable_gqa=gqa, dropout_p=NO_MASK[case.feature]
        )  # fmt: skip
    if extras.sinks is None:
        return masked_sdpa(case, extras, 0.0)

    sink = torch.full((case.heads, case.seq_len, SINK_KEYS), float("-inf"), device=extras.device)
    sink[..., 0] = extras.sinks[:, None]
    causal = added(case, extras, torch.float32)[0].expand(case.heads, -1, -1)
    mask = torch.cat([causal, sink], -1).to(DTYPES[case.dtype])[None]

    def beside_a_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A key of zeros, whose score is the sink and whose value adds nothing."""
        k, v = (F.pad(x, (0, 0, 0, SINK_KEYS)) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)

    return beside_a_sink


def with_sdpa_and_mask(case: AttentionCase, extras: Extras) -> Attention:
    if case.feature not in NO_MASK:
        raise NotImplementedError("sdpa itself has a mask here")
    return masked_sdpa(case, extras, NO_MASK[case.feature])


def masked_sdpa(case: AttentionCase, extras: Extras, dropout_p: float) -> Attention:
    """Everything but dropout written out as one mask, once, or in each call where a bias is trained."""
    gqa = case.heads != case.kv_heads
    written = None if extras.trained else added(case, extras, DTYPES[case.dtype])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = written if not extras.trained else added(case, extras, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa, dropout_p=dropout_p)  # fmt: skip

    return call


def added(case: AttentionCase, extras: Extras, dtype: torch.dtype) -> Tensor:
    """What the feature adds to scores, masks included: (1, H or 1, S, S)."""
    position = torch.arange(case.seq_len, device=extras.device)
    distance = position[:, None] - position[None, :]
    hidden = distance < 0
    if extras.window is not None:
        hidden |= distance >= extras.window
    document = extras.documents(case.seq_len)
    hidden |= document[:, None] != document[None, :]
    scores = torch.zeros(1, 1, 1, 1, dtype=dtype, device=extras.device)
    if extras.bias is not None:
        scores = extras.bias.to(dtype)
    elif extras.slopes is not None:
        scores = (-extras.slopes[:, None, None] * distance)[None].to(dtype)
    return scores.masked_fill(hidden, float("-inf"))


def exact_options(case: AttentionCase, extras: Extras, group: int) -> dict[str, object]:
    """Keywords of `exact_attention` for the last `group` heads."""
    scores = added(case, extras, torch.float32).detach()[0, -group:]
    sinks = None if extras.sinks is None else extras.sinks[-group:]
    softcap = SOFTCAP if case.feature == "softcap" else 0.0
    return dict(added=scores, softcap=softcap, sinks=sinks)
