"""Which strategy of `dist.ring_attention` is the fastest, by tokens of the whole sequence: causal, zigzag shards, forward."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torch_fdattn.dist import SequenceShards, ring_attention
from torch_fdattn.dist.ring_attention.auto import nearest
from torch_fdattn.ops.attention import trials
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
        times = session.clock.compare(_calls(session, tokens, case))
        if times:
            chosen = session.choose(SECTION, case, _shipped(session, tokens), times)
            if chosen in times:
                choices.append([tokens, chosen])
    return [dict(ranks=session.ranks, choices=choices)] if choices else []


def _calls(session: Session, tokens: int, case: str) -> dict[str, list[partial[Tensor]]]:
    """Of each strategy that runs here, and whose result is the first one's."""
    heads, dim = (QUICK_HEADS, QUICK_HEAD_DIM) if session.quick else (HEADS, HEAD_DIM)
    rank, group = torch.distributed.get_rank(session.group), session.group.group_name
    shards = SequenceShards.zigzag(tokens, session.ranks)
    made = torch.Generator(session.device).manual_seed(rank)
    shape = 1, heads, shards.lengths[rank], dim
    q, k, v = (
        torch.randn(shape, generator=made, device=session.device, dtype=session.half)
        for _ in range(3)
    )
    right, calls = None, {}
    for name in RING_CHOICES:
        call = partial(_attend, q, k, v, group, shards, name)
        result = session.clock.together(call)
        if result is None:
            session.note(f"{SECTION}: {case}: {name} is left out: it raised")
            continue
        right = result.clone() if right is None else right
        if session.clock.any_rank(trials.difference([result], [right]) is not None):
            session.note(f"{SECTION}: {case}: {name} is left out: its result differs")
            continue
        calls[name] = [call]
    return calls


def _attend(q, k, v, group: str, shards: SequenceShards, strategy: str) -> Tensor:
    return ring_attention(q, k, v, group, shards=shards, causal=True, strategy=strategy)[0]


def _shipped(session: Session, tokens: int) -> str:
    """What is chosen without the file that this writes."""
    shipped = entries(SECTION, Device.of(session.device))
    pairs = [pair for x in shipped if x["ranks"] == session.ranks for pair in x["choices"]]
    return nearest(pairs, tokens)
