"""Calls whose like was made before go past their checks and the choice of a strategy.

Few rows take a GPU less time than the checks take the host. From its third call on, one that differs from former ones
in nothing but its tensors' values finds what was decided. Not where anybody watches or differentiates
(`library.runs_unseen`), and not on CPUs, where ranks compare every call unless it follows from what was compared.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn import checks
from torch_fdattn.dist.groups import trusted
from torch_fdattn.ops import library

#: By group, then by what calls have in common; None for what was seen once.
_plans: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, object]] = (
    weakref.WeakKeyDictionary()
)
#: Kinds of call that a group remembers; then all are forgotten.
_MOST = 4096


def find(op: str, group_name: str, options: tuple, first: Tensor, *others: Tensor | None) -> Any:  # fmt: skip
    """The plan of such calls; None: the call is new, or watched, or wrong."""
    call = _call(op, options, (first, *others))
    if call is None:
        return None
    try:
        known = _plans.get(distributed_c10d._resolve_process_group(group_name))
        return known.get(call) if known else None
    except (RuntimeError, TypeError, ValueError):  # the checks say what is wrong
        return None


def keep(
    plan: object, op: str, group_name: str, options: tuple, first: Tensor, *others: Tensor | None
) -> None:
    """Called with what `find` was called with, once a call was checked."""
    call = _call(op, options, (first, *others))
    if call is not None:
        group = distributed_c10d._resolve_process_group(group_name)
        known = _plans.setdefault(group, {})
        if len(known) >= _MOST:
            known.clear()
        with contextlib.suppress(TypeError):  # options that no dictionary takes
            known[call] = plan if call in known else None


def forget() -> None:
    """Makes the next calls of all kinds new."""
    _plans.clear()


def _call(op: str, options: tuple, tensors: tuple[Tensor | None, ...]) -> tuple | None:
    """What a group knows a call by; None: such calls are always checked."""
    if checks.CHECK_VALUES or not library.runs_unseen(*tensors):
        return None
    first = tensors[0]
    captured = first.is_cuda and torch.cuda.is_current_stream_capturing()
    if not first.is_cuda and not trusted():
        return None
    return (
        op,
        options,
        captured,
        *[None if x is None else (x.shape, x.dtype, x.device) for x in tensors],
    )
