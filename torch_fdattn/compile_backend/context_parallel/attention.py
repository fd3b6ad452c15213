"""`options={"context_parallel": …}`: a graph over one rank's tokens, whose attention is of all ranks' tokens.

The meaning is that of `dist.context_parallel`: SDPA and `torch_fdattn.attention` over q, k and v of this rank's
tokens become ring attention. What it cannot answer has the reason "context-parallel", and no attention at all
may stay as it was, since that would attend to this rank's tokens alone. With "cache", few queries over more keys
are a step over a cache that ranks share: `sharded_cache.py`.

A mask that the graph makes is refused even where it is causal: it is made for local positions, where a window or
a chunk that is longer than the shard hides nothing, and so cannot be told from a mask that has none.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.choose import Attention, OpCall
from torch_fdattn.compile_backend.context_parallel import sharded_cache
from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.nodes import (
    arguments,
    described,
    statically_true,
    tensor,
    value,
)
from torch_fdattn.compile_backend.masks.structure import Structure
from torch_fdattn.compile_backend.match.operands import D, S
from torch_fdattn.compile_backend.report import Unsupported, stack_trace

if TYPE_CHECKING:
    from torch_fdattn.dist import SequenceShards

OPTION = 'options["context_parallel"]'
_KEYS = ("group", "shards", "strategy", "cache")


class ContextParallel(NamedTuple):
    """The group and how a sequence is split over it; plain values, for they are part of the caches' keys."""

    group_name: str
    rank: int
    world_size: int
    shards: SequenceShards | str
    strategy: str
    cache: int | str | None = (
        None  #: "contiguous" shards of a KV cache, or round-robin in blocks of as many
    )

    def operands(self, length: object) -> tuple[str, list[int]]:
        """What `ring_attention` takes behind q, k and v, of `length` local tokens.

        A symbolic length becomes a number, which adds a guard: which kernels run follows from it.
        """
        from torch_fdattn.dist.sequence_shards import SequenceShards, named_shards

        length, shards = int(length), self.shards
        if not isinstance(shards, SequenceShards):
            try:
                shards = named_shards(shards, length, self.world_size)
            except ValueError as error:
                raise Unsupported("context-parallel", str(error)) from error
        own = shards.lengths[self.rank]
        if length != own:
            raise Unsupported(
                "context-parallel",
                f"{length} tokens where the shards of rank {self.rank} have {own}",
            )
        return self.group_name, shards.flat()

    @property
    def options(self) -> dict[str, Any]:
        return dict(rank=self.rank, world_size=self.world_size, strategy=self.strategy)


def parse(option: object) -> ContextParallel | None:
    """What a user gave.

    Raises:
        TypeError, ValueError: naming the option, what was expected and what came.
        RuntimeError: torch.distributed is not initialised.
    """
    if option is None:
        return None
    from torch_fdattn.dist.context_parallel import check_strategy
    from torch_fdattn.dist.group_names import name_of
    from torch_fdattn.dist.groups import rank_and_size
    from torch_fdattn.dist.sequence_shards import SequenceShards

    given = option if isinstance(option, dict) else {"group": option}
    if "group" not in given or not set(given) <= set(_KEYS):
        raise ValueError(
            f'{OPTION} must have "group" and may have "shards", "strategy" and "cache", got '
            f"{sorted(map(str, given))}"
        )
    name = name_of(given["group"], OPTION)
    rank, world_size = rank_and_size(name, OPTION)
    shards, strategy = given.get("shards", "contiguous"), given.get("strategy", "ring")
    if isinstance(shards, SequenceShards):
        if shards.world_size != world_size:
            raise ValueError(
                f"{OPTION}'s shards must be for the group's {world_size} ranks, got {shards.world_size}"
            )
    elif shards not in ("contiguous", "zigzag"):
        raise ValueError(
            f"{OPTION}'s shards must be 'contiguous', 'zigzag' or a SequenceShards, got {shards!r}"
        )
    check_strategy(strategy, OPTION)
    cache = given.get("cache")
    if cache is not None and cache != "contiguous" and (type(cache) is not int or cache < 1):
        raise ValueError(
            f"{OPTION}'s cache must be 'contiguous' or the block of a round-robin map (an int of at least 1), "
            f"got {cache!r}"
        )
    return ContextParallel(name, rank, world_size, shards, strategy, cache)


def over_ranks(found: Attention, plan: OpCall, context: ContextParallel) -> OpCall:
    """Ring attention or, over a cache, `dist_decode` in place of a plan over local tokens; raises `Unsupported`."""
    if context.cache is not None and sharded_cache.is_step(found.q.size(S), found.k.size(S)):
        return sharded_cache.over_shards(found, plan, context)
    _refuse(
        mask=found.masked, softcap=found.softcap, sinks=found.sinks is not None,
        **{"queries and keys of other tokens, or a cache": not statically_true(found.q.size(S) == found.k.size(S))},
        **{"values of another head dim": not statically_true(found.v.size(D) == found.k.size(D))},
    )  # fmt: skip
    # Without a start: that of SDPA's is_causal is 0, for tokens that a shard may hold in any order.
    structure = Structure(right=plan.structure.right)
    operands = context.operands(found.q.size(S))
    return replace(
        plan, op="ring_attention", structure=structure, operands=operands, options=context.options
    )


def _refuse(**given: object) -> None:
    named = [name for name, there in given.items() if there]
    if named:
        raise Unsupported(
            "context-parallel",
            f"only causal, windows and scale go over ranks, got {', '.join(named)}",
        )


_PACKAGE = str(Path(__file__).parents[2]) + os.sep
#: Our own ops over a sequence or a cache that they take to be whole.
_OWN = {
    overload: name
    for name in (
        "attention", "varlen_attention", "decode", "paged_decode", "decode_out", "paged_decode_out"
    )
    for op in [getattr(torch.ops.fdattn, name)]
    for overload in (op, op.default)
}  # fmt: skip
_SUPPORTED = ("q", "k", "v", "causal", "window_left", "window_right", "scale")


class FdattnCall:
    """A form: calls of our ops, which the user wrote, and which are rewritten under context parallelism alone."""

    FORM = "torch_fdattn"

    @staticmethod
    def matches(node: Node) -> bool:
        return node.op == "call_function" and node.target in _OWN

    @staticmethod
    def stack_trace(node: Node) -> str:
        """Down to the user's call: where in our functions the op is called tells nobody anything."""
        return re.split(rf'^  File "{re.escape(_PACKAGE)}', stack_trace(node), flags=re.MULTILINE)[
            0
        ]


def replace_fdattn_call(node: Node, context: ContextParallel, *, dryrun: bool) -> str:
    """A call of ours by one over the ranks, (out, lse) by (out, lse); its name, or raises `Unsupported` where there is none."""
    name = _OWN[node.target]
    schema = getattr(torch.ops.fdattn, name).default._schema.arguments
    defaults = {x.name: x.default_value if x.has_default_value() else None for x in schema}
    given = dict(zip(defaults, arguments(node, **defaults), strict=True))
    if name == "attention":
        new, args, options = _ring(given, defaults, context)
    elif name in ("decode", "paged_decode") and context.cache is not None:
        new, args, options = sharded_cache.own_call(given, defaults, context)
    else:
        raise Unsupported(
            "context-parallel", f"{described(node)} would see this rank's tokens alone"
        )
    if not dryrun:
        op = getattr(torch.ops.fdattn, new).default
        added = Adder(node, like=args[0]).new(op, args, yields=value(node), **options)
        added.meta = dict(node.meta)
        node.replace_all_uses_with(added)
        node.graph.erase_node(node)
    return new


def _ring(given: dict, defaults: dict, context: ContextParallel) -> tuple[str, tuple, dict]:
    _refuse(**{x: given[x] != default for x, default in defaults.items() if x not in _SUPPORTED})
    q, k, v = (given[name] for name in "qkv")
    sizes = [tensor(x).shape for x in (q, k, v)]
    _refuse(
        **{
            "queries and keys of other tokens, or a cache": not statically_true(
                sizes[0][2] == sizes[1][2]
            )
        },
        **{"values of another head dim": not statically_true(sizes[1][3] == sizes[2][3])},
    )
    operands = context.operands(sizes[0][2])
    options = {name: given[name] for name in _SUPPORTED[3:]} | context.options
    return "ring_attention", (q, k, v, *operands), options
