"""`flash_attn_with_kvcache` of both interfaces against the formula: every option, drawn together."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.dropins.flash_attn.formula import CLOSE, attend, drawn_options, drawn_sizes, made
from torch_fdattn.dropins.flash_attn import flash_attn_with_kvcache, interface_3

CAPACITY = 24


def turned(x: torch.Tensor, position: int, cos, sin, interleaved: bool) -> torch.Tensor:
    """One token's heads (H, D), element by element."""
    x, half = x.clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i], sin[position, i]
        x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return x


def scattered(cache: torch.Tensor, kind: str, page: int = 4):
    """(what is given as cache, keywords, where row b's positions lie): rows, other rows of a larger cache, or pages."""
    batch = len(cache)
    if kind == "rows":
        return torch.cat((cache, torch.full_like(cache[:1], 7.0))), {}
    if kind == "batch_idx":
        order = torch.randperm(2 * batch)[:batch]
        large = torch.full((2 * batch, *cache.shape[1:]), 7.0, dtype=cache.dtype)
        large[order] = cache
        return large, {"cache_batch_idx": order.int()}
    per = CAPACITY // page
    table = torch.randperm(batch * per + 3)[: batch * per].view(batch, per)
    pages = torch.full((batch * per + 3, page, *cache.shape[2:]), 7.0, dtype=cache.dtype)
    pages[table.flatten()] = cache.view(batch * per, page, *cache.shape[2:])
    return pages, {"block_table": table.int()}


def gathered(cache: torch.Tensor, where: dict, batch: int) -> torch.Tensor:
    """The rows (B, CAPACITY, …) of what `scattered` gave."""
    if "cache_batch_idx" in where:
        return cache[where["cache_batch_idx"].long()]
    if "block_table" in where:
        return cache[where["block_table"].long()].flatten(1, 2)
    return cache[:batch]


@pytest.mark.parametrize("seed", range(80))
def test_drawn(seed: int) -> None:
    rng = random.Random(seed)
    batch, queries = 2, rng.choice((1, 1, 4, 18))
    heads, kv_heads, dim = drawn_sizes(rng)
    options, given = drawn_options(rng, heads, batch)
    kind = rng.choice(("rows", "batch_idx", "pages"))
    three = rng.random() < 0.4
    appends = rng.random() < 0.6
    new = rng.choice((queries, 1, 3)) if appends else 0
    lens = [rng.randint(0 if appends else 1, CAPACITY - max(new, queries)) for _ in range(batch)]
    q = made(batch, queries, heads, dim)
    k_rows, v_rows = made(2, batch, CAPACITY, kv_heads, dim).unbind()
    state = torch.get_rng_state()
    k_cache, where = scattered(k_rows, kind)
    torch.set_rng_state(state)
    v_cache, _ = scattered(v_rows, kind)
    given.update(where)
    leftpad = [0] * batch
    if rng.random() < 0.4 and (three or kind != "pages"):
        leftpad = [rng.randint(0, max(0, n - 1)) for n in lens]
        given["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
    given["cache_seqlens"] = torch.tensor(lens, dtype=torch.int32)
    if rng.random() < 0.2:
        lens = [lens[0]] * batch
        given["cache_seqlens"] = lens[0]
        if "cache_leftpad" in given:
            leftpad = [min(x, max(0, lens[0] - 1)) for x in leftpad]
            given["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
    if appends:
        given["k"], given["v"] = made(2, batch, new, kv_heads, dim).unbind()
    rotary = appends and rng.random() < 0.7
    angles = (
        torch.rand(CAPACITY + 2, rng.choice((4, dim // 2)) if dim > 8 else 4, dtype=q.dtype) * 6
    )
    cos, sin, interleaved = angles.cos(), angles.sin(), rng.random() < 0.5
    if rotary:
        given.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)

    # The formula: rows with the new tokens in them, queries turned, keys up to the new length.
    hides = options["causal"] or any(0 <= x < CAPACITY for x in options["window"])
    slopes = options.pop("slopes")
    if three:
        slopes, sinks = None, torch.rand(heads) if rng.random() < 0.5 else None
        options["sinks"] = sinks
    outs, lses = [], []
    for b in range(batch):
        own_q = q[b]
        for t in range(new):
            key = given["k"][b, t]
            k_rows[b, lens[b] + t] = turned(key, lens[b] + t, cos, sin, interleaved) if rotary else key  # fmt: skip
            v_rows[b, lens[b] + t] = given["v"][b, t]
        if rotary:
            at = [lens[b] + i * hides for i in range(queries)]
            own_q = torch.stack([turned(x, p, cos, sin, interleaved) for x, p in zip(own_q, at, strict=True)])  # fmt: skip
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        end = lens[b] + new
        out, lse = attend(own_q, k_rows[b, :end], v_rows[b, :end], slopes=own, first_key=leftpad[b], **options)  # fmt: skip
        outs.append(out)
        lses.append(lse)

    if three:
        given.pop("alibi_slopes")
        given["page_table"] = given.pop("block_table", None)
        call = interface_3.flash_attn_with_kvcache
        out, lse = call(q, k_cache, v_cache, **given, sinks=sinks, return_softmax_lse=True)
    else:
        out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, **given, return_softmax_lse=True)
        assert not (lse == -math.inf).any()  # +inf, as theirs
        lse = torch.where(lse == math.inf, -math.inf, lse)
    torch.testing.assert_close(out, torch.stack(outs), **CLOSE)
    torch.testing.assert_close(lse, torch.stack(lses), **CLOSE)
    torch.testing.assert_close(gathered(k_cache, where, batch), k_rows, **CLOSE)
    torch.testing.assert_close(gathered(v_cache, where, batch), v_rows, **CLOSE)


def test_a_full_cache_without_lengths() -> None:
    q, cache = made(2, 1, 4, 16), made(2, 9, 2, 16)
    out = flash_attn_with_kvcache(q, cache, cache)
    expected = torch.stack([attend(q[b], cache[b], cache[b])[0] for b in range(2)])
    torch.testing.assert_close(out, expected, **CLOSE)


def test_no_queries() -> None:
    q, kv, cache = made(2, 0, 4, 16), made(2, 1, 2, 16), made(2, 9, 2, 16)
    assert flash_attn_with_kvcache(q, cache, cache, kv, kv, cache_seqlens=3).shape == q.shape
    assert torch.equal(cache[:, 3], kv[:, 0])


def test_the_queries_stay_as_they_are() -> None:
    q, kv, cache = made(2, 1, 4, 16), made(2, 1, 2, 16), made(2, 9, 2, 16)
    before, angles = q.clone(), torch.rand(9, 8, dtype=q.dtype)
    flash_attn_with_kvcache(q, cache, cache.clone(), kv, kv, angles, angles, cache_seqlens=3)
    assert torch.equal(q, before)


def test_inputs_may_require_gradients_and_a_backward_raises() -> None:
    q, cache = made(2, 1, 4, 16).requires_grad_(), made(2, 9, 2, 16)
    kv = made(2, 1, 2, 16).requires_grad_()
    out = flash_attn_with_kvcache(q, cache, cache.clone(), kv, kv, cache_seqlens=3)
    assert torch.equal(cache[:, 3], kv[:, 0])
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache has no gradient"):
        out.sum().backward()


@pytest.mark.parametrize("kind", ["rows", "batch_idx", "pages"])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves", "moved"])
@pytest.mark.parametrize("packed_q", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_tokens(kind: str, rotary: str | None, packed_q: bool, causal: bool) -> None:
    """FlashAttention-3's cu_seqlens_q and cu_seqlens_k_new: chunks of several lengths into and over one cache."""
    of_q, new, lens = [3, 1, 7] if packed_q else [2, 2, 2], [2, 0, 5], [5, 9, 12]
    moved = [lens[b] + 4 * (rotary == "moved") for b in range(3)]
    q, rows, kv = made(sum(of_q), 4, 16), made(3, CAPACITY, 2, 16), made(8, 2, 16)
    cache, where = scattered(rows, kind)
    angles = torch.rand(CAPACITY, 4, dtype=q.dtype) * 6
    cos, sin, interleaved = angles.cos(), angles.sin(), rotary == "interleaved"
    given = {
        "page_table": where.get("block_table"),
        "cache_batch_idx": where.get("cache_batch_idx"),
    }
    if rotary is not None:
        given |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    if rotary == "moved":
        given["rotary_seqlens"] = torch.tensor(moved, dtype=torch.int32)
    begins = [torch.tensor([0, *x]).cumsum(0).int() for x in (of_q, new)]
    if packed_q:
        given |= {"cu_seqlens_q": begins[0], "max_seqlen_q": 7}
    extra = made(1, 2, 16)  # of no sequence: not stored
    tokens = torch.cat((kv[:7], extra))
    out = interface_3.flash_attn_with_kvcache(
        q if packed_q else q.unflatten(0, (3, 2)), cache, cache.clone(), tokens, tokens,
        cache_seqlens=torch.tensor(lens, dtype=torch.int32), cu_seqlens_k_new=begins[1], causal=causal, **given,
    )  # fmt: skip
    expected, values = [], rows.clone()
    for b, (own_q, own_kv) in enumerate(zip(q.split(of_q), kv[:7].split(new), strict=True)):
        for t, x in enumerate(own_kv):
            key = x if rotary is None else turned(x, moved[b] + t, cos, sin, interleaved)
            rows[b, lens[b] + t], values[b, lens[b] + t] = key, x
        if rotary is not None:
            own_q = torch.stack([turned(x, moved[b] + i * causal, cos, sin, interleaved) for i, x in enumerate(own_q)])  # fmt: skip
        end = lens[b] + new[b]
        expected.append(attend(own_q, rows[b, :end], values[b, :end], causal=causal)[0])
    torch.testing.assert_close(out if packed_q else out.flatten(0, 1), torch.cat(expected), **CLOSE)
    torch.testing.assert_close(gathered(cache, where, 3), rows, **CLOSE)


def test_rows_of_a_page_table() -> None:
    """FlashAttention-3's cache_batch_idx beside a page_table: the rows of the table."""
    q, rows, lens = made(2, 3, 4, 16), made(4, CAPACITY, 2, 16), [5, 20]
    pages, where = scattered(rows, "pages")
    chosen = torch.tensor([3, 1], dtype=torch.int32)
    out = interface_3.flash_attn_with_kvcache(
        q, pages, pages, cache_seqlens=torch.tensor(lens, dtype=torch.int32), cache_batch_idx=chosen,
        page_table=where["block_table"],
    )  # fmt: skip
    for own, own_q, row, n in zip(out, q, (3, 1), lens, strict=True):
        torch.testing.assert_close(own, attend(own_q, rows[row, :n], rows[row, :n])[0], **CLOSE)


def test_captured_lengths_are_read_at_each_call() -> None:
    """Lengths are the device's: the same tensors with other contents give other results."""
    q, cache, lens = made(1, 1, 2, 16), made(1, 8, 2, 16), torch.tensor([3], dtype=torch.int32)
    first = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lens)
    lens += 4
    second = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lens)
    torch.testing.assert_close(first[0], attend(q[0], cache[0, :3], cache[0, :3])[0], **CLOSE)
    torch.testing.assert_close(second[0], attend(q[0], cache[0, :7], cache[0, :7])[0], **CLOSE)
