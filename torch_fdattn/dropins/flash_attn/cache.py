"""Appending to a cache and attending over it: what the two forms of `flash_attn_with_kvcache` share.

A cache without a table is one whose pages are its rows: a `cache_batch_idx` is then a page table of one column, and the
rows are read where they lie.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dropins.flash_attn.arguments import (
    ScoreOptions,
    dense_rows,
    expect_int32,
    expect_pages,
    expect_rank,
    expect_used_pages,
    host_values,
)
from torch_fdattn.dropins.flash_attn.rotation import Rotation, check_rotation, rotate_at
from torch_fdattn.functional import (
    append_kv,
    attention,
    decode,
    paged_append_kv,
    paged_decode,
    varlen_attention,
)
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS
from torch_fdattn.ops.library import run_without_derivatives


class FlashCache(NamedTuple):
    """Where keys and values lie: rows (B, capacity, H_k, D), or pages (P, page, H_k, D) behind a table."""

    k: Tensor
    v: Tensor
    table: Tensor | None  # int32 (B, pages a sequence)
    lens: Tensor | None  # int32 (B,), of keys that are there; None: all
    leftpad: Tensor | None  # int32 (B,), of the first keys, which are hidden
    length: int | None = None  # of every sequence, where the caller gave one number
    table_name: str = "block_table"

    @property
    def capacity(self) -> int:
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])


class CacheCall(NamedTuple):
    """A call over a cache, of checked q, cache and options."""

    q: Tensor  # (B, S, H, D), or (T, H, D) where cu_seqlens_q says whose its tokens are
    cache: FlashCache
    k: (
        Tensor | None
    )  # (B, S_new, H_k, D), to be appended, or (T_new, H_k, D) where cu_seqlens_k says whose they are
    v: Tensor | None
    rotation: Rotation
    options: ScoreOptions
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


def checked_cache(
    q: Tensor, batch: int, k_cache: Tensor, v_cache: Tensor, lens: int | Tensor | None, batch_idx: Tensor | None,
    leftpad: Tensor | None, table: Tensor | None, table_name: str,
) -> FlashCache:  # fmt: skip
    """The cache of a call of `batch` sequences; a table of pages is given by this name."""
    like, length = "the sequences of q", None
    if type(lens) is int:
        if not 0 <= lens < 2**31:
            raise ValueError(f"cache_seqlens must be an int32 of 0 or more, got {lens}")
        length, lens = lens, torch.full((batch,), lens, dtype=torch.int32, device=q.device)
    if lens is not None:
        if not isinstance(lens, Tensor):
            raise TypeError(
                f"cache_seqlens must be an int or an int32 tensor ({batch},), got {type(lens).__name__}"
            )
        expect_int32("cache_seqlens", lens, (batch,), like, q)
    if leftpad is not None:
        expect_int32("cache_leftpad", leftpad, (batch,), like, q)
    if batch_idx is not None:
        expect_int32("cache_batch_idx", batch_idx, (batch,), like, q)
        rows = (k_cache if table is None else table).shape[0]
        values = host_values(batch_idx)
        if values is not None and not all(0 <= x < rows for x in values):
            raise ValueError(
                f"cache_batch_idx must lie in [0, {rows}), the rows of the cache, got {values}"
            )
        if table is None:
            return FlashCache(
                k_cache, v_cache, batch_idx[:, None], lens, leftpad, length, table_name
            )
        expect_pages(table_name, table, None, k_cache, q)
        table = table[batch_idx]
    elif table is not None:
        expect_pages(table_name, table, batch, k_cache, q)
    elif k_cache.shape[0] < batch:
        raise ValueError(
            f"k_cache must have a row for each of q's {batch} sequences, got shape {tuple(k_cache.shape)}"
        )
    else:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    return FlashCache(k_cache, v_cache, table, lens, leftpad, length, table_name)


def run_over_cache(call: CacheCall) -> tuple[Tensor, Tensor]:
    """(out, lse) in q's layout, after k and v were appended; -inf where a query sees no key. Not differentiable."""
    _check_new(call)

    def run(q, k_cache, v_cache, k, v):
        cache = call.cache._replace(k=k_cache, v=v_cache)
        return _append_and_attend(call._replace(q=q, cache=cache, k=k, v=v))

    tensors = dense_rows(call.q), call.cache.k, call.cache.v, call.k, call.v
    return run_without_derivatives("flash_attn_with_kvcache", "over a cache", run, *tensors)


def _check_new(call: CacheCall) -> None:
    """What is appended, and where; all that could still be refused after it was written."""
    q, cache, k, v, rotation, _, sinks, _, cu_seqlens_k = call
    if sinks is not None:
        checks.expect_tensor("sinks", sinks)
        checks.expect_shape("sinks", sinks, (q.shape[-2],), "q's heads")
        checks.expect_float("sinks", sinks)
        checks.expect_device("sinks", sinks, q.device, "q")
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"k and v must be given together, got {given} and no {missing}")
    if k is None and cu_seqlens_k is not None:
        raise ValueError("k and v must be given where cu_seqlens_k_new is, got None")
    check_rotation(rotation, q, cache.capacity, appends=k is not None)
    new = 0
    if k is not None:
        if cache.lens is None:
            raise ValueError("cache_seqlens must be given where k and v are, got None")
        expect_rank("k", k, 4 if cu_seqlens_k is None else 3)
        tokens = k.shape[:-2] if cu_seqlens_k is not None else (len(cache.lens), k.shape[1])
        for name, x, like in (("k", k, cache.k), ("v", v, cache.v)):
            expect_rank(name, x, k.dim())
            checks.expect_shape(name, x, (*tokens, *like.shape[2:]), f"q and {name}_cache")
            checks.expect_dtype(name, x, q.dtype, "q")
            checks.expect_device(name, x, q.device, "q")
        new = k.shape[1] if cu_seqlens_k is None else cu_seqlens_k.diff()
    _check_capacity(cache, new)


def _check_capacity(cache: FlashCache, new: int | Tensor) -> None:
    """Lengths that lie on the host. Elsewhere they are clamped, and tokens dropped: a look would wait for the device."""
    lens = cache.lens
    if cache.length is not None:
        lens, new = torch.tensor([cache.length]), new if type(new) is int else 0
    if type(lens) is not Tensor or torch.compiler.is_compiling() or not lens.numel():
        return
    if not lens.is_cpu and not checks.readable(lens):
        return
    ends = lens + new
    if int(lens.min()) < 0 or int(ends.max()) > cache.capacity:
        raise ValueError(
            f"cache_seqlens must lie in [0, {cache.capacity}] with the new tokens, in a cache of {cache.capacity} "
            f"positions (those of {cache.table_name} where it has pages), got {lens.tolist()}, and {ends.tolist()} with them"
        )
    if cache.table is not None:
        expect_used_pages(cache.table_name, cache.table, ends.expand(len(cache.table)), cache.k)


def _append_and_attend(call: CacheCall) -> tuple[Tensor, Tensor]:
    q, cache, k, v, rotation, options, sinks, cu_seqlens_q, cu_seqlens_k = call
    if rotation.cos is not None:
        first = cache.lens if rotation.first is None else rotation.first
        # Queries that see keys by their positions turn by these, and else all by that of the first new key.
        hides = options["causal"] or any(0 <= x < cache.capacity for x in options["window"])
        q = rotate_at(q, rotation, _positions(first, q, cu_seqlens_q, advancing=hides))
        k = rotate_at(k, rotation, _positions(first, k, cu_seqlens_k))
    if k is not None:
        cache = _append(cache, k, v, cu_seqlens_k)
    return _attend(q, cache, {**options, "sinks": sinks}, cu_seqlens_q)


def _positions(
    first: Tensor, x: Tensor, cu_seqlens: Tensor | None, advancing: bool = True
) -> Tensor:
    """Of tokens (B, S, …) or packed ones (T, …), whose sequences begin at first (B,); all there if not advancing."""
    if cu_seqlens is None:
        steps = torch.arange(x.shape[1], device=x.device) * advancing
        return first[:, None] + steps
    sequence, step, _ = places(cu_seqlens, len(x))
    return first[sequence] + step * advancing


def places(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of packed tokens: their sequences, their numbers in them, and whether they are of any."""
    row = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    inside = sequence < len(cu_seqlens) - 1
    sequence = sequence.clamp(max=len(cu_seqlens) - 2)
    return sequence, row - cu_seqlens[sequence], inside


def _append(cache: FlashCache, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> FlashCache:
    """The cache with the new tokens in it, and its lengths with theirs."""
    lens = cache.lens
    if cu_seqlens is not None:
        # Each token as a sequence of its own, behind the pages of its sequence; position -1 is dropped.
        sequence, step, inside = places(cu_seqlens, len(k))
        at = torch.where(inside, lens[sequence] + step, -1).int()
        table = _table_of(cache)[sequence]
        paged_append_kv(cache.k, cache.v, table, k[:, None], v[:, None], at, layout="bshd")
        return cache._replace(lens=lens + cu_seqlens.diff())
    if cache.table is None:
        append_kv(cache.k, cache.v, k, v, lens, layout="bshd")
    else:
        paged_append_kv(cache.k, cache.v, cache.table, k, v, lens, layout="bshd")
    return cache._replace(lens=lens + k.shape[1])


def _table_of(cache: FlashCache) -> Tensor:
    """The page table, or that of rows as pages."""
    if cache.table is not None:
        return cache.table
    return torch.arange(len(cache.k), dtype=torch.int32, device=cache.k.device)[:, None]


def _attend(
    q: Tensor, cache: FlashCache, options: dict, cu_seqlens_q: Tensor | None
) -> tuple[Tensor, Tensor]:
    shown = None
    if cache.leftpad is not None:
        positions = torch.arange(cache.capacity, device=q.device)
        shown = (positions >= cache.leftpad[:, None])[:, None, None]
    options = {**options, "layout": "bshd"}
    if cu_seqlens_q is None and 1 <= q.shape[1] <= MAX_QUERY_TOKENS:
        if cache.table is None:
            return decode(q, cache.k, cache.v, cache.lens, attn_mask=shown, **options)
        if shown is None:
            return paged_decode(q, cache.k, cache.v, cache.table, cache.lens, **options)
    if cu_seqlens_q is None and cache.table is None:
        return attention(q, cache.k, cache.v, cache.lens, attn_mask=shown, **options)
    batch, begins, rows = len(q), cu_seqlens_q, q
    if begins is None:
        rows = q.flatten(0, 1)
        begins = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    out, lse = varlen_attention(
        rows, cache.k, cache.v, begins, page_table=_table_of(cache), kv_lens=cache.lens, attn_mask=shown, **options
    )  # fmt: skip
    if cu_seqlens_q is not None:
        return out, lse
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)
