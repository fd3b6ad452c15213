"""What dist_decode asks of its inputs, before any data moves; metadata only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.attention.inputs import check_inputs
from torch_fdattn.ops.decode.inputs import (
    MAX_QUERY_TOKENS,
    QUANTISED,
    GlobalLengths,
    check_decode,
    expanded_scale,
)
from torch_fdattn.ops.options import AttentionOptions, DecodeOptions
from torch_fdattn.ops.positions import FAR, Mask
from torch_fdattn.ops.scores import Scores


class ExtraOptions(NamedTuple):
    """What decode takes besides the mask, in the order of its schema."""

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    batch_invariant: bool = False

    def options(self, mask: Mask, scale: float, dtype: torch.dtype | None = None) -> DecodeOptions:
        scores = Scores(self.softcap, self.alibi_slopes, self.sinks)
        return DecodeOptions(
            mask, scale, scores, self.k_scale, self.v_scale, self.batch_invariant, dtype
        )

    def given(self) -> tuple[str, ...]:
        """The names of the tensors that are not None."""
        names = ("k_scale", "v_scale", "alibi_slopes", "sinks")
        return tuple(name for name in names if getattr(self, name) is not None)


class CacheShard(NamedTuple):
    """This rank's part of the cache, contiguous or pages behind a table."""

    k: Tensor
    v: Tensor
    page_table: Tensor | None

    @property
    def capacity(self) -> int:
        """Keys a sequence that it can hold."""
        pages = 1 if self.page_table is None else self.page_table.shape[1]
        return self.k.shape[2] * pages


def expect_lengths(kv_lens: Tensor | None) -> None:
    """They are given."""
    if kv_lens is None:
        raise TypeError(
            "kv_lens must be an int32 (or int64) tensor of global lengths (batch,), got None"
        )


def check_tensors(q: Tensor, shard: CacheShard, kv_lens: Tensor | None, q_start, kv_start) -> None:
    """The caller's tensors, by the caller's names."""
    k, v = shard.k, shard.v
    for name, tensor in (("q", q), ("k_shard", k), ("v_shard", v)):
        checks.expect_4d(name, tensor)
    checks.expect_float("q", q)
    checks.expect_head_dim("q", q.shape[3])
    checks.expect_head_dim("v_shard", v.shape[3])
    rows = q.shape[0] if shard.page_table is None else k.shape[0]
    checks.expect_shape("k_shard", k, (rows, *k.shape[1:3], q.shape[3]), "q")
    checks.expect_shape("v_shard", v, (*k.shape[:3], v.shape[3]), "k_shard")
    checks.expect_groups(q.shape[1], k.shape[1], "q", "k_shard")
    for name, tensor in (("k_shard", k), ("v_shard", v)):
        if tensor.dtype not in QUANTISED:
            checks.expect_dtype(name, tensor, q.dtype, "q")
        checks.expect_device(name, tensor, q.device, "q")
    checks.expect_dtype("v_shard", v, k.dtype, "k_shard")
    if shard.page_table is not None:
        checks.expect_tensor("page_table", shard.page_table)
        if shard.page_table.dim() != 2:
            raise ValueError(
                "page_table must have shape (batch, pages a sequence), "
                f"got {tuple(shard.page_table.shape)}"
            )
    expect_lengths(kv_lens)
    # The bound is the same on all ranks, so that under TORCH_FDATTN_CHECK all of them raise or none.
    checks.check_lengths("kv_lens", kv_lens, q, bound=FAR)
    checks.check_lengths("q_start", q_start, q)
    checks.check_lengths("kv_start", kv_start, q)


def check_positions(
    shard: CacheShard, kv_block: int | None, kv_start: Tensor | None, world_size: int
) -> None:
    """The map of positions over the ranks."""
    if kv_block is not None and kv_block < 1:
        raise ValueError(f"kv_block must be at least 1, got {kv_block}")
    # Positions are int32 in the kernels. The condition is the same on all ranks: all raise, or none.
    block, name = (
        (shard.capacity, "k_shard's capacity") if kv_block is None else (kv_block, "kv_block")
    )
    if kv_start is None and block * world_size > FAR:
        raise ValueError(f"{name} must be at most 2**29 // {world_size} ranks, got {block}")
    if kv_block is not None and kv_start is not None:
        raise ValueError(
            "kv_block and kv_start exclude each other: round-robin or explicit shards, got both"
        )


def check_local_call(
    q: Tensor, shard: CacheShard, mask: Mask, scale: float, extras: ExtraOptions, global_lens: GlobalLengths | None = None
) -> None:  # fmt: skip
    """The call that this rank is going to make over its shard."""
    if runs_decode(q):
        options = extras.options(mask, scale)
        check_decode(q, shard.k, shard.v, shard.page_table, options, global_lens)
        expanded_scale("k_scale", extras.k_scale, shard.k, q)
        expanded_scale("v_scale", extras.v_scale, shard.v, q)
        return
    found = _beyond_attention(q, shard, extras)
    if found:
        raise NotImplementedError(
            f"q must have 1 to {MAX_QUERY_TOKENS} query tokens (dimension 2) with {', '.join(found)}, "
            f"got {q.shape[2]}"
        )
    names = "q", "k_shard", "v_shard"
    check_inputs(q, shard.k, shard.v, AttentionOptions(mask, scale), names)


def runs_decode(q: Tensor) -> bool:
    """Whether the decode kernel takes these queries, or else the attention kernel."""
    return 1 <= q.shape[2] <= MAX_QUERY_TOKENS


def refuse_gradients(
    q: Tensor, shard: CacheShard, extras: ExtraOptions, head_sharded: bool
) -> None:
    """Where the backward, which is attention's, is not the gradient."""
    found = _beyond_attention(q, shard, extras)
    if head_sharded:
        found.append("head_sharded")
    if found:
        raise NotImplementedError(
            f"dist.decode has no gradient with {', '.join(found)}: call it under torch.no_grad()"
        )


def _beyond_attention(q: Tensor, shard: CacheShard, extras: ExtraOptions) -> list[str]:
    """What the attention kernel, forward and backward, does not know."""
    found = [*extras.given(), *(["softcap"] if extras.softcap else [])]
    if shard.page_table is not None:
        found.append("page_table")
    if shard.k.dtype != q.dtype:
        found.append("a quantised cache")
    if shard.k.shape[3] != shard.v.shape[3]:
        found.append("different head dims of k_shard and v_shard")
    return found
