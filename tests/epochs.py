"""Channels whose next call has the epoch that a test wants."""

from __future__ import annotations

import torch

from torch_fdattn.dist.symm.channel import Channel

#: Purposes whose data is copied to fixed addresses, for which "free" flags say that nobody reads them (`copies.py`).
_COPIED = ("copy_engine/all_gather", "copy_engine/reduce_scatter", "fused/all_gather")


def start_at(epoch: int, purpose: str, channel: Channel) -> None:
    """As if the channel's next call were this one, and its memory free for it; on all ranks, no call under way."""
    channel.memory.local.zero_()
    channel.state[0] = epoch
    if purpose in _COPIED:
        raised = (epoch * -7046029254386353131 + 2**63) % 2**64 - 2**63  # `signals.flag`
        channel.memory.local.view(torch.int64)[channel.world : 2 * channel.world] = raised
