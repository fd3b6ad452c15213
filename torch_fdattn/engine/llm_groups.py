"""The ranks of an `LLM`: which groups it was given, whose draws all of them take, and what must be equal on them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn.dist.consensus import check_equal_on_all_ranks, refusing_on_all_ranks
from torch_fdattn.dist.decode.op import ONE_SIDED
from torch_fdattn.dist.groups import Group, backends_of, name_of, rank_and_size


class EngineGroups(NamedTuple):
    """The groups of an `LLM` by name; None: there is none.

    everybody: the group of all its ranks, whose first one's draws count.
    """

    kv: str | None
    tp: str | None
    everybody: dist.ProcessGroup | None

    @classmethod
    def of(cls, kv_group: Group, tp_group: Group, sync_group: Group) -> EngineGroups:
        """Of `LLM`'s arguments.

        Raises:
            ValueError: a group that is not known, or two that are not a mesh of sync_group's ranks, or of all.
        """
        given = ("kv_group", kv_group), ("tp_group", tp_group)
        names = {name: name_of(group, name) for name, group in given if group is not None}
        sizes = {name: rank_and_size(group, name)[1] for name, group in names.items()}
        everybody = None
        if sync_group is not None:
            name = name_of(sync_group, "sync_group")
            if (size := rank_and_size(name, "sync_group")[1]) != (
                expected := math.prod(sizes.values())
            ):
                raise ValueError(
                    f"sync_group must have the ranks of kv_group and tp_group together, {expected}, got a group of {size}"
                )
            everybody = distributed_c10d._resolve_process_group(name)
        elif len(names) == 2:
            if sizes["kv_group"] * sizes["tp_group"] != dist.get_world_size():
                raise ValueError(
                    "kv_group and tp_group must be the two dimensions of a mesh of all ranks, got groups of "
                    f"{sizes['kv_group']} and {sizes['tp_group']} among {dist.get_world_size()} ranks: give sync_group"
                )
            everybody = dist.group.WORLD
        elif names:
            (name,) = names.values()
            everybody = distributed_c10d._resolve_process_group(name)
        return cls(names.get("kv_group"), names.get("tp_group"), everybody)

    def can_be_captured(self, strategy: str, hierarchy: tuple[str, str] | None) -> bool:
        """Whether CUDA graphs can hold a pass: not with collectives of gloo, which the host computes.

        Draws are sent to everybody behind a pass, one rank has nothing to send, and one-sided strategies have no collectives.
        """
        names = [x for x in (self.tp, *(hierarchy or ())) if x is not None]
        if self.kv is not None and rank_and_size(self.kv)[1] > 1 and strategy not in ONE_SIDED:
            names.append(self.kv)
        groups = [distributed_c10d._resolve_process_group(x) for x in names]
        return all(backends_of(group).get("cuda") != "gloo" for group in groups)

    def refusing(self, like: Tensor) -> contextlib.AbstractContextManager[None]:
        """What is refused inside it, all ranks refuse: those that do not, at `check_equal`."""
        if self.everybody is None:
            return contextlib.nullcontext()
        return refusing_on_all_ranks(self.everybody.group_name, like)

    def check_equal(self, like: Tensor, options: Mapping[str, object]) -> None:
        """Compares the options on all ranks, and that the two groups cross.

        Raises:
            ValueError, NotImplementedError: on every rank, naming what differs, or what one of them refuses.
        """
        if self.everybody is None:
            return
        check_equal_on_all_ranks(self.everybody.group_name, like, options)
        if self.kv is not None and self.tp is not None:
            for name, other, what in ((self.kv, self.tp, "tp_group"), (self.tp, self.kv, "kv_group")):  # fmt: skip
                check_equal_on_all_ranks(
                    name, like, {f"the rank in {what}": rank_and_size(other)[0]}
                )
