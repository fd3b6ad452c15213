"""Absolute positions of queries and keys, and the mask that follows from them (torch, readable).

Query ``i`` of a sequence stands at ``q_start + i``. Local key ``j`` stands at
``kv_start + (j // kv_block) * kv_stride + j % kv_block``: with ``kv_block = 0`` simply at
``kv_start + j``. A query at position ``p`` sees the keys at ``p - window_left .. p + window_right``
(-1 = unbounded) among the first ``kv_lens`` local keys; causal is ``window_right = 0``.

By default ``kv_start = 0`` and the queries are the last of the keys (bottom-right alignment):
``q_start = kv_start + kv_lens - S_q``. The Triton twin of this file is `ops/tiles.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Given positions, and windows, are clamped to this; queries of a call must be fewer, and keys fewer than twice
#: as many. Then a position (with its index within 1.5 · 2**30) with a window fits into the kernels' int32, and
#: so does what lies between two positions.
FAR = 1 << 29


class Mask(NamedTuple):
    """Which keys a query sees; the part of every op's schema that follows q, k, v."""

    kv_lens: Tensor | None = None
    q_start: Tensor | None = None
    kv_start: Tensor | None = None
    window_left: int = -1
    window_right: int = -1
    kv_block: int = 0
    kv_stride: int = 0

    @property
    def hides_nothing(self) -> bool:
        """Whether every query sees every key, whatever the positions and lengths."""
        return self.kv_lens is None and self.window_left < 0 and self.window_right < 0

    @property
    def clamped(self) -> Mask:
        """With windows within FAR, as every raw op takes them."""
        left, right = min(self.window_left, FAR), min(self.window_right, FAR)
        return self._replace(window_left=left, window_right=right)


def key_positions(index: Tensor, start: Tensor | int, kv_block: int, kv_stride: int) -> Tensor:
    """Positions of local keys `index`."""
    if kv_block:
        return start + index // kv_block * kv_stride + index % kv_block
    return start + index


def keys_before(position: Tensor, start: Tensor | int, kv_block: int, kv_stride: int) -> Tensor:
    """How many local keys of an endless shard stand before `position`."""
    distance = (position - start).clamp(min=0)
    if kv_block:
        full, rest = distance // kv_stride, distance % kv_stride
        return full * kv_block + rest.clamp(max=kv_block)
    return distance


def query_key_positions(
    mask: Mask, q_len: int, kv_len: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of queries (B or 1, q_len) and of keys (B or 1, kv_len), and the lengths (B or 1,)."""
    lens = torch.full((1,), kv_len, device=device)
    if mask.kv_lens is not None:
        lens = mask.kv_lens.long().clamp(0, kv_len)
    start = torch.zeros((1,), dtype=torch.long, device=device)
    if mask.kv_start is not None:
        start = mask.kv_start.long().clamp(-FAR, FAR)
    if mask.q_start is not None:
        q_start = mask.q_start.long().clamp(-FAR, FAR)
    else:
        q_start = start + lens - q_len
    queries = q_start[:, None] + torch.arange(q_len, device=device)
    keys = torch.arange(kv_len, device=device)
    return queries, key_positions(keys, start[:, None], mask.kv_block, mask.kv_stride), lens


def visible(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """The boolean mask (B or 1, q_len, kv_len): True where the query sees the key."""
    return sees(mask, *query_key_positions(mask, q_len, kv_len, device))


def sees(mask: Mask, queries: Tensor, keys: Tensor, lens: Tensor) -> Tensor:
    """`visible` for queries at these positions (B or 1, M); keys and lens as `query_key_positions` has them."""
    q_pos, k_pos = queries[:, :, None], keys[:, None, :]
    seen = (torch.arange(keys.shape[1], device=keys.device) < lens[:, None])[:, None, :]
    if mask.window_right >= 0:
        seen = seen & (k_pos <= q_pos + mask.window_right)
    if mask.window_left >= 0:
        seen = seen & (k_pos >= q_pos - mask.window_left)
    return seen.expand(-1, queries.shape[1], -1)


def sees_any(mask: Mask, queries: Tensor, keys: Tensor, lens: Tensor) -> Tensor:
    """(B or 1, N): whether any of the queries, of consecutive positions and at least one, sees the key."""
    by_first = sees(mask._replace(window_right=-1), queries[:, :1], keys, lens)
    by_last = sees(mask._replace(window_left=-1), queries[:, -1:], keys, lens)
    return (by_first & by_last)[:, 0]
