"""The Python entries of the distributed ops."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.functional import window_bounds


def decode(
    q: Tensor, k_shard: Tensor, v_shard: Tensor, kv_lens: Tensor, group_name: str, *,
    q_start: Tensor | None = None, kv_start: Tensor | None = None, kv_block: int | None = None,
    causal: bool = True, window: tuple[int, int] | None = None, scale: float | None = None,
    strategy: str = "all_gather",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over a KV cache whose positions are sharded over the ranks of a process group.

    Args:
        q: queries (B, H, T, D), the same on every rank: the last T tokens of each sequence. Up to 16
            run the decode kernel, more (chunked prefill) the attention kernel.
        k_shard, v_shard: this rank's part of the cache (B, H_kv, local capacity, D); it may be empty.
        kv_lens: int32 (B,), **global** lengths, the new tokens included; the same on every rank.
        group_name: the process group's name (``group.group_name``).
        kv_block: rank r of W holds the positions ``p`` with ``(p // kv_block) % W == r``, in order
            (round-robin in blocks). None: block sharding, kv_block is the local capacity, which must
            then be equal on all ranks.
        kv_start: instead of kv_block, int32 (B,): this rank holds the contiguous run of positions from
            kv_start on. The runs of all ranks must be disjoint and cover the sequence; uneven is fine.
        q_start: int32 (B,), position of the first query. Default: kv_lens - T.
        causal, window, scale: as `torch_fdattn.attention`.
        strategy: how partial results travel: "all_gather".

    Returns:
        out (B, H, T, D) and lse (B, H, T) float32, the same bits on every rank. Differentiable: the
        gradients of k_shard and v_shard are local, that of q is summed over the ranks, under the
        convention that every rank computes the same loss from the replicated out and lse.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        RuntimeError: torch.distributed is not initialised, or the collective failed.
    """
    left, right = window_bounds(window)
    rank, world_size = rank_and_size(group_name)
    return torch.ops.fdattn.dist_decode(
        q, k_shard, v_shard, kv_lens, group_name, q_start, kv_start, rank=rank,
        world_size=world_size, kv_block=kv_block, causal=causal, window_left=left, window_right=right, scale=scale, strategy=strategy,
    )  # fmt: skip
