"""One layer's attention over a KV cache sharded over ranks, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_fdattn.dist.groups import Group
from torch_fdattn.dist.kv_cache.sharded_cache import ShardedKVCache


class DistributedDecodeAttention(nn.Module):
    """Stores a step's keys and values on the ranks that they belong to and attends over all stored ones.

    For inference: every rank is given the same q, k and v and gets the same result. Prompts (many tokens) and
    decode steps (few) go through the same call.

    Args:
        batch, kv_heads, capacity, head_dim, dtype, device, kv_block, strategy, hierarchy, invariant_block: as
            `ShardedKVCache`.
        group: as `ShardedKVCache`.
        window, scale: as `torch_fdattn.attention`; the mask is causal.

    Attributes:
        cache: the `ShardedKVCache` of this one layer.

    Examples:
        >>> layer = torch_fdattn.dist.DistributedDecodeAttention(
        ...     2, 2, 256, 16, dtype=torch.float32, device="cpu", group=torch.distributed.group.WORLD,
        ... )
        >>> for tokens in (8, 1, 1):  # a prompt, then two steps
        ...     q, k, v = torch.randn(2, 4, tokens, 16), *torch.randn(2, 2, 2, tokens, 16)
        ...     out = layer(q, k, v)
        >>> layer.cache.held
        [10, 10]
    """

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device | str, group: Group = None,
        kv_block: int | None = None, strategy: str = "auto",
        window: tuple[int, int] | None = None, scale: float | None = None,
        hierarchy: tuple[Group, Group] | None = None, invariant_block: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.window, self.scale = window, scale
        self.cache = ShardedKVCache(
            1, batch, kv_heads, capacity, head_dim, dtype=dtype, device=device,
            group=group, kv_block=kv_block, strategy=strategy,
            hierarchy=hierarchy, invariant_block=invariant_block,
        )  # fmt: skip

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next T tokens' q (B, H, T, D), k and v (B, H_kv, T, D) -> out (B, H, T, D)."""
        self.cache.append(0, k, v)
        out = self.cache.attend(0, q, scale=self.scale, window=self.window)
        self.cache.advance(q.shape[2])
        return out

    def reset(self) -> None:
        """Forgets all tokens."""
        self.cache.reset()
