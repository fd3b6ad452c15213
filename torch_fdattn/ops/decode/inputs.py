"""What decode and paged_decode ask of their arguments; metadata only, the same for real and fake tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.attention.inputs import lse_dtype
from torch_fdattn.ops.options import DecodeOptions, default_scale

MAX_QUERY_TOKENS = 16


class GlobalLengths(NamedTuple):
    """kv_lens counts the keys of whole sequences, of which the cache holds a shard: local key j is key
    start + (j // block) · stride + j % block, or kv_start + j where kv_start is given. The kernels cut them.
    """

    start: int
    block: int
    stride: int
    max_len: int  # keys of a sequence at most


#: Cache dtypes of one byte, which come with scales.
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


class Cache(NamedTuple):
    """Where keys and values are: (B, H_kv, N, D), or pages (P, H_kv, page, D) behind a table."""

    k: Tensor
    v: Tensor
    page_table: Tensor | None = None
    k_scale: Tensor | None = None  # of k.shape[:3], by strides
    v_scale: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Keys a sequence at most."""
        if self.page_table is None:
            return self.k.shape[2]
        return self.page_table.shape[1] * self.k.shape[2]


class DecodeCall(NamedTuple):
    """A checked call; its scales stand in `cache`, expanded to the cache's shape."""

    q: Tensor
    cache: Cache
    options: DecodeOptions
    global_lens: GlobalLengths | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but q, k and v, in the order of the kernel's parameters."""
        scores = self.options.scores
        of_scores = scores.alibi_slopes, scores.attn_mask, scores.sinks
        return *self.options.mask[:3], *self.cache[2:], *of_scores


def checked_call(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, options: DecodeOptions,
    global_lens: GlobalLengths | None = None,
) -> DecodeCall:  # fmt: skip
    check_decode(q, k, v, page_table, options, global_lens)
    scales = (
        expanded_scale(name, getattr(options, name), cache, q)
        for name, cache in (("k_scale", k), ("v_scale", v))
    )
    return DecodeCall(q, Cache(k, v, page_table, *scales), options, global_lens)


def plain_numbers(q: Tensor, options: DecodeOptions) -> DecodeOptions:
    """With Python's own numbers, which Triton and ctypes ask for, a scale, and windows within FAR."""
    mask, scores = options.mask, options.scores
    mask = mask._replace(
        window_left=checks.plain_int("window", mask.window_left),
        window_right=checks.plain_int("window", mask.window_right),
        kv_block=checks.plain_int("kv_block", mask.kv_block),
        kv_stride=checks.plain_int("kv_stride", mask.kv_stride),
    )
    return options._replace(
        mask=mask.clamped,
        scale=checks.plain_float("scale", default_scale(q, options.scale)),
        scores=scores._replace(softcap=checks.plain_float("softcap", scores.softcap)),
        batch_invariant=bool(options.batch_invariant),
    )


def check_decode(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, options: DecodeOptions,
    global_lens: GlobalLengths | None = None,
) -> None:  # fmt: skip
    """q (B, H, T, D), k (B, H_kv, N, D), v (B, H_kv, N, DV), or pages behind page_table."""
    mask, scale, scores = options.mask, options.scale, options.scores
    for name, tensor in (("q", q), ("k_cache", k), ("v_cache", v)):
        checks.expect_4d(name, tensor)
    checks.expect_float("q", q)
    batch, heads, q_len, head_dim = q.shape
    if not 1 <= q_len <= MAX_QUERY_TOKENS:
        raise ValueError(
            f"q must have 1 to {MAX_QUERY_TOKENS} query tokens (dimension 2), got {q_len}; "
            "use attention for longer queries"
        )
    checks.expect_head_dim("q", head_dim)
    checks.expect_head_dim("v_cache", v.shape[3])
    rows, kv_heads, slots = k.shape[0] if page_table is not None else batch, k.shape[1], k.shape[2]
    checks.expect_shape("k_cache", k, (rows, kv_heads, slots, head_dim), "q")
    checks.expect_shape("v_cache", v, (rows, kv_heads, slots, v.shape[3]), "k_cache")
    checks.expect_groups(heads, kv_heads, "q", "k_cache")
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if cache.dtype not in QUANTISED:
            checks.expect_dtype(name, cache, q.dtype, "q")
        checks.expect_device(name, cache, q.device, "q")
    checks.expect_dtype("v_cache", v, k.dtype, "k_cache")
    if page_table is not None:
        checks.expect_page_table(page_table, batch, "q's batch", q.device)
        checks.expect_pages("k_cache", slots)
        slots *= page_table.shape[1]
    # Of a shard, whoever knows whole sequences has compared them with a bound that is the same on all ranks: one
    # rank that raised alone, for want of keys, would be waited for by the others.
    checks.check_lengths("kv_lens", mask.kv_lens, q, bound=slots if global_lens is None else None)
    checks.check_window(mask.window_left, mask.window_right)
    # The position of the last key follows from the length, if that is the whole sequence's.
    masked = global_lens is None and (
        mask.window_left >= 0 or mask.window_right >= 0 or scores.alibi_slopes is not None
    )
    checks.check_positions(
        mask.q_start, mask.kv_start, mask.kv_block, mask.kv_stride, q, slots, masked
    )
    checks.expect_number("scale", scale)
    checks.check_scale(scale)
    checks.check_scores(scores.softcap, scores.alibi_slopes, scores.sinks, q)
    checks.check_attn_mask(scores.attn_mask, q, (*q.shape[:3], k.shape[2]))


def expanded_scale(name: str, scale: Tensor | None, cache: Tensor, q: Tensor) -> Tensor | None:
    """A cache's scales as a view of shape cache.shape[:3]."""
    if scale is None:
        return None
    checks.expect_tensor(name, scale)
    if cache.dtype not in QUANTISED:
        raise ValueError(
            f"{name} must be None for an unquantised cache, got one for a cache of {cache.dtype}"
        )
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {scale.dtype}")
    checks.expect_device(name, scale, q.device, "q")
    try:
        return scale.expand(cache.shape[:3])
    except RuntimeError:
        raise ValueError(
            f"{name} must be broadcastable to {tuple(cache.shape[:3])} like the cache, "
            f"got shape {tuple(scale.shape)}"
        ) from None


def check_out(call: DecodeCall, out: Tensor, lse: Tensor, workspace: Tensor | None) -> None:
    """What a call is given to write into; not how large the workspace must be."""
    q = call.q
    checks.expect_shape("out", out, (*q.shape[:3], call.cache.v.shape[3]), "q and v_cache")
    checks.expect_float("out", out)
    checks.expect_writable("out", out)
    checks.expect_shape("lse", lse, q.shape[:3], "q")
    checks.expect_dtype("lse", lse, lse_dtype(q), "every lse of such inputs")
    for name, tensor in (("out", out), ("lse", lse), ("workspace", workspace)):
        if tensor is not None:
            checks.expect_device(name, tensor, q.device, "q")
    if not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, got strides {lse.stride()}")
    if workspace is not None:
        _check_workspace_kind(workspace)


def check_workspace(workspace: Tensor, needed: int, device: torch.device) -> None:
    checks.expect_tensor("workspace", workspace)
    checks.expect_device("workspace", workspace, device, "q")
    _check_workspace_kind(workspace)
    if workspace.numel() < needed:
        raise ValueError(f"workspace must have at least {needed} elements, got {workspace.numel()}")


def _check_workspace_kind(workspace: Tensor) -> None:
    if workspace.dtype != torch.int32 or workspace.dim() != 1 or not workspace.is_contiguous():
        raise TypeError(
            "workspace must be a contiguous int32 tensor of one dimension, as decode_workspace makes it, "
            f"got {workspace.dtype} of shape {tuple(workspace.shape)}"
        )
