"""Calls whose like was made before go past their checks and the choice of a strategy.

Few rows take a GPU less time than the checks take the host. From its third call on, one that differs from former ones
in nothing but its tensors' values finds what was decided. Not where anybody watches or differentiates
(`library.runs_unseen`), and not on CPUs, where ranks compare every call unless it follows from what was compared.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn import checks
from torch_fdattn.dist.groups import trusted
from torch_fdattn.ops import library

#: By group, then by what calls have in common; None for what was seen once, where `auto` may still choose anew.
_plans: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, object]] = (
    weakref.WeakKeyDictionary()
)
#: Kinds of call that a group remembers; then all are forgotten.
_MOST = 4096


def find(op: str, group_name: str, options: tuple, first: Tensor, *others: Tensor | None) -> Any:  # fmt: skip
    """The plan of such calls; None: the call is new, or watched, or wrong."""
    found = _lookup(op, group_name, options, (first, *others))
    return found[0].get(found[1]) if found else None


def keep(
    plan: object, op: str, group_name: str, options: tuple, first: Tensor, *others: Tensor | None
) -> None:
    """Called with what `find` was called with, once a call was checked."""
    found = _lookup(op, group_name, options, (first, *others))
    if found:
        known, call = found
        if len(known) >= _MOST:
            known.clear()
        known[call] = plan if call in known else None


def forget() -> None:
    """Makes the next calls of all kinds new."""
    _plans.clear()


def _lookup(
    op: str, group_name: str, options: tuple, tensors: tuple[Tensor | None, ...]
) -> tuple[dict[tuple, object], tuple] | None:
    """(what is known of a group, the call in it)."""
    if checks.CHECK_VALUES or not library.runs_unseen(*tensors):
        return None
    device = tensors[0].device
    if device.type != "cuda" and not trusted():
        return None
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    about = [None if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    try:
        group = distributed_c10d._resolve_process_group(group_name)
        call = op, options, captured, *about
        hash(call)
    except (RuntimeError, TypeError, ValueError):  # the checks say what is wrong
        return None
    return _plans.setdefault(group, {}), call
