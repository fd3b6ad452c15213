"""The variants of decode over a sharded cache that are compared."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

import torch_fdattn

from ..peers import stock_decode as stock
from ..ranks import Ranks
from ..shapes import LOCAL
from .mpi import NOT_STARTED, under_mpirun
from .shards import Shard

Call = Callable[[], tuple[Tensor, Tensor]]
HIERARCHICAL = "hierarchical"
NCCL, NCCL_SYMMETRIC, GLOO, MPI = "nccl", "nccl_symm", "gloo", "mpi"
PEERS = (NCCL, NCCL_SYMMETRIC, MPI)


@dataclass(frozen=True)
class Variant:
    """`calls` of (shards, ranks, stack), one call for each shard; `stack` undoes what they connected.

    all_keys: whether the result is that of all ranks' keys; ours: then all ranks must hold the same bits.
    graph: whether a CUDA graph can hold its calls.
    """

    name: str
    calls: Callable[[Sequence[Shard], Ranks, contextlib.ExitStack], list[Call]]
    ours: bool = False
    all_keys: bool = True
    graph: bool = True


def strategies() -> tuple[str, ...]:
    """All that the op has; `auto`, which picks one of them, last."""
    from torch_fdattn.dist.decode.op import STRATEGIES

    return tuple(sorted(STRATEGIES, key=lambda name: name == "auto"))


def ours(strategy: str, ranks: Ranks) -> Variant:
    options: dict = {}
    if strategy == HIERARCHICAL:
        options["hierarchy"] = _hierarchy(ranks)

    def calls(shards: Sequence[Shard], ranks: Ranks, _: contextlib.ExitStack) -> list[Call]:
        decode = functools.partial(
            torch_fdattn.dist.decode, group=ranks.group_name, strategy=strategy, **options
        )
        return [functools.partial(decode, x.q, x.k, x.v, x.kv_lens) for x in shards]

    return Variant(f"fdattn/{strategy}", calls, ours=True)


def _local(shards: Sequence[Shard], _: Ranks, __: contextlib.ExitStack) -> list[Call]:
    return [functools.partial(torch_fdattn.decode, x.q, x.k, x.v, x.local_lens) for x in shards]


#: Our own decode of the shard alone: what the exchange and the merge are added to.
LOCAL_VARIANT = Variant(LOCAL, _local, all_keys=False)


def peer(name: str, ranks: Ranks) -> Variant:
    if name == NCCL and ranks.device.type == "cpu":
        name = GLOO
    by = {NCCL_SYMMETRIC: "symmetric", MPI: "host"}.get(name, "collective")

    def calls(shards: Sequence[Shard], ranks: Ranks, stack: contextlib.ExitStack) -> list[Call]:
        return stock.calls(shards, ranks, by, stack)

    return Variant(name, calls, graph=name != MPI)


def missing(variant: Variant) -> str | None:
    """Why this run cannot measure it, or None."""
    return NOT_STARTED if variant.name == MPI and not under_mpirun() else None


@functools.cache
def _hierarchy(ranks: Ranks) -> tuple[str, str]:
    """(inner, outer) group names of this rank: as many ranks inside as divide them, the most but all."""
    size = ranks.size
    inner = next((n for n in range(size // 2, 1, -1) if size % n == 0), size)
    found = {}
    for kind, groups in (
        ("inner", [list(range(first, first + inner)) for first in range(0, size, inner)]),
        ("outer", [list(range(first, size, inner)) for first in range(inner)]),
    ):
        for members in groups:  # every rank takes part in making every group
            group = dist.new_group(members)
            if ranks.rank in members:
                found[kind] = group.group_name
    return found["inner"], found["outer"]


_reported: set[str] = set()


def check() -> None:
    """Raises where a peer's data did not come, which no call has raised yet; each fault once.

    The op raises it again ever after, and would charge it to strategies that have nothing to do with it.
    """
    try:
        torch_fdattn.dist.check()
    except torch_fdattn.dist.PeerTimeout as fault:
        if str(fault) not in _reported:
            _reported.add(str(fault))
            raise
