"""DTensor sharding rules of the raw ops: batch and whole KV groups, never the sequence.

Registered when the first DTensor arrives, since importing `torch.distributed.tensor` costs 0.4 s.
Sequence-sharded keys need a merge of partial states: `torch_fdattn.dist`.
"""

from __future__ import annotations

from math import prod

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


def _group_shardable(q, k) -> bool:
    """Whether the mesh dimensions that now split heads split them into whole KV groups."""
    sizes = [
        size
        for size, q_placement, k_placement in zip(
            q.mesh.shape, q.placements, k.placements, strict=True
        )
        if q_placement.is_shard(1) or k_placement.is_shard(1)
    ]
    return k.shape[1] % prod(sizes) == 0


def _choices(q, k) -> list[tuple]:
    """(placement of q, k, v, out, lse …; placement of per-sequence tensors) per acceptable sharding."""
    choices = [(Replicate(), Replicate()), (Shard(0), Shard(0))]
    if _group_shardable(q, k):
        choices.append((Shard(1), Replicate()))
    return choices


def _given(tensor: object, placement: object) -> object:
    return None if tensor is None else placement


def register() -> None:
    """Registers the rules with DTensor; called once."""
    ops = torch.ops.fdattn

    @register_sharding([ops.attention_forward.default, ops.decode_forward.default])
    def forward_rule(q, k, v, kv_lens, q_start, kv_start, *options):
        rest = [None] * len(options)
        return [
            ([x, x], [x, x, x, *(_given(t, per_seq) for t in (kv_lens, q_start, kv_start)), *rest])
            for x, per_seq in _choices(q, k)
        ]

    @register_sharding(ops.attention_backward.default)
    def backward_rule(dout, dlse, q, k, v, out, lse, kv_lens, q_start, kv_start, *options):
        rest = [None] * len(options)
        return [
            (
                [x, x, x],
                [x, _given(dlse, x), x, x, x, x, x]
                + [_given(t, per_seq) for t in (kv_lens, q_start, kv_start)]
                + rest,
            )
            for x, per_seq in _choices(q, k)
        ]

    # Stacks (N, B, H, S, …) shard as the states (B, H, S, …) that they merge into.
    @register_sharding(ops.merge_states_forward.default)
    def merge_rule(outs, lses, dtype=None):
        return [([Replicate()] * 2, [Replicate(), Replicate(), None])] + [
            ([Shard(dim)] * 2, [Shard(dim + 1), Shard(dim + 1), None]) for dim in range(3)
        ]

    @register_sharding(ops.merge_states_backward.default)
    def merge_backward_rule(dout, dlse, outs, lses, out, lse):
        def choice(stack, state):
            return [stack, stack], [state, _given(dlse, state), stack, stack, state, state]

        return [choice(Replicate(), Replicate())] + [
            choice(Shard(dim + 1), Shard(dim)) for dim in range(3)
        ]
