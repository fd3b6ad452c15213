"""The arguments of both ops in one place, and what they must be; metadata only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks

#: Cache dtypes that are quantised, each with its largest value.
QUANTISED = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
_CACHE_DTYPES = "bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, int8 (or float64 on CPU)"


class Append(NamedTuple):
    """A call: `page_table` None where the cache is contiguous, any optional tensor None where not given."""

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor | None
    k: Tensor
    v: Tensor
    kv_lens: Tensor
    new_lens: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    q: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    positions: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Positions that a sequence can have in the cache."""
        pages = 1 if self.page_table is None else self.page_table.shape[1]
        return pages * self.k_cache.shape[2]

    @property
    def rotary_dim(self) -> int:
        """How many of a head's first elements turn."""
        return 0 if self.cos is None else 2 * self.cos.shape[1]


def check(call: Append) -> None:
    """Raises ValueError or TypeError, naming the argument, what was expected and what came."""
    _check_caches(call)
    _check_new_tokens(call)
    _check_scale("k_scale", call.k_scale, call.k_cache)
    _check_scale("v_scale", call.v_scale, call.v_cache)
    _check_rope(call)
    device = call.k_cache.device
    for name, tensor in zip(Append._fields, call, strict=True):
        if tensor is not None:
            checks.expect_device(name, tensor, device, "k_cache")


def _check_caches(call: Append) -> None:
    k_cache, v_cache, page_table = call.k_cache, call.v_cache, call.page_table
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.expect_4d(name, cache)
        checks.expect_head_dim(name, cache.shape[3])
        checks.expect_writable(name, cache)
    if k_cache.dtype not in checks.DTYPES and k_cache.dtype not in QUANTISED:
        raise TypeError(f"k_cache must be {_CACHE_DTYPES}, got {k_cache.dtype}")
    checks.expect_dtype("v_cache", v_cache, k_cache.dtype, "k_cache")
    checks.expect_shape("v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]), "k_cache")
    if page_table is None:
        return
    if page_table.dtype != torch.int32:
        raise TypeError(f"page_table must be int32, got {page_table.dtype}")
    if page_table.dim() != 2:
        raise ValueError(
            f"page_table must have shape (batch, pages a sequence), got {tuple(page_table.shape)}"
        )
    if k_cache.shape[2] < 1:
        raise ValueError("k_cache's pages must hold at least one token (dimension 2), got 0")


def _check_new_tokens(call: Append) -> None:
    k, v = call.k, call.v
    for name, tensor in (("k", k), ("v", v)):
        checks.expect_4d(name, tensor)
    checks.expect_float("k", k)
    checks.expect_dtype("v", v, k.dtype, "k")
    batches, like = call.k_cache, "k_cache"
    if call.page_table is not None:
        batches, like = call.page_table, "page_table and k_cache"
    rows = batches.shape[0], call.k_cache.shape[1], k.shape[2]
    checks.expect_shape("k", k, (*rows, call.k_cache.shape[3]), like)
    checks.expect_shape("v", v, (*rows, call.v_cache.shape[3]), "k and v_cache")
    # Under TORCH_FDATTN_CHECK=1 what would be dropped is an error.
    free = call.capacity - (k.shape[2] if call.new_lens is None else 0)
    checks.check_lengths("kv_lens", call.kv_lens, k, bound=free, like="k")
    checks.check_lengths("new_lens", call.new_lens, k, bound=k.shape[2], like="k")


def _check_scale(name: str, scale: Tensor | None, cache: Tensor) -> None:
    if scale is None:
        return
    if cache.dtype not in QUANTISED:
        raise ValueError(
            f"{name} must be None for an unquantised cache, got one for a cache of {cache.dtype}"
        )
    _expect_fp32(name, scale)
    slots, dims = cache.shape[:3], scale.dim()
    if dims > 3 or any(
        x not in (1, y) for x, y in zip(scale.shape, slots[3 - dims :], strict=True)
    ):
        raise ValueError(
            f"{name} must be broadcastable to {tuple(slots)} like the cache, "
            f"got shape {tuple(scale.shape)}"
        )


def _check_rope(call: Append) -> None:
    cos, sin, k, q, positions = call.cos, call.sin, call.k, call.q, call.positions
    if (cos is None) != (sin is None):
        given, missing = ("sin", "cos") if cos is None else ("cos", "sin")
        raise ValueError(f"cos and sin must be given together, got {given} and no {missing}")
    if cos is None:
        for name, tensor in (("q", q), ("positions", positions)):
            if tensor is not None:
                raise ValueError(f"{name} must be None without cos and sin, got a tensor")
        return
    if cos.dim() != 2 or cos.shape[0] < 1 or not 2 <= 2 * cos.shape[1] <= k.shape[3]:
        raise ValueError(
            "cos must have shape (positions, rotary_dim / 2) with rotary_dim from 2 to k's head_dim "
            f"{k.shape[3]}, got {tuple(cos.shape)}"
        )
    checks.expect_shape("sin", sin, cos.shape, "cos")
    _expect_fp32("cos", cos)
    _expect_fp32("sin", sin)
    if positions is not None:
        if positions.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"positions must be int32 (or int64), got {positions.dtype}")
        checks.expect_shape("positions", positions, (k.shape[0], k.shape[2]), "k")
    if q is not None:
        checks.expect_4d("q", q)
        checks.expect_shape("q", q, (k.shape[0], q.shape[1], *k.shape[2:]), "k")
        checks.expect_dtype("q", q, k.dtype, "k")
        checks.expect_writable("q", q)


def _expect_fp32(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {tensor.dtype}")
