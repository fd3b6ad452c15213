"""From sequence shards to head shards and back: what `ulysses` and `ulysses_ring` share.

The ranks of a group exchange by all-to-alls, so that each has all of their tokens for its part of the heads. KV heads that
are fewer than the ranks are replicated, and their gradients summed over the copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_fdattn.dist.point_to_point import all_to_all
from torch_fdattn.dist.ring_attention.layout import gather_mask, with_length
from torch_fdattn.dist.ring_attention.local import Problem
from torch_fdattn.ops.scores import Scores


def check_heads(q_heads: int, kv_heads: int, world_size: int, strategy: str) -> None:
    if q_heads % world_size:
        raise ValueError(
            f"q's head count must be divisible by the {world_size} ranks that share heads with strategy={strategy!r}, got "
            f"{q_heads} heads"
        )
    if kv_heads % world_size and world_size % kv_heads:
        raise ValueError(
            f"k's head count must be divisible by the {world_size} ranks that share heads with strategy={strategy!r}, or "
            f"divide them, got {kv_heads} heads"
        )


def to_heads(x: Tensor, problem: Problem) -> Tensor:
    """(B, H, S_r, D) of this rank's tokens to (B, H / W, S, D) of its heads, in order of positions."""
    parts = x.chunk(problem.world_size, dim=1)
    shapes = [with_length(parts[0].shape, length) for length in problem.shards.lengths]
    return problem.shards.join(all_to_all(parts, shapes, problem.group_name), dim=2)


def to_tokens(x: Tensor, problem: Problem) -> Tensor:
    """The inverse of `to_heads`."""
    parts = [problem.shards.shard(x, r, dim=2) for r in range(problem.world_size)]
    own = with_length(x.shape, problem.shards.lengths[problem.rank])
    return torch.cat(all_to_all(parts, [own] * problem.world_size, problem.group_name), dim=1)


def keys_to_heads(x: Tensor, problem: Problem) -> Tensor:
    """`to_heads` of keys or values, whose heads are copied where there are fewer than ranks."""
    copies = max(1, problem.world_size // x.shape[1])
    return to_heads(x.repeat_interleave(copies, 1) if copies > 1 else x, problem)


def keys_to_tokens(x: Tensor, problem: Problem, dtype: torch.dtype) -> Tensor:
    """The inverse of `keys_to_heads`, of fp32 gradients (B, K / W, S, D): in `dtype`, or fp32 where copies are summed."""
    if problem.kv_heads >= problem.world_size:
        return to_tokens(x.to(dtype), problem)
    return to_tokens(x, problem).unflatten(1, (problem.kv_heads, -1)).sum(2)


def of_own_heads(problem: Problem, q: Tensor) -> dict[str, Any]:
    """scores, score_grads and dropout of this rank's part of the heads; q (B, H, S_r, D): like its queries, whose masks' rows of
    all ranks are gathered.
    """
    heads = q.shape[1] // problem.world_size
    mask = gather_mask(problem, q.shape[2])
    return of_heads(problem, problem.rank * heads, heads, mask)


def of_heads(problem: Problem, first: int, count: int, attn_mask: Tensor | None) -> dict[str, Any]:
    """scores, score_grads (which are parts of the problem's) and dropout of so many query heads from the first one on;
    attn_mask: all heads'."""

    def own(x: Tensor | None, dim: int) -> Tensor | None:
        """What has an entry for each head: those of these heads."""
        return x if x is None or x.shape[dim] == 1 else x.narrow(dim, first, count)

    softcap, slopes, sinks, _ = problem.scores
    grads = problem.score_grads
    return dict(
        scores=Scores(softcap, own(slopes, -1), own(sinks, -1), own(attn_mask, 1)),
        score_grads=Scores(
            alibi_slopes=own(grads.alibi_slopes, -1), attn_mask=own(grads.attn_mask, 1)
        ),
        dropout=problem.dropout.from_head(first),
    )
