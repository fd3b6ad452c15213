"""The implementations that are compared: ours and each peer, one adapter a file.

An adapter gives a function of (q, k, v) for an attention case, or one call for each copy of a decode
case's inputs; what it needs to prepare (a plan, a compiled function, a mask) is prepared before
anything is timed. `available` gives the reason why it cannot run here, or None; a peer that was asked
for and cannot run becomes an error row, never a gap.

Peers are called the way their users are told to call them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch.nn.attention import SDPBackend

from ..registry import comma_separated
from .base import Attention, DecodeCall, Implementation, first
from .eager import Eager
from .fdattn import BatchInvariant, Fdattn, FullCache
from .flash_attention_3 import FlashAttention3
from .flash_attention_4 import FlashAttention4
from .flashinfer import FlashInfer
from .flex import Flex
from .sdpa import Sdpa

__all__ = ["FEATURED", "OURS", "PEERS", "Attention", "DecodeCall", "Implementation", "chosen", "first"]

OURS = Fdattn()
PEERS: dict[str, Implementation] = {
    peer.name: peer
    for peer in (
        FullCache(),
        BatchInvariant(),
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("fa2", SDPBackend.FLASH_ATTENTION),
        Flex(),
        FlashAttention3(),
        FlashAttention4(),
        FlashInfer(),
        Eager(),
    )
}


#: Those that are asked for the features of attention (`features.py`).
FEATURED: dict[str, Implementation] = {
    peer.name: peer
    for peer in (PEERS["flex"], PEERS["fa3"], Sdpa("sdpa"), Sdpa("sdpa-mask", masks=True))
}


def chosen(
    names: str, peers: Mapping[str, Implementation] = MappingProxyType(PEERS)
) -> tuple[Implementation, ...]:
    """Ours and the comma-separated ones of `peers`; `all` and `none` are understood."""
    chosen = comma_separated(names)
    chosen = {"all": list(peers), "none": []}.get(names.strip(), chosen)
    unknown = [name for name in chosen if name not in peers]
    if unknown:
        raise ValueError(f"--vs must name peers of {sorted(peers)}, got {', '.join(unknown)}")
    return (OURS, *(peers[name] for name in dict.fromkeys(chosen)))
