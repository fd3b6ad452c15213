"""The name of a process group, however a caller says which: every public entry that takes a group goes through here.

Ops, channels and compiled graphs know groups by their names.
"""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

#: How callers say which group: by a mesh of one dimension, by itself, by its name, or None for the default group.
Group: TypeAlias = DeviceMesh | dist.ProcessGroup | str | None

NOT_INITIALISED = "{} needs an initialised torch.distributed: call init_process_group first (or start the program with torchrun)"


def name_of(group: Group, argument: str = "group_name") -> str:
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


# As of `groups.rank_and_size`: Dynamo calls it while tracing, and a name stands in the graph.
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
