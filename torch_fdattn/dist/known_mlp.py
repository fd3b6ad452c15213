"""Replicated MLPs of few rows, past what their parts look up one by one.

A call like former ones is two products by BLAS, a launch of SwiGLU and a launch that sums over the ranks
(`low_latency`). Its parts each ask who watches, what they are given and what was decided before, which takes the host
as long as all the rest; here it is asked once, while the device is at the first product. Without gradients, on GPUs,
where the two launches are known (`ops/repeated_call.py`, `plans.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn import checks
from torch_fdattn.dist import plans
from torch_fdattn.dist.tp_linear.push_values import Exchange
from torch_fdattn.ops import library, repeated_call, swiglu
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.norms import plain_weight
from torch_fdattn.ops.repeated_call import Step

#: Calls of one kind after which it is not looked at again whether they are known; parts are from their third on.
_TRIES = 5
#: Kinds of call that a layer knows of; then all are forgotten.
_MOST = 256


class Call(NamedTuple):
    """What one kind of call came to."""

    activation: tuple[Step, ...]
    exchange: Exchange
    joined: torch.Size
    inner: Tensor  # of its shape, without its memory: made from this, it takes the host half of the time
    part: torch.Size
    up_bytes: int  # from a row's first half in `joined` to its second

    def __call__(
        self, x: Tensor, y: Tensor, down: Tensor, residual: Any
    ) -> Tensor | tuple[Tensor, Tensor] | None:  # fmt: skip
        """The MLP's result, as `TPMLP.forward`'s; None: it is not as it was, and nothing was sent.

        Args:
            y: what gate and up made of x, as one product.
            down: the weight of the product that is summed, which has no bias.
        """
        if y.shape != self.joined:
            return None
        inner = torch.empty_like(self.inner, memory_format=torch.contiguous_format)
        at = y.data_ptr()
        addresses = at, at + self.up_bytes, inner.data_ptr()
        if not repeated_call.launched(self.activation, addresses):
            return None
        part = F.linear(inner, down)
        if part.shape != self.part:
            return None
        if residual is None:
            result = total = torch.empty_like(part)
            done = self.exchange(part, total)
        else:
            weight = plain_weight(residual.norm, x.dtype, residual.x.dtype)
            if weight is None or not weight.is_contiguous():
                return None
            result = added, normed = torch.empty_like(part), torch.empty_like(part)
            done = self.exchange(part, None, residual.x, weight, normed, added)
        launches["dist/known_mlp"] += done
        return result if done else None


class KnownMLP:
    """The calls that a layer knows, by group; copies of a layer know none."""

    def __init__(self) -> None:
        # Weak: what a group's ranks map goes with it. An int: how often such a call was made that is not known.
        self._of: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Call | int]] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple:
        return KnownMLP, ()

    def find(
        self, group_name: str, x: Tensor, down: Tensor, residual: Any
    ) -> tuple[Call | None, bool]:  # fmt: skip
        """(the call that this one is like, whether one that is not known is to be `learn`-ed)."""
        if checks.CHECK_VALUES or torch.is_grad_enabled():
            return None, False
        if not library.runs_unseen(x, down, None if residual is None else residual.x):
            return None, False
        known = self._of.get(distributed_c10d._resolve_process_group(group_name))
        found = 0 if known is None else known.get(_kind(x, residual), 0)
        return (found, False) if type(found) is Call else (None, found < _TRIES)

    def learn(
        self, group_name: str, x: Tensor, ys: Sequence[Tensor], inner: Tensor, down: Tensor, residual: Any,
        summed: tuple,
    ) -> None:  # fmt: skip
        """After a call: remembers it if it came to launches that are known.

        Args:
            ys: what gate and up gave, two halves of one tensor's rows.
            inner: what SwiGLU made of them.
            down: as `Call`'s.
            summed: what `plans.find` knows the last part by.
        """
        group = distributed_c10d._resolve_process_group(group_name)
        known, kind = self._of.setdefault(group, {}), _kind(x, residual)
        if len(known) >= _MOST:
            known.clear()
        known[kind] = known.get(kind, 0) + 1
        plan = plans.find(*summed)
        exchange = None if plan is None else plan.memo.get("exchange")
        activation = repeated_call.find(swiglu.key_of(*ys))
        part = torch.Size((*x.shape[:-1], len(down)))
        whole = residual is None or (residual.x.is_contiguous() and residual.x.shape == part)
        if exchange is None or activation is None or not whole or not x.is_contiguous():
            return
        gate, up = ys
        joined = torch.Size((*x.shape[:-1], gate.shape[-1] + up.shape[-1]))
        like, up_bytes = inner.new_empty(1).expand_as(inner), up.data_ptr() - gate.data_ptr()
        known[kind] = Call(activation, exchange, joined, like, part, up_bytes)


def _kind(x: Tensor, residual: Any) -> tuple:
    """What calls have in common: all that decides what they do, but for the weights."""
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if residual is None:
        return x.shape, x.stride(), x.dtype, x.device, captured
    added = residual.x
    return x.shape, x.stride(), x.dtype, x.device, captured, residual.norm.eps, added.shape, added.stride()  # fmt: skip
