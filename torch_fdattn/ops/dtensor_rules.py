"""DTensor sharding rules of the raw ops: batch and whole KV groups, never the sequence.

Registered when the first DTensor arrives, since importing `torch.distributed.tensor` costs 0.4 s.
Sequence-sharded keys need a merge of partial states: `torch_fdattn.dist`.
"""

from __future__ import annotations

from math import prod

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from torch_fdattn.ops.attention.op import GRADIENTS


def _heads_may_split(k, *by_batch) -> bool:
    """Whether every rank gets whole KV groups, however DTensor splits heads.

    It takes the cheapest combination of our choices over all mesh dimensions, and may thus come to split heads
    over those that do not now: to split what is replicated is free, and of partial sums (a gradient, say) a
    reduce-scatter costs less than an all-reduce. Only a dimension that splits the batch of all of
    `by_batch` stays as it is.
    """
    mesh = k.mesh.shape
    batch_dims = [i for i in range(len(mesh)) if all(x.placements[i] == Shard(0) for x in by_batch)]
    if by_batch[0].shape[0] < prod(mesh[i] for i in batch_dims):
        batch_dims = []  # DTensor splits no dimension into more shards than it has entries
    return k.shape[1] % prod(size for i, size in enumerate(mesh) if i not in batch_dims) == 0


def _choices(k, *by_batch) -> list[tuple]:
    """(placement of q, k, v, out, lse …; placement of per-sequence tensors) per acceptable sharding."""
    choices = [(Replicate(), Replicate()), (Shard(0), Shard(0))]
    if _heads_may_split(k, *by_batch):
        choices.append((Shard(1), Replicate()))
    return choices


def _packed_choices(k, plain: bool) -> list[tuple]:
    """(placement of q, k, v and out; placement of lse (H, T)): tokens of packed sequences are never split."""
    choices = [(Replicate(), Replicate())]
    if plain and k.shape[1] % prod(k.mesh.shape) == 0:
        choices.append((Shard(1), Shard(0)))
    return choices


def _options(options) -> tuple[list, bool]:
    """Placements of an op's further arguments, and whether no tensor (scales, slopes, sinks) is among them."""
    tensors = [hasattr(x, "placements") for x in options]
    return [Replicate() if tensor else None for tensor in tensors], not any(tensors)


def _given(tensor: object, placement: object) -> object:
    return None if tensor is None else placement


#: append_kv's arguments behind the caches, the page table and the new tokens.
_PER_SEQUENCE = ("kv_lens", "new_lens", "positions")


def _append_choices(batch_dim: bool, tensors: dict) -> list[tuple[list, list]]:
    """The acceptable shardings of an op that writes: those that its arguments have, and no others.

    To redistribute a cache would be to write into a copy of it. DTensor takes the first of the cheapest
    choices, and to keep everything as it is costs nothing; replicated comes first, because to split a
    replicated tensor costs nothing either.
    """
    cache = tensors["k_cache"]
    allowed = (Replicate(), *(Shard(dim) for dim in ((0, 1) if batch_dim else (1,))))
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        expected = tuple(_append_placement(name, tensor, x) for x in cache.placements)
        if tuple(tensor.placements) != expected or not set(cache.placements) <= set(allowed):
            raise ValueError(
                f"{name} must be placed {expected} where k_cache is placed {tuple(cache.placements)} "
                f"(replicated, or sharded by heads{' or batch' if batch_dim else ''}), "
                f"got {tuple(tensor.placements)}"
            )
    return [
        ([], [None if x is None else _append_placement(name, x, placement) for name, x in tensors.items()])
        for placement in allowed
        if placement in cache.placements
    ]  # fmt: skip


def _append_placement(name: str, tensor, cache) -> object:
    """How an argument of append_kv is placed along a mesh dimension, given the caches' placement there."""
    if cache == Replicate() or name in ("cos", "sin", "page_table"):
        return Replicate()
    if name in _PER_SEQUENCE:
        return cache if cache == Shard(0) else Replicate()
    if name in ("k_scale", "v_scale"):  # broadcastable to (B, H_kv, capacity)
        dim = cache.dim - (3 - tensor.ndim)
        return Shard(dim) if dim >= 0 and tensor.shape[dim] > 1 else Replicate()
    return cache


def register() -> None:
    """Registers the rules with DTensor; called once."""
    ops = torch.ops.fdattn

    @register_sharding([ops.attention_forward.default, ops.decode_forward.default])
    def forward_rule(q, k, v, kv_lens, q_start, kv_start, *options):
        rest, plain = _options(options)
        return [
            ([x, x], [x, x, x, *(_given(t, per_seq) for t in (kv_lens, q_start, kv_start)), *rest])
            for x, per_seq in (_choices(k, q, k, v) if plain else _choices(k, q, k, v)[:1])
        ]

    @register_sharding(ops.paged_decode_forward.default)
    def paged_rule(q, k, v, page_table, kv_lens, q_start, kv_start, *options):
        rest, plain = _options(options)
        tables = (page_table, kv_lens, q_start, kv_start)
        whole, by_sequence, by_head = Replicate(), Shard(0), Shard(1)
        # (q and results, pages, tables): pages belong to no sequence, so they are never split by batch.
        choices = [(whole, whole, whole)]
        if plain:
            choices.append((by_sequence, whole, by_sequence))
            if _heads_may_split(k, q):
                choices.append((by_head, by_head, whole))
        return [
            ([x, x], [x, pages, pages, *(_given(t, per_seq) for t in tables), *rest])
            for x, pages, per_seq in choices
        ]

    @register_sharding(ops.attention_backward.default)
    def backward_rule(dout, dlse, q, k, v, out, lse, kv_lens, q_start, kv_start, *options):
        rest, plain = _options(options)
        choices = _choices(k, q, k, v, out, lse)
        return [
            (
                [x, x, x],
                [x, _given(dlse, x), x, x, x, x, x]
                + [_given(t, per_seq) for t in (kv_lens, q_start, kv_start)]
                + rest,
            )
            for x, per_seq in (choices if plain else choices[:1])
        ]

    for backward_all in (ops.attention_backward_all, ops.varlen_attention_backward_all):

        @register_sharding(backward_all.default)
        def backward_all_rule(dout, dlse, *rest):
            whole = [Replicate() if hasattr(x, "placements") else None for x in (dout, dlse, *rest)]
            return [([Replicate()] * (3 + len(GRADIENTS)), whole)]

    @register_sharding(ops.varlen_attention_forward.default)
    def varlen_rule(
        q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, kv_lens, q_start, kv_start, *options
    ):
        rest, plain = _options(options)
        per_sequence = cu_seqlens_q, cu_seqlens_k, page_table, kv_lens, q_start, kv_start
        where = [_given(x, Replicate()) for x in per_sequence]
        return [([x, lse], [x, x, x, *where, *rest]) for x, lse in _packed_choices(k, plain)]

    @register_sharding(ops.varlen_attention_backward.default)
    def varlen_backward_rule(
        dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, kv_lens, q_start, kv_start, *options
    ):  # fmt: skip
        rest, plain = _options(options)
        per_sequence = cu_seqlens_q, cu_seqlens_k, kv_lens, q_start, kv_start
        where = [_given(x, Replicate()) for x in per_sequence]
        return [
            ([x] * 3, [x, _given(dlse, rows), x, x, x, x, rows, *where, *rest])
            for x, rows in _packed_choices(k, plain)
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

    def append_rule(op, batch_dim: bool) -> None:
        names = [x.name for x in op._schema.arguments]

        @register_sharding(op)
        def rule(*args):
            # Trailing arguments that are None do not come.
            return _append_choices(batch_dim, dict(zip(names, args, strict=False)))

    append_rule(ops.append_kv.default, batch_dim=True)
    append_rule(ops.paged_append_kv.default, batch_dim=False)
