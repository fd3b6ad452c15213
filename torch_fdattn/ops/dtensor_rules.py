"""DTensor sharding rules of the raw ops: batch and whole KV groups, never the sequence.

Slopes, sinks, explicit masks and scales are split with the sequences and heads that they are of, and stay whole
along dims that they are broadcast over; their gradients there are sums over the ranks. With dropout nothing is split.

Registered when the first DTensor arrives, since importing `torch.distributed.tensor` costs 0.4 s.
Sequence-sharded keys need a merge of partial states: `torch_fdattn.dist`.
"""

from __future__ import annotations

from math import prod

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, experimental

from torch_fdattn.ops.scores import Scores


def _register_sharding(op):
    """register_sharding, for ops with optional tensors."""

    def register_rule(rule):
        experimental.register_sharding(op)(rule)
        # What a rule says is kept by the arguments from this one on and all tensors, of which which ones are missing
        # would not count: a call with q_start alone is not one with kv_lens alone.
        DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op].static_argnum = 0
        return rule

    return register_rule


#: Of the arguments by name, the dims that sequences and heads are split along.
_Dims = dict[str, tuple[int | None, int | None]]
_BY_SEQUENCE = 0, None
_STATE: _Dims = dict.fromkeys(("q", "k", "v", "out", "lse", "dout", "dlse"), (0, 1))
_STATE |= {f"{x}_tangent": (0, 1) for x in "qkv"}
_STATE |= dict.fromkeys(("kv_lens", "q_start", "kv_start", "page_table"), _BY_SEQUENCE)
_CACHES: _Dims = _STATE | dict.fromkeys(("k_cache", "v_cache"), (0, 1))
#: Pages belong to no sequence, and tokens of packed sequences stay together.
_PAGES: _Dims = _STATE | dict.fromkeys(("k_cache", "v_cache"), (None, 1))
_PACKED: _Dims = dict.fromkeys(
    ("q", "k", "v", "out", "dout", *(f"{x}_tangent" for x in "qkv")), (None, 1)
)
_PACKED |= dict.fromkeys(("lse", "dlse"), (None, 0))
#: What a forward has read and written; gradients and tangents come as they come.
_FORWARD = "q", "k", "v", "k_cache", "v_cache", "out", "lse"
#: Options that are broadcast to a number of dims that begin with batch and heads.
_BROADCAST = {"attn_mask": 4, "k_scale": 3, "v_scale": 3}


def _dims(name: str, tensor, of: _Dims) -> tuple[int | None, int | None]:
    """The dims of an argument that hold sequences and heads; None for those it has not, or is broadcast over."""
    name = name.removesuffix("_tangent") if name not in of else name
    by_sequence = of["q"][0] is not None
    if name == "sinks" or (name == "alibi_slopes" and tensor.ndim == 1):
        return None, 0
    if name == "alibi_slopes":
        return (0 if by_sequence else None), 1
    if name in _BROADCAST:
        first = tensor.ndim - _BROADCAST[name]
        by_sequence = by_sequence and (name == "attn_mask" or of["k_cache"][0] is not None)
        has = (x >= 0 and tensor.shape[x] > 1 for x in (first, first + 1))
        there = zip((first, first + 1), has, (by_sequence, True), strict=True)
        return tuple(x if held and split else None for x, held, split in there)
    return of.get(name, (None, None))


def _placed(dims: tuple[int | None, int | None], sharding: str) -> Replicate | Shard:
    """Where a tensor with such dims is, where a mesh dimension splits nothing, sequences or heads."""
    dim = {"whole": None, "sequences": dims[0], "heads": dims[1]}[sharding]
    return Replicate() if dim is None else Shard(dim)


def _shardings(k, tensors: dict[str, object], of: _Dims) -> list[str]:
    """The acceptable shardings of a call.

    Dropout counts the sequences and heads of its call, so that a part of them would drop other weights.
    """
    if "dropout_seed" in tensors:
        return ["whole"]
    found = ["whole"] if of["q"][0] is None else ["whole", "sequences"]
    return [*found, "heads"] if _heads_may_split(k, tensors, of) else found


def _heads_may_split(k, tensors: dict[str, object], of: _Dims) -> bool:
    """Whether every rank gets whole KV groups, however DTensor splits heads.

    It takes the cheapest combination of our choices over all mesh dimensions, and may thus come to split heads
    over those that do not now: to split what is replicated is free, and of partial sums (a gradient, say) a
    reduce-scatter costs less than an all-reduce. Only a dimension that splits the batch of all that has one
    stays as it is (of options: of all that is split there at all).
    """
    mesh = k.mesh.shape
    dims = {name: _dims(name, x, of)[0] for name, x in tensors.items()}
    state = [name for name in _FORWARD if dims.get(name) is not None]
    others = [name for name in tensors if name not in of or of[name][1] is None]

    def splits_batch(i: int) -> bool:
        return all(tensors[x].placements[i] == Shard(dims[x]) for x in state) and all(
            tensors[x].placements[i]
            in (Replicate(), Shard(dims[x]) if dims[x] is not None else Replicate())
            for x in others
        )

    batch_dims = [i for i in range(len(mesh)) if state and splits_batch(i)]
    if state and tensors[state[0]].shape[0] < prod(mesh[i] for i in batch_dims):
        batch_dims = []  # DTensor splits no dimension into more shards than it has entries
    return k.shape[1] % prod(size for i, size in enumerate(mesh) if i not in batch_dims) == 0


def _split_rule(op, of: _Dims, results: tuple[str, ...], gradients: tuple[str, ...] = ()) -> None:
    """The rule of an op over attention's arguments; results by the names of what they are placed as.

    gradients: further results, of options; where an option is the same on all ranks, its gradient is a sum.
    """
    names = [x.name for x in op._schema.arguments]

    @_register_sharding(op)
    def rule(*args):
        # Trailing arguments that are defaults do not come.
        given = dict(zip(names, args, strict=False))
        tensors = {name: x for name, x in given.items() if hasattr(x, "placements")}
        dims = {name: _dims(name, x, of) for name, x in tensors.items()}

        def of_gradient(name: str, sharding: str) -> object:
            placed = _placed(dims.get(name, (None, None)), sharding)
            return Partial() if sharding != "whole" and placed == Replicate() else placed

        k = given["k_cache" if "k_cache" in given else "k"]
        return [
            (
                [
                    *(_placed(of[x], sharding) for x in results),
                    *(of_gradient(x, sharding) for x in gradients),
                ],
                [_placed(dims[x], sharding) if x in dims else None for x in given],
            )
            for sharding in _shardings(k, tensors, of)
        ]


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

    state, inputs = ("out", "lse"), ("q", "k", "v")
    _split_rule(ops.attention_forward.default, _STATE, state)
    _split_rule(ops.attention_tangent.default, _STATE, state)
    _split_rule(ops.decode_forward.default, _CACHES, state)
    _split_rule(ops.paged_decode_forward.default, _PAGES, state)
    _split_rule(ops.varlen_attention_forward.default, _PACKED, state)
    _split_rule(ops.varlen_attention_tangent.default, _PACKED, state)
    for name, of in (("attention", _STATE), ("varlen_attention", _PACKED)):
        _split_rule(getattr(ops, f"{name}_backward").default, of, inputs)
        _split_rule(getattr(ops, f"{name}_backward_all").default, of, inputs, Scores._fields[1:])

    # Stacks (N, B, H, S, …) shard as the states (B, H, S, …) that they merge into.
    @_register_sharding(ops.merge_states_forward.default)
    def merge_rule(outs, lses, dtype=None):
        return [([Replicate()] * 2, [Replicate(), Replicate(), None])] + [
            ([Shard(dim)] * 2, [Shard(dim + 1), Shard(dim + 1), None]) for dim in range(3)
        ]

    @_register_sharding(ops.merge_states_backward.default)
    def merge_backward_rule(dout, dlse, outs, lses, out, lse):
        def choice(stack, state):
            return [stack, stack], [state, _given(dlse, state), stack, stack, state, state]

        return [choice(Replicate(), Replicate())] + [
            choice(Shard(dim + 1), Shard(dim)) for dim in range(3)
        ]

    @_register_sharding(ops.merge_states_tangent.default)
    def merge_tangent_rule(outs, lses, lse, outs_tangent, lses_tangent, dtype=None):
        def choice(stack, state):
            tangents = [_given(x, stack) for x in (outs_tangent, lses_tangent)]
            return [state, state], [stack, stack, state, *tangents, None]

        return [choice(Replicate(), Replicate())] + [
            choice(Shard(dim + 1), Shard(dim)) for dim in range(3)
        ]

    def append_rule(op, batch_dim: bool) -> None:
        names = [x.name for x in op._schema.arguments]

        @_register_sharding(op)
        def rule(*args):
            # Trailing arguments that are None do not come.
            return _append_choices(batch_dim, dict(zip(names, args, strict=False)))

    append_rule(ops.append_kv.default, batch_dim=True)
    append_rule(ops.paged_append_kv.default, batch_dim=False)
