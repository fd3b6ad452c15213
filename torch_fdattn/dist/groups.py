"""Process groups by name: the size, this process's rank, and one clear error for a wrong name."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d


def rank_and_size(group_name: str) -> tuple[int, int]:
    """(rank, world size) of this process in the group.

    Raises:
        TypeError: group_name is no string.
        RuntimeError: torch.distributed is not initialised.
        ValueError: no group of that name, or this process is not in it.
    """
    if not isinstance(group_name, str):
        raise TypeError(
            "group_name must be a process group's name (group.group_name), "
            f"got {type(group_name).__name__}"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"group_name {group_name!r} needs an initialised torch.distributed: call "
            "init_process_group first (or start the program with torchrun)"
        )
    try:
        group = distributed_c10d._resolve_process_group(group_name)
        return dist.get_rank(group), dist.get_world_size(group)
    except (RuntimeError, ValueError) as error:
        known = sorted(str(name) for name in distributed_c10d._world.pg_names.values())
        raise ValueError(
            f"group_name must name a process group of this process, got {group_name!r} (known: {known})"
        ) from error


# What torch.compiler.assume_constant_result would set, without its import of torch._dynamo: Dynamo calls
# the function while tracing and writes the numbers into the graph, and so into its compile caches' keys.
rank_and_size._dynamo_marked_constant = True  # type: ignore[attr-defined]
