"""Which strategy of `dist.ring_attention` is the fastest, by tokens of the whole sequence: causal, zigzag shards, forward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from torch_fdattn.dist import SequenceShards, ring_attention
from torch_fdattn.dist.ring_attention.auto import nearest
from torch_fdattn.tables import entries
from torch_fdattn.tables.device import Device
from torch_fdattn.tables.sections import RING_CHOICES
from torch_fdattn.tune.session import Session

SECTION = "ring_attention"
TOKENS, QUICK_TOKENS = tuple(2**i for i in range(12, 17)), (32,)
HEADS, HEAD_DIM, QUICK_HEADS, QUICK_HEAD_DIM = 16, 128, 2, 16


@torch.no_grad()
def measure(session: Session) -> list[dict]:
    choices: list[list] = []
    for tokens in QUICK_TOKENS if session.quick else TOKENS:
        if session.expired():
            session.note(f"{SECTION}: time is up at {tokens} tokens")
            break
        case = f"{tokens} tokens, {session.ranks} ranks"
        times = session.clock.compare(
            session.agreeing(f"{SECTION}: {case}", _calls(session, tokens))
        )
        if times:
            # What is chosen without the file that this writes.
            shipped = nearest(entries(SECTION, Device.of(session.device)), session.ranks, tokens)
            choices.append([tokens, session.choose(SECTION, case, shipped, times)])
    return [dict(ranks=session.ranks, choices=choices)] if choices else []


def _calls(session: Session, tokens: int) -> Iterator[tuple[str, list[partial[Tensor]]]]:
    """Of each strategy."""
    heads, dim = (QUICK_HEADS, QUICK_HEAD_DIM) if session.quick else (HEADS, HEAD_DIM)
    rank, group = torch.distributed.get_rank(session.group), session.group.group_name
    shards = SequenceShards.zigzag(tokens, session.ranks)
    made = torch.Generator(session.device).manual_seed(rank)
    shape = 1, heads, shards.lengths[rank], dim
    q, k, v = (
        torch.randn(shape, generator=made, device=session.device, dtype=session.half)
        for _ in range(3)
    )
    for name in RING_CHOICES:
        yield name, [partial(_attend, q, k, v, group, shards, name)]


def _attend(q, k, v, group: str, shards: SequenceShards, strategy: str) -> Tensor:
    return ring_attention(q, k, v, group, shards=shards, causal=True, strategy=strategy)[0]
