"""Process groups by name: size and rank, one clear error for a wrong name, and what ranks must agree on."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed import distributed_c10d

from torch_fdattn import checks
from torch_fdattn.dist.group_names import NOT_INITIALISED
from torch_fdattn.dist.symm.faults import raise_faults

# Weak: a name may come again after destroy_process_group, and its group must be able to go.
_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, int]] = weakref.WeakKeyDictionary()


def rank_and_size(group_name: str, argument: str = "group_name") -> tuple[int, int]:
    """(rank, world size) of this process in the group; `argument` is what errors call the name.

    Raises:
        TypeError: group_name is no string.
        RuntimeError: torch.distributed is not initialised.
        ValueError: no group of that name, or this process is not in it.
    """
    if not isinstance(group_name, str):
        raise TypeError(
            f"{argument} must be a process group's name (group.group_name), "
            f"got {type(group_name).__name__}"
        )
    try:
        group = distributed_c10d._resolve_process_group(group_name)
        found = _ranks.get(group)
        if found is None:
            found = _ranks[group] = dist.get_rank(group), dist.get_world_size(group)
        return found
    except (AttributeError, RuntimeError, ValueError) as error:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(NOT_INITIALISED.format(f"{argument} {group_name!r}")) from None
        known = sorted(str(name) for name in distributed_c10d._world.pg_names.values())
        raise ValueError(
            f"{argument} must name a process group of this process, got {group_name!r} (known: {known})"
        ) from error


# What torch.compiler.assume_constant_result would set, without its import of torch._dynamo: Dynamo calls
# the function while tracing and writes the numbers into the graph, and so into its compile caches' keys.
rank_and_size._dynamo_marked_constant = True  # type: ignore[attr-defined]


def given_rank_and_size(
    group_name: str, rank: int | None, world_size: int | None
) -> tuple[int, int]:
    """A composite op's rank and world size: as given, or, in eager mode, the group's.

    Raises:
        ValueError: not given while the op is traced, where a rank read inside it would go into a graph
            that compile caches share between ranks.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    if TracingContext.try_get() is not None:
        raise ValueError(
            "rank and world_size must be given where the op is compiled (its Python entry in "
            f"torch_fdattn.dist gives them), got rank={rank}, world_size={world_size}"
        )
    return rank_and_size(group_name)


def is_traced(tensor: Tensor) -> bool:
    """Whether an op on this tensor is being traced rather than run: only functional collectives then."""
    return TracingContext.try_get() is not None or isinstance(tensor, torch._subclasses.FakeTensor)


def wants_gradients(*tensors: Tensor) -> dict[str, object]:
    """For `agree`: a backward that is a collective must run on all ranks or on none."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return {"whether gradients are wanted": wanted}


_MOST_AGREED = 4096  # kinds of call that a group remembers
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Tensor]] = (
    weakref.WeakKeyDictionary()
)


_trust = threading.local()


@contextlib.contextmanager
def same_everywhere() -> Iterator[None]:
    """Inside it what a rank has seen before is not compared on CPUs either: for steps that follow from what all
    ranks have already compared, as a model's next token does.
    """
    before = getattr(_trust, "given", False)
    _trust.given = True
    try:
        yield
    finally:
        _trust.given = before


def trusted() -> bool:
    """Whether this is inside `same_everywhere`."""
    return getattr(_trust, "given", False)


def agree(group_name: str, like: Tensor, values: Mapping[str, object], once: bool = False) -> None:
    """Compares what must be the same on all ranks, before any data moves.

    CPU tensors: 8 bytes a rank in every call (but see `same_everywhere`), unless `once` is set: for exchanges
    that are not the group's, where a dead rank is to be found by them. On other devices a small collective,
    and a wait for the device, the first time that this rank sees these values, and nothing later (with
    TORCH_FDATTN_CHECK=1 every time): what happens where ranks differ while one of them has seen its values
    before is undefined (a time-out, an error of the backend, or wrong numbers). Nothing is compared in traces
    and CUDA graphs.

    Raises:
        ValueError: on every rank, naming the value and what each rank has.
    """
    if is_traced(like) or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    group = distributed_c10d._resolve_process_group(group_name)
    agreed = _agreed.setdefault(group, {})
    key = tuple(values.items())
    digest = agreed.get(key)
    on_cpu = like.device.type == "cpu"
    compares = checks.CHECK_VALUES or (on_cpu and not (once or trusted()))
    if digest is not None and not compares:
        return
    raise_faults(group_name)  # a dead rank would not come to the comparison
    if digest is None:
        digest = _digest(key)
    if not (on_cpu and _same_digests(group, digest)):
        _compare(group, values)
    if len(agreed) >= _MOST_AGREED:  # the same on all ranks, which agreed on all of them
        agreed.clear()
    agreed[key] = digest


_REFUSED = "what a rank refuses"


def refuse(group_name: str, like: Tensor, message: str) -> NoReturn:
    """Raises NotImplementedError where other ranks may be on their way to an `agree` of the call: there, they raise too."""
    agree(group_name, like, {_REFUSED: message})
    raise NotImplementedError(message)


def raise_together(
    group_name: str, device: torch.device, kind: type[Exception], said: str | None, remedy: str
) -> None:
    """Raises `kind` on every rank where one of them has something to say (None: nothing), with what each one says.

    A collective of one number on this device, and a wait for it.
    """
    group = distributed_c10d._resolve_process_group(group_name)
    raise_faults(group_name)
    says = torch.tensor([said is not None], dtype=torch.int32, device=device)
    dist.all_reduce(says, dist.ReduceOp.MAX, group=group)
    if not says.item():
        return
    everywhere: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, said, group=group)
    ranks = "; ".join(f"on rank {r} {text}" for r, text in enumerate(everywhere) if text)
    raise kind(f"{remedy} ({ranks})")


def _compare(group: dist.ProcessGroup, values: Mapping[str, object]) -> None:
    """Raises on every rank, naming what differs."""
    everywhere: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        everywhere, {name: str(value) for name, value in values.items()}, group=group
    )
    for rank, theirs in enumerate(everywhere):
        if _REFUSED in theirs:
            raise NotImplementedError(f"{theirs[_REFUSED]} (on rank {rank})")
    for name in values:
        found = [theirs.get(name) for theirs in everywhere]
        if len(set(found)) > 1:
            ranks = ", ".join(f"{value} on rank {r}" for r, value in enumerate(found))
            raise ValueError(f"{name} must be the same on all ranks, got {ranks}")


def _digest(key: tuple) -> Tensor:
    """64 bits of the values, the same in every process."""
    text = str([(name, str(value)) for name, value in key]).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    return torch.tensor([number])


def _same_digests(group: dist.ProcessGroup, mine: Tensor) -> bool:
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return all(torch.equal(x, mine) for x in found)


_unanimous: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, str | None]] = (
    weakref.WeakKeyDictionary()
)


def unanimous(
    group_name: str, like: Tensor, about: object, own: object, mine: str | None
) -> str | None:
    """What all ranks have found, `mine` on this one, for what they have in common; None where they differ.

    A small collective the first time that this rank sees `about`, which they have in common, with what is its `own`;
    as of `agree`, it is undefined what happens where another rank has seen its values before. Later, and in a CUDA
    graph's capture, what is known. None, too, where `about` differs: `agree` says so.
    """
    group = distributed_c10d._resolve_process_group(group_name)
    known, key = _unanimous.setdefault(group, {}), (about, own)
    if key not in known and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise_faults(group_name)
        everywhere: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, (about, mine), group=group)
        if any(theirs[0] != about for theirs in everywhere):
            return None
        if len(known) >= _MOST_AGREED:
            known.clear()
        known[key] = mine if all(theirs[1] == mine for theirs in everywhere) else None
    return known.get(key)
