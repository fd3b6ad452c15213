"""The Python entries of append_kv, one frame above `torch.ops.fdattn`."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops import library
from torch_fdattn.ops.append_kv import op
from torch_fdattn.ops.layout import Layout, to_bhsd


def append_kv(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor,
    new_lens: Tensor | None = None, *,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    q: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    positions: Tensor | None = None, layout: Layout = "bhsd",
) -> None:  # fmt: skip
    """Writes new keys and values into a preallocated cache, in place, in one launch.

    Token t of sequence b goes to position ``kv_lens[b] + t``; positions outside of the cache are dropped.

    Args:
        k_cache, v_cache: (B, H_kv, capacity, D) and (B, H_kv, capacity, D_v), any strides; bfloat16,
            float16, float32, or quantised: float8_e4m3fn, float8_e5m2, int8.
        k, v: (B, H_kv, T, D) and (B, H_kv, T, D_v), any float dtype and strides.
        kv_lens: int32 (B,), the lengths *before* the call. It stays as it is: add to it yourself.
        new_lens: int32 (B,), how many of each sequence's T tokens are real; the others are neither
            stored nor turned. Default: all.
        k_scale, v_scale: of quantised caches alone, float32, broadcastable to (B, H_kv, capacity): per
            tensor, head or position. Stored is x / scale, rounded to nearest, ties to even, saturated to
            ±448, ±57344 or ±127. NaN stays NaN in float8 and is 0 in int8. Default 1.
        cos, sin: float32 (positions, rotary_dim / 2): turns the first rotary_dim elements of k (half-split
            layout), in float32, before it is rounded, once.
        q: (B, H, T, D) like k, turned in place with it.
        positions: int32 or int64 (B, T), into cos and sin. Default: the cache's positions. Clamped to
            the table.
        layout: "bshd": k_cache and v_cache are (B, capacity, H_kv, D), k, v and q (B, T, H, D); scales stay as above.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        NotImplementedError: an argument requires gradients, and grad mode is on.

    Examples:
        >>> k_cache, v_cache = torch.zeros(2, 2, 2, 64, 16)
        >>> lens = torch.tensor([10, 0], dtype=torch.int32)
        >>> k, v = torch.randn(2, 2, 2, 1, 16)  # one new token a sequence
        >>> torch_fdattn.append_kv(k_cache, v_cache, k, v, lens)
        >>> torch.equal(k_cache[0, :, 10], k[0, :, 0])
        True
        >>> lens += 1
    """
    if layout != "bhsd":
        k_cache, v_cache, k, v, q = to_bhsd(layout, k_cache=k_cache, v_cache=v_cache, k=k, v=v, q=q)
    options = (new_lens, k_scale, v_scale, q, cos, sin, positions)
    given = k_cache, v_cache, k, v, kv_lens, *options
    if kv_lens is not None and library.can_bypass_dispatcher(*given):
        return op.append_eagerly(k_cache, v_cache, None, k, v, kv_lens, *options)
    tensors = ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v), ("kv_lens", kv_lens)
    _expect_append_types(tensors, options)
    torch.ops.fdattn.append_kv(k_cache, v_cache, k, v, kv_lens, *options)


def paged_append_kv(
    k_cache: Tensor, v_cache: Tensor, page_table: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor,
    new_lens: Tensor | None = None, *,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    q: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    positions: Tensor | None = None, layout: Layout = "bhsd",
) -> None:  # fmt: skip
    """`append_kv` into a paged cache.

    Args:
        k_cache, v_cache: (P, H_kv, page, D) and (P, H_kv, page, D_v), any strides and page size.
        page_table: int32 (B, pages a sequence): position p of sequence b is slot ``p % page`` of page
            ``page_table[b, p // page]``. Entries that are not needed are not read; what would go to a page
            outside of [0, P) is dropped. A page that is written to must belong to one sequence alone.
        k_scale, v_scale: broadcastable to (P, H_kv, page).
        layout: "bshd": pages (P, page, H_kv, D), k, v and q (B, T, H, D).

    The other arguments and the errors are those of `append_kv`.

    Examples:
        >>> k_pages, v_pages = torch.zeros(2, 8, 2, 16, 64)
        >>> table = torch.tensor([[3, 1], [0, 7]], dtype=torch.int32)
        >>> lens = torch.tensor([20, 9], dtype=torch.int32)
        >>> k, v = torch.randn(2, 2, 2, 1, 64)
        >>> torch_fdattn.paged_append_kv(k_pages, v_pages, table, k, v, lens)
        >>> torch.equal(k_pages[1, :, 4], k[0, :, 0])  # position 20 is slot 4 of the second page
        True
    """
    if layout != "bhsd":
        k_cache, v_cache, k, v, q = to_bhsd(layout, k_cache=k_cache, v_cache=v_cache, k=k, v=v, q=q)
    options = (new_lens, k_scale, v_scale, q, cos, sin, positions)
    tensors = (
        ("k_cache", k_cache), ("v_cache", v_cache), ("page_table", page_table), ("k", k), ("v", v),
        ("kv_lens", kv_lens),
    )  # fmt: skip
    _expect_append_types(tensors, options)
    torch.ops.fdattn.paged_append_kv(k_cache, v_cache, page_table, k, v, kv_lens, *options)


def _expect_append_types(tensors: tuple, options: tuple) -> None:
    names = ("new_lens", "k_scale", "v_scale", "q", "cos", "sin", "positions")
    given = ((n, x) for n, x in zip(names, options, strict=True) if x is not None)
    checks.expect_types((*tensors, *given))
