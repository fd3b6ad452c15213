"""Process groups: the name of one, however a caller gives it, and a group's rank and size.

Ops, channels and compiled graphs know groups by their names; every public entry that takes a group goes through `name_of`.
"""

from __future__ import annotations

import weakref
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

#: How callers say which group: by a mesh of one dimension, by itself, by its name, or None for the default group.
Group: TypeAlias = DeviceMesh | dist.ProcessGroup | str | None

NOT_INITIALISED = "{} needs an initialised torch.distributed: call init_process_group first (or start the program with torchrun)"


def name_of(group: Group, argument: str = "group") -> str:
    """The name of a group; `argument` is what errors call it. That a name is known, `rank_and_size` finds out.

    Raises:
        TypeError: it is nothing that says which group.
        ValueError: a mesh of several dimensions, or a group that this process is not in.
        RuntimeError: None, or a mesh, and torch.distributed is not initialised.
    """
    return group if isinstance(group, str) else _name_of_object(group, argument)


def _name_of_object(group: object, argument: str) -> str:
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(NOT_INITIALISED.format(f"{argument} None, the default group,"))
        return dist.group.WORLD.group_name
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ("unnamed",) * group.ndim
            raise ValueError(
                f"{argument} must be a DeviceMesh of one dimension (mesh['tp'], say, of a larger one), got "
                f"{group.ndim} dimensions: {', '.join(names)}"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns on the other ranks
        raise ValueError(f"{argument} must be a process group that this process is in")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{argument} must be a process group, its name or a DeviceMesh of one dimension, got "
            f"{type(group).__name__}"
        )
    return group.group_name


# As of `rank_and_size`: Dynamo calls it while tracing, and a name stands in the graph.
_name_of_object._dynamo_marked_constant = True  # type: ignore[attr-defined]


def pair_of_names(hierarchy: tuple[Group, Group] | None) -> tuple[str, str] | None:
    """The names of a pair of groups, as `dist.decode`'s hierarchy is given."""
    if hierarchy is None:
        return None
    if not isinstance(hierarchy, (tuple, list)) or len(hierarchy) != 2 or None in hierarchy:
        raise TypeError(
            f"hierarchy must be a pair of groups (inner, outer) or None, got {hierarchy!r}"
        )
    inner, outer = (name_of(group, "hierarchy") for group in hierarchy)
    return inner, outer


# Weak: a name may come again after destroy_process_group, and its group must be able to go.
_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, int]] = weakref.WeakKeyDictionary()


def rank_and_size(group_name: str, argument: str = "group") -> tuple[int, int]:
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


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend by type of device, as {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


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
    return rank_and_size(group_name, "group_name")


def is_traced(tensor: Tensor) -> bool:
    """Whether an op on this tensor is being traced rather than run: only functional collectives then."""
    return TracingContext.try_get() is not None or isinstance(tensor, torch._subclasses.FakeTensor)
