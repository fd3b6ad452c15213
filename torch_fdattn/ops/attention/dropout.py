"""Which weights dropout keeps, in torch: the meaning, and what the CPU op uses.

    out = (P ∘ Z / (1 - p)) V,   Z = 0 with probability p, else 1;   lse is that without dropout

Z follows from absolute positions alone, so that it is the same in forward and backward, whatever the tiles,
and on every device. Philox4x32 of 7 rounds (Salmon et al., SC 2011) under the key seed + offset · 2⁶⁴ / φ gives
four words for the counter (query position, key group, query head, batch): eight draws of 16 bits. Key position
n = 32 a + 8 b + 2 c + d (b, c < 4; d < 2) is of group 4 a + c, and takes from word b the lower half where d = 0,
else the upper: the keys of a group are those that a thread of a tensor core's accumulator holds. A weight is kept
where its draw is at least p · 2¹⁶: p is rounded to a multiple of 2⁻¹⁶. The Triton twin is `dropout_tiles.py`.

Batch is that of the call. So is the head, unless seed has a third number: that of the call's first head, where the call
has a part of the heads (of a rank, say). To shard batches over ranks, lengthen `seed` in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 7
#: 2**64 / φ as an int64: seeds and offsets that are near each other have keys that are not.
GOLDEN = -7046029254386353131
_LOW = 0xFFFFFFFF


class Dropout(NamedTuple):
    """The end of attention's schemas; seed (2,) or (3,) int64 on the device: seed, offset, the number of the first head."""

    p: float = 0.0
    seed: Tensor | None = None

    @property
    def threshold(self) -> int:
        """Draws below it are dropped."""
        return round(self.p * 65536)

    @property
    def counts_heads_from_seed(self) -> bool:
        return self.seed is not None and self.seed.shape[0] == 3

    def from_head(self, first: int) -> Dropout:
        """Of a call whose first head is this one's head `first`."""
        if self.seed is None:
            return self
        before = self.seed[2:] if self.counts_heads_from_seed else self.seed.new_zeros(1)
        return Dropout(self.p, torch.cat([self.seed[:2], before + first]))

    @property
    def factor(self) -> float:
        """Of the weights that are kept."""
        return 65536 / (65536 - self.threshold) if self.threshold < 65536 else 0.0


NO_DROPOUT = Dropout()


def kept_weights(
    dropout: Dropout, q_pos: Tensor, k_pos: Tensor, batch: int, heads: int, first_sequence: int = 0
) -> Tensor:
    """Z as booleans (B, H, M, N) for positions (B or 1, M) and (B or 1, N), of sequences from the first on."""
    seed, offset, *first_head = dropout.seed.unbind()
    groups, place = torch.unique((k_pos >> 5) * 4 + (k_pos >> 1 & 3), return_inverse=True)
    counters = (
        q_pos.expand(batch, -1)[:, None, :, None], groups,
        sum(first_head) + torch.arange(heads, device=q_pos.device)[:, None, None],
        first_sequence + torch.arange(batch, device=q_pos.device)[:, None, None, None],
    )  # fmt: skip
    bits = torch.stack(philox(seed + offset * GOLDEN, *torch.broadcast_tensors(*counters)), -1)
    draws = torch.stack([bits & 0xFFFF, bits >> 16], -1).flatten(-3)  # eight for each group
    index = place * 8 + (k_pos >> 3 & 3) * 2 + (k_pos & 1)
    index = index.expand(batch, -1)[:, None, None].expand(*draws.shape[:3], -1)
    return draws.gather(-1, index) >= dropout.threshold


def philox(key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """The four words, in int64 tensors, of counters of 32 bits each and a key of 64."""
    c0, c1, c2, c3 = (x & _LOW for x in (c0, c1, c2, c3))
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(ROUNDS):
        high2, low2 = _product(0xCD9E8D57, c2)
        high0, low0 = _product(0xD2511F53, c0)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of a product of two words; int64 cannot hold it."""
    below, above = a * (b & 0xFFFF), a * (b >> 16)
    return (above + (below >> 16)) >> 16, (below + ((above & 0xFFFF) << 16)) & _LOW
