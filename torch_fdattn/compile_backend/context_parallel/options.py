"""`options={"context_parallel": …}`: what it may hold."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from torch_fdattn.compile_backend.report import Unsupported

if TYPE_CHECKING:
    from torch_fdattn.dist import SequenceShards

OPTION = 'options["context_parallel"]'
_KEYS = ("group", "shards", "strategy", "cache", "hierarchy", "cu_seqlens")


class ContextParallel(NamedTuple):
    """The group and how a sequence is split over it; plain values, for they are part of the caches' keys."""

    group_name: str
    rank: int
    world_size: int
    shards: SequenceShards | str
    strategy: str
    #: "contiguous" shards of a KV cache, or round-robin in blocks of as many
    cache: int | str | None = None
    #: names of this rank's (inner, outer) groups, for "ulysses_ring"
    hierarchy: tuple[str, str] | None = None
    #: where packed documents begin, and where the last one ends; () of none
    documents: tuple[int, ...] = ()

    def operands(self, length: object) -> tuple[str, list[int]]:
        """What `ring_attention` takes behind q, k and v, of `length` local tokens.

        A symbolic length becomes a number, which adds a guard: which kernels run follows from it.
        """
        from torch_fdattn.dist.ring_attention.sequence_shards import (
            SequenceShards,
            check_documents,
            named_shards,
        )

        length, shards = int(length), self.shards
        try:
            if not isinstance(shards, SequenceShards):
                shards = named_shards(shards, length, self.world_size)
            check_documents(self.documents, shards.total)
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
        given = dict(rank=self.rank, world_size=self.world_size, strategy=self.strategy)
        if self.hierarchy is not None:
            given["inner_group"], given["outer_group"] = self.hierarchy
        if self.documents:
            given["documents"] = list(self.documents)
        return given


def parse(option: object, inputs: Sequence[Any] | None = None) -> ContextParallel | None:
    """What a user gave.

    inputs: of the graph that is compiled; what is refused the other ranks raise where they run theirs. None: they are not told.

    Raises:
        TypeError, ValueError: naming the option, what was expected and what came.
        RuntimeError: torch.distributed is not initialised.
    """
    if option is None:
        return None
    from torch_fdattn.compile_backend.context_parallel.agreement import refusing_on_all_ranks
    from torch_fdattn.dist.groups import name_of, rank_and_size

    given = option if isinstance(option, dict) else {"group": option}
    if "group" not in given or not set(given) <= set(_KEYS):
        raise ValueError(
            f'{OPTION} must have "group" and may have "shards", "strategy", "hierarchy", "cu_seqlens" and "cache", got '
            f"{sorted(map(str, given))}"
        )
    of_group = f'{OPTION}["group"]' if isinstance(option, dict) else OPTION
    name = name_of(given["group"], of_group)
    rank, world_size = rank_and_size(name, of_group)
    with refusing_on_all_ranks(name, inputs) if inputs is not None else contextlib.nullcontext():
        return _checked(given, name, rank, world_size)


def _checked(given: dict, name: str, rank: int, world_size: int) -> ContextParallel:
    from torch_fdattn.dist.decode.hierarchical import check_hierarchy
    from torch_fdattn.dist.decode.partial_states import MergeGroup
    from torch_fdattn.dist.groups import pair_of_names
    from torch_fdattn.dist.ring_attention.context_parallel import check_strategy
    from torch_fdattn.dist.ring_attention.op import expect_hierarchy
    from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards

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
    if strategy == "one_sided":
        raise NotImplementedError(
            f"{OPTION}'s strategy must not be 'one_sided', whose copies no graph has: use 'ring' or 'all_gather'"
        )
    try:
        hierarchy = pair_of_names(given.get("hierarchy"))
        expect_hierarchy(strategy, hierarchy)
        if hierarchy is not None:
            check_hierarchy(MergeGroup(name, rank, world_size, False, *hierarchy))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{OPTION}'s {error}") from error
    cache = given.get("cache")
    if cache is not None and cache != "contiguous" and (type(cache) is not int or cache < 1):
        raise ValueError(
            f"{OPTION}'s cache must be 'contiguous' or the block of a round-robin map (an int of at least 1), "
            f"got {cache!r}"
        )
    documents = _documents(given.get("cu_seqlens"), cache)
    return ContextParallel(name, rank, world_size, shards, strategy, cache, hierarchy, documents)


def _documents(cu_seqlens: object, cache: object) -> tuple[int, ...]:
    from torch_fdattn.dist.ring_attention.sequence_shards import documents_of

    if isinstance(
        cu_seqlens, Tensor
    ):  # torch keeps the options, and compares them with those of other compilations
        raise TypeError(
            f"{OPTION}'s cu_seqlens must be a list of ints, got a tensor: give cu_seqlens.tolist()"
        )
    if cu_seqlens is not None and cache is not None:
        raise ValueError(
            f"{OPTION} must not have both cu_seqlens and cache: steps over a cache know of no packed documents"
        )
    try:
        return tuple(documents_of(cu_seqlens))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{OPTION}'s {error}") from error
