"""Calls of attention whose results and gradients are exact: each query weighs a few keys, all alike.

A key has one of 32 codes: of its first 32 columns all are -128 but its code's, which is 0. A query has 128 in the column
of the code that it selects. So scores are 0 or -16384, weights are 1 / m of m keys and 0 of all others, and m is a power
of two up to 16, by the choice of the code. Which keys these are differs from row to row and from block to block: a
weight, score or sum that a kernel reads from a register too late or too early is a wrong one. Of the other columns the
first half is the queries' and the second half the keys', so that the gradients of both are sums of small integers.

The truth is the oracle in float64, which rounds nothing here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fdattn
from torch_fdattn.ops.determinism import ordered
from torch_fdattn.ops.positions import Mask
from torch_fdattn.testing import attention_oracle

CODES, MOST_KEYS, HEIGHT = 32, 16, 128
#: Of no key that is drawn: within every row's window there is one key of the first, one of the second, or one of each.
ANCHORS = CODES - 2, CODES - 1
#: A power of two, so that scaled gradients are exact.
SCALE = 0.125
FP8 = torch.float8_e4m3fn
#: Slots of a page by the head dim.
PAGES = {64: 128, 96: 32, 128: 16, 192: 64, 256: 16}


class Form(NamedTuple):
    """Queries and keys of each sequence, and how they lie: "dense", "lengths", "packed" or "pages"."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    window: tuple[int, int] = (-1, -1)
    layout: str = "dense"


#: (q, k, v) of a sequence, (heads, length, D) each.
Sequence = tuple[Tensor, Tensor, Tensor]


def selecting(
    form: Form, head_dim: int, heads: int, kv_heads: int, device: str, largest: int = 3, sinks: int = 0
) -> list[Sequence]:  # fmt: skip
    """Drawn sequences, float64; values are integers up to `largest`. With a sink m - 1 keys weigh 1 / m each."""
    return [
        _selecting(*lengths, form.window, head_dim, heads, kv_heads, device, largest, sinks)
        for lengths in zip(form.queries, form.keys, strict=True)
    ]


def selecting_with_sinks(
    form: Form, head_dim: int, heads: int, kv_heads: int, device: str
) -> tuple[list[Sequence], dict]:
    """(sequences, the call's options): sinks of 0, the score of the keys that are selected."""
    sequences = selecting(form, head_dim, heads, kv_heads, device, sinks=1)
    return sequences, dict(sinks=torch.zeros(heads, device=device))


def selecting_the_nearest(
    form: Form, head_dim: int, heads: int, kv_heads: int, device: str
) -> tuple[list[Sequence], dict]:
    """(sequences of at most 1024 keys, the call's options): of the keys selected the nearest has all the weight, or two have.

    ALiBi slopes are 12 to 15. What is a key farther away weighs e⁻¹² or less, which bfloat16 does not show in values from 1
    to 4; what is not selected is 16384 below, more than any distance makes.
    """
    drawn = selecting(form, head_dim, heads, kv_heads, device)
    sequences = [(q, k, v.abs() + 1) for q, k, v in drawn]
    slopes = 12.0 + torch.arange(heads, device=device) % 4
    return sequences, dict(scale=1.0, alibi_slopes=slopes)


def _selecting(q_len, kv_len, window, head_dim, heads, kv_heads, device, largest, sinks) -> Sequence:  # fmt: skip
    left, right = window
    # From a fifth of the keys to less than one: whatever a row sees, some codes have few keys of these.
    frequencies = 2.0 ** (-torch.arange(ANCHORS[0], device=device) / 3)
    codes = torch.multinomial(frequencies.expand(kv_heads, -1), max(1, kv_len), True)[:, :kv_len]
    step = left + 1 if left >= 0 else max(1, kv_len)
    for i, anchor in enumerate(ANCHORS):
        codes[:, i * step :: 2 * step] = anchor
    before = F.pad(F.one_hot(codes, CODES).cumsum(1), (0, 0, 1, 0))
    position = torch.arange(q_len, device=device) + kv_len - q_len
    first, end = torch.zeros_like(position), torch.full_like(position, kv_len)
    if left >= 0:
        first = (position - left).clamp(0, kv_len)
    if right >= 0:
        end = (position + right + 1).clamp(0, kv_len)
    counts = before[:, end] - before[:, first]
    weighed = counts + sinks
    chances = counts * ((weighed & (weighed - 1) == 0) & (weighed <= MOST_KEYS))
    unseen = chances.sum(-1) == 0
    assert torch.equal(unseen, (end <= first).expand_as(unseen))
    chances[..., ANCHORS[0]] += unseen
    chances = chances.repeat_interleave(heads // kv_heads, 0).flatten(0, 1).float()
    selected = (
        torch.multinomial(chances, 1).view(heads, q_len) if q_len else codes.new_empty(heads, 0)
    )
    q, k, v = (
        torch.zeros(h, n, head_dim, dtype=torch.float64, device=device)
        for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    half = CODES + (head_dim - CODES) // 2
    q[..., :CODES] = F.one_hot(selected, CODES) * HEIGHT
    k[..., :CODES] = (F.one_hot(codes, CODES) - 1) * HEIGHT
    q[..., CODES:half].random_(-3, 4)
    k[..., half:].random_(-3, 4)
    return q, k, v.random_(-largest, largest + 1)


def normal(form: Form, head_dim: int, heads: int, kv_heads: int, device: str) -> list[Sequence]:
    """Sequences of normally distributed numbers, float64."""
    return [
        tuple(
            torch.randn(h, n, head_dim, dtype=torch.float64, device=device)
            for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
        )
        for queries, keys in zip(form.queries, form.keys, strict=True)
    ]


def exact(form: Form, sequences: list[Sequence], **options) -> tuple[Tensor, Tensor]:
    """(out, lse) as the form's op returns them with these options, float64."""
    found = [
        attention_oracle(*(x[None] for x in each), window=form.window, **options)
        for each in sequences
    ]
    outs, lses = ([x[0] for x in each] for each in zip(*found, strict=True))
    if form.layout in ("packed", "pages"):
        return torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1)
    return torch.stack(outs), torch.stack(lses)


def exact_gradients(form: Form, sequences: list[Sequence], douts: list[Tensor]) -> list[Tensor]:
    """Of q, k and v as the op returns them, at SCALE, float64."""
    found = []
    for each, dout in zip(sequences, douts, strict=True):
        leaves = [x.detach()[None].requires_grad_() for x in each]
        out = attention_oracle(*leaves, window=form.window, scale=SCALE)[0]
        grads = (x.new_zeros(x.shape) for x in leaves)
        if out.requires_grad:
            grads = torch.autograd.grad(out, leaves, dout[None], materialize_grads=True)
        found.append([x[0] for x in grads])
    if form.layout == "packed":
        return [torch.cat(x, 1).transpose(0, 1) for x in zip(*found, strict=True)]
    dq, *of_keys = zip(*found, strict=True)
    return [torch.stack(dq), *(_padded(form, x, 0.0) for x in of_keys)]


def _padded(form: Form, tensors: list[Tensor], filling: float) -> Tensor:
    """(B, H_kv, the most keys, D)."""
    most = max(form.keys)
    return torch.stack([F.pad(x, (0, 0, 0, most - x.shape[1]), value=filling) for x in tensors])


def call_of(form: Form, sequences: list[Sequence], dtype: torch.dtype, **options) -> Callable[[], tuple[Tensor, Tensor]]:  # fmt: skip
    """A call of the form's op; what no query sees is NaN."""
    options["window"] = form.window
    if form.layout in ("packed", "pages"):
        q, k, v, where = _packed(form, sequences, dtype)
        return partial(torch_fdattn.varlen_attention, q, k, v, **where, **options)
    q, k, v, lens = _dense(form, sequences, dtype)
    if dtype != FP8:
        return partial(torch_fdattn.attention, q, k, v, lens, **options)
    scales = (torch.ones(x.shape[1], device=x.device) for x in (q, k, v))
    return partial(torch_fdattn.attention_fp8, q, k, v, *scales, lens, **options)


def in_float32(form: Form, sequences: list[Sequence]) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call of the raw forward of dense bfloat16 whose out is float32."""
    q, k, v, lens = _dense(form, sequences, torch.bfloat16)
    mask = Mask(kv_lens=lens, window_left=form.window[0], window_right=form.window[1])
    scale = q.shape[3] ** -0.5
    return partial(torch.ops.fdattn.attention_forward, q, k, v, *mask, scale, torch.float32)


def backward_of(form: Form, sequences: list[Sequence], douts: list[Tensor], dtype: torch.dtype, grad_dtype: torch.dtype | None = None, softcap: float = 0.0) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """A call of the raw backward, at SCALE; grad_dtype: of its results, by itself that of the inputs."""
    options = dict(window=form.window, scale=SCALE, softcap=softcap)
    mask = Mask(window_left=form.window[0], window_right=form.window[1])
    if form.layout == "packed":
        q, k, v, where = _packed(form, sequences, dtype)
        out, lse = torch_fdattn.varlen_attention(q, k, v, **where, **options)
        dout = torch.cat(douts, 1).transpose(0, 1).to(dtype).contiguous()
        state = dout, None, q, k, v, out, lse, *where.values()
        return partial(
            torch.ops.fdattn.varlen_attention_backward, *state, *mask, SCALE, grad_dtype, softcap
        )
    q, k, v, lens = _dense(form, sequences, dtype)
    out, lse = torch_fdattn.attention(q, k, v, lens, **options)
    state = torch.stack(douts).to(dtype), None, q, k, v, out, lse
    return partial(torch.ops.fdattn.attention_backward, *state, *mask._replace(kv_lens=lens), SCALE, grad_dtype, softcap)  # fmt: skip


def slopes_backward_of(form: Form, sequences: list[Sequence], douts: list[Tensor], dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:  # fmt: skip
    """The same of dense calls, with the gradient (H,) of ALiBi slopes, which are 0: scores are those without any."""
    call = backward_of(form, sequences, douts, dtype)
    state, options = call.args[:7], call.args[7:]
    q = state[2]
    slopes = q.new_zeros(q.shape[1], dtype=torch.float32)
    given = *state, True, False, False, *options, slopes
    return lambda: torch.ops.fdattn.attention_backward_all(*given)[:4]


def exact_slope_gradients(form: Form, sequences: list[Sequence], douts: list[Tensor]) -> Tensor:
    """(H,), float32. dS are multiples of 2⁻⁸, and their products with distances of some hundred rows have 24 bits."""
    found = []
    for each, dout in zip(sequences, douts, strict=True):
        slopes = dout.new_zeros(len(dout)).requires_grad_()
        leaves = (x.detach()[None].requires_grad_() for x in each)
        out = attention_oracle(*leaves, window=form.window, scale=SCALE, alibi_slopes=slopes)[0]
        if out.requires_grad:
            found.append(torch.autograd.grad(out, slopes, dout[None], materialize_grads=True)[0])
    return torch.stack(found).sum(0).float()


def in_order(call: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """The same call, of a backward whose sums have one order."""

    def ordered_call():
        with ordered():
            return call()

    return ordered_call


def sparse_gradients(sequences: list[Sequence]) -> list[Tensor]:
    """Of out: at most eight entries of a row are 1 or -1. With values of 1, 0, -1, dS has eight bits then."""
    found = []
    for q, _, _ in sequences:
        place = torch.randint(q.shape[2], (*q.shape[:2], 8), device=q.device)
        sign = torch.randint(2, place.shape, device=q.device).to(q) * 2 - 1
        found.append(torch.zeros_like(q).scatter_(2, place, sign))
    return found


def _int32(values, device) -> Tensor:
    return torch.tensor([*values], dtype=torch.int32, device=device)


def _dense(form: Form, sequences: list[Sequence], dtype: torch.dtype):
    qs, ks, vs = zip(*sequences, strict=True)
    tensors = torch.stack(qs), _padded(form, ks, torch.nan), _padded(form, vs, torch.nan)
    lens = _int32(form.keys, qs[0].device) if form.layout == "lengths" else None
    return *(x.float().to(dtype) for x in tensors), lens


def _packed(form: Form, sequences: list[Sequence], dtype: torch.dtype):
    qs, ks, vs = ([x.to(dtype) for x in each] for each in zip(*sequences, strict=True))
    device = qs[0].device
    begins, kv_begins = (
        _int32(itertools.accumulate(x, initial=0), device) for x in (form.queries, form.keys)
    )
    where = dict(cu_seqlens_q=begins)
    q = torch.cat(qs, 1).transpose(0, 1).contiguous()
    if form.layout == "packed":
        k, v = (torch.cat(x, 1).transpose(0, 1).contiguous() for x in (ks, vs))
        return q, k, v, where | dict(cu_seqlens_k=kv_begins)
    head_dim = q.shape[2]
    page = PAGES[head_dim]
    needed = [-(-n // page) for n in form.keys]
    count = sum(needed) + 3
    free = torch.randperm(count).tolist()
    table = torch.full((len(needed), max(needed) + 1), 1 << 20, dtype=torch.int32)
    k = torch.full((count, ks[0].shape[0], page, head_dim), torch.nan, dtype=dtype, device=device)
    v = k.clone()
    for b, n in enumerate(needed):
        for i in range(n):
            table[b, i] = own = free.pop()
            part = slice(i * page, min((i + 1) * page, form.keys[b]))
            for pages, x in ((k, ks[b]), (v, vs[b])):
                pages[own, :, : part.stop - part.start] = x[:, part]
    lens = _int32(form.keys, device)
    return q, k, v, where | dict(page_table=table.to(device), kv_lens=lens)
