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
    expect_int32,
    expect_pages,
    expect_rank,
    pad_heads,
    padded_dim,
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


class Cache(NamedTuple):
    """Where keys and values lie: rows (B, capacity, H_k, D), or pages (P, page, H_k, D) behind a table."""

    k: Tensor
    v: Tensor
    table: Tensor | None  # int32 (B, pages a sequence)
    lens: Tensor | None  # int32 (B,), of keys that are there; None: all
    leftpad: Tensor | None  # int32 (B,), of the first keys, which are hidden

    @property
    def capacity(self) -> int:
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])


class CacheCall(NamedTuple):
    """A call over a cache, of checked q, cache and options."""

    q: Tensor  # (B, S, H, D), or (T, H, D) where cu_seqlens_q says whose its tokens are
    cache: Cache
    k: Tensor | None  # (B, S_new, H_k, D), to be appended
    v: Tensor | None
    rotation: Rotation
    options: ScoreOptions
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None


def checked_cache(
    q: Tensor, batch: int, k_cache: Tensor, v_cache: Tensor, lens: int | Tensor | None, batch_idx: Tensor | None,
    leftpad: Tensor | None, table: Tensor | None, table_name: str,
) -> Cache:  # fmt: skip
    """The cache of a call of `batch` sequences; a table of pages is given by this name."""
    like = "the sequences of q"
    if type(lens) is int:
        lens = torch.full((batch,), lens, dtype=torch.int32, device=q.device)
    if lens is not None:
        if not isinstance(lens, Tensor):
            raise TypeError(
                f"cache_seqlens must be an int or an int32 tensor ({batch},), got {type(lens).__name__}"
            )
        expect_int32("cache_seqlens", lens, (batch,), like, q)
    if leftpad is not None:
        expect_int32("cache_leftpad", leftpad, (batch,), like, q)
    if table is not None:
        expect_pages(table_name, table, batch, k_cache, q)
        if batch_idx is not None:
            raise ValueError(f"cache_batch_idx must be None with {table_name}, got a tensor")
    elif batch_idx is not None:
        expect_int32("cache_batch_idx", batch_idx, (batch,), like, q)
        table = batch_idx[:, None]
    elif k_cache.shape[0] < batch:
        raise ValueError(
            f"k_cache must have a row for each of q's {batch} sequences, got shape {tuple(k_cache.shape)}"
        )
    else:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    return Cache(k_cache, v_cache, table, lens, leftpad)


def run_over_cache(call: CacheCall) -> tuple[Tensor, Tensor]:
    """(out, lse) in q's layout, after k and v were appended; -inf where a query sees no key. Not differentiable."""
    _check_new(call)

    def run(q, k_cache, v_cache, k, v):
        cache = call.cache._replace(k=k_cache, v=v_cache)
        return _append_and_attend(call._replace(q=q, cache=cache, k=k, v=v))

    tensors = call.q, call.cache.k, call.cache.v, call.k, call.v
    return run_without_derivatives("flash_attn_with_kvcache", "over a cache", run, *tensors)


def _check_new(call: CacheCall) -> None:
    """What is appended, and where; all that could still be refused after it was written."""
    q, cache, k, v, rotation, _, sinks, _ = call
    if sinks is not None:
        checks.expect_tensor("sinks", sinks)
        checks.expect_shape("sinks", sinks, (q.shape[-2],), "q's heads")
        checks.expect_float("sinks", sinks)
        checks.expect_device("sinks", sinks, q.device, "q")
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"k and v must be given together, got {given} and no {missing}")
    check_rotation(rotation, q, cache.capacity, appends=k is not None)
    new = 0
    if k is not None:
        if cache.lens is None:
            raise ValueError("cache_seqlens must be given where k and v are, got None")
        batch = cache.lens.shape[0]
        for name, x, like in (("k", k, cache.k), ("v", v, cache.v)):
            expect_rank(name, x, 4)
            checks.expect_shape(name, x, (batch, k.shape[1], *like.shape[2:]), f"q and {name}_cache")  # fmt: skip
            checks.expect_dtype(name, x, q.dtype, "q")
            checks.expect_device(name, x, q.device, "q")
        for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
            if padded_dim(x) > checks.MAX_HEAD_DIM:
                raise NotImplementedError(
                    f"{name}'s head_dim must be at most {checks.MAX_HEAD_DIM} where k and v are appended, "
                    f"got {x.shape[-1]}"
                )
        new = k.shape[1]
    lens = cache.lens
    # Elsewhere lengths are clamped and tokens dropped: a look at them would wait for the device.
    on_host = type(lens) is Tensor and lens.is_cpu and not torch.compiler.is_compiling()
    if lens is not None and (on_host or checks.readable(lens)):
        low, high = (int(x) for x in torch.aminmax(lens)) if lens.numel() else (0, 0)
        if low < 0 or high + new > cache.capacity:
            raise ValueError(
                f"cache_seqlens must lie in [0, {cache.capacity - new}] for {new} new tokens in a cache of "
                f"{cache.capacity} positions (those of block_table where it has pages), got values from {low} to {high}"
            )


def _append_and_attend(call: CacheCall) -> tuple[Tensor, Tensor]:
    q, cache, k, v, rotation, options, sinks, cu_seqlens_q = call
    if rotation.cos is not None:
        q, k = _rotated(q, k, cache, rotation, options)
    v_dim = cache.v.shape[-1]
    q, k_cache, v_cache = pad_heads(q, cache.k, cache.v)
    padded = cache._replace(k=k_cache, v=v_cache)
    if k is not None:
        padded = _append(padded, *pad_heads(k, v))
        for own, copy in ((cache.k, k_cache), (cache.v, v_cache)):
            if own is not copy:
                own.copy_(copy[..., : own.shape[-1]])
    out, lse = _attend(q, padded, {**options, "sinks": sinks}, cu_seqlens_q)
    return out[..., :v_dim], lse


def _rotated(
    q: Tensor, k: Tensor, cache: Cache, rotation: Rotation, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Queries that see keys by their positions turn by these, and else all by that of the first new key."""
    lens = cache.lens[:, None]
    hides = options["causal"] or any(0 <= x < cache.capacity for x in options["window"])
    steps = torch.arange(q.shape[1], device=q.device) if hides else torch.zeros_like(lens)
    positions = (lens + steps).expand(-1, q.shape[1])
    q = rotate_at(q, rotation, positions)
    return q, rotate_at(k, rotation, lens + torch.arange(k.shape[1], device=k.device))


def _append(cache: Cache, k: Tensor, v: Tensor) -> Cache:
    """The cache with the new tokens in it, and its lengths with theirs."""
    if cache.table is None:
        append_kv(cache.k, cache.v, k, v, cache.lens, layout="bshd")
    else:
        paged_append_kv(cache.k, cache.v, cache.table, k, v, cache.lens, layout="bshd")
    return cache._replace(lens=cache.lens + k.shape[1])


def _attend(
    q: Tensor, cache: Cache, options: dict, cu_seqlens_q: Tensor | None
) -> tuple[Tensor, Tensor]:
    hidden = None
    if cache.leftpad is not None:
        positions = torch.arange(cache.capacity, device=q.device)
        hidden = (positions >= cache.leftpad[:, None])[:, None, None]
    options = {**options, "layout": "bshd"}
    if cu_seqlens_q is None and q.shape[1] <= MAX_QUERY_TOKENS:
        if cache.table is None:
            return decode(q, cache.k, cache.v, cache.lens, attn_mask=hidden, **options)
        if hidden is None:
            return paged_decode(q, cache.k, cache.v, cache.table, cache.lens, **options)
    if cu_seqlens_q is None and cache.table is None:
        return attention(q, cache.k, cache.v, cache.lens, attn_mask=hidden, **options)
    batch, table, begins, rows = len(q), cache.table, cu_seqlens_q, q
    if begins is None:
        rows = q.flatten(0, 1)
        begins = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    if table is None:
        table = torch.arange(len(cache.k), dtype=torch.int32, device=q.device)[:, None]
    out, lse = varlen_attention(
        rows, cache.k, cache.v, begins, page_table=table, kv_lens=cache.lens, attn_mask=hidden, **options
    )  # fmt: skip
    if cu_seqlens_q is not None:
        return out, lse
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)
