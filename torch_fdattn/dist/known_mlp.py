"""Replicated MLPs of few rows, past what their parts look up one by one.

A call like former ones is two products by BLAS, a launch of SwiGLU and a launch that sums over the ranks
(`low_latency`). Its parts each ask who watches, what they are given and what was decided before, which takes the host
as long as all the rest; here it is asked once, while the device is at the first product. Without gradients, on GPUs,
where the two launches are known (`ops/repeated_call.py`, `plans.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn import checks
from torch_fdattn.dist import plans
from torch_fdattn.ops import library, repeated_call, swiglu
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.norms import plain_weight
from torch_fdattn.ops.repeated_call import Step

if TYPE_CHECKING:  # imports triton
    from torch_fdattn.dist.tp_linear.push_values import Exchange

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
        self, y: Tensor, down: Tensor, added_to: Tensor | None, norm_weight: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor] | None:  # fmt: skip
        """The MLP's result, as `TPMLP.forward`'s; None: it is not as it was, and nothing was sent.

        Args:
            y: what gate and up made of x, as one product.
            down: the weight of the product that is summed, which has no bias.
            added_to, norm_weight: of a residual, if there is one.
        """
        if y.shape != self.joined or not self.exchange.is_alike():
            return None
        inner = torch.empty_like(self.inner, memory_format=torch.contiguous_format)
        at = y.data_ptr()
        addresses = at, at + self.up_bytes, inner.data_ptr()
        if not repeated_call.launched(self.activation, addresses):
            return None
        part = F.linear(inner, down)
        if part.shape != self.part:
            return None
        if added_to is None:
            result = total = torch.empty_like(part)
            done = self.exchange(part, total)
        else:
            result = added, normed = torch.empty_like(part), torch.empty_like(part)
            done = self.exchange(part, None, added_to, norm_weight, normed, added)
        launches["dist/known_mlp"] += done
        return result if done else None


class KnownMLP:
    """The calls that a layer knows, by group; deep copies of a layer know none."""

    def __init__(self) -> None:
        # Weak: what a group's ranks map goes with it. An int: how often such a call was made that is not known.
        self._of: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Call | int]] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple:
        return KnownMLP, ()

    def run(
        self, group_name: str, x: Tensor, y: Tensor, down: Tensor, residual: Any, how: tuple
    ) -> tuple[Tensor | tuple[Tensor, Tensor] | None, tuple | None]:  # fmt: skip
        """(the result; None: not known), (what to `learn` such calls by; None: not).

        Args:
            y, down: as `Call`'s.
            how: what decides how the sum is made, of the layer.
        """
        if checks.CHECK_VALUES or torch.is_grad_enabled():
            return None, None
        added_to = weight = None
        if residual is not None:
            added_to, weight = residual.x, plain_weight(residual.norm, x.dtype, residual.x.dtype)
            if weight is None:
                return None, None
        if not library.runs_unseen(x, down, added_to, weight):
            return None, None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():  # where the host has time
            return None, None
        kind = how, x.shape, x.stride(), x.dtype, x.device, down.dtype
        if added_to is not None:
            kind += residual.norm.eps, *repeated_call.metadata(added_to, weight)
        known = self._of.get(distributed_c10d._resolve_process_group(group_name))
        call = 0 if known is None else known.get(kind, 0)
        if type(call) is not Call:
            return None, kind if call < _TRIES else None
        found = call(y, down, added_to, weight)
        return found, kind if found is None else None

    def learn(
        self, group_name: str, kind: tuple, x: Tensor, ys: Sequence[Tensor], inner: Tensor, down: Tensor, residual: Any,
        summed: tuple,
    ) -> None:  # fmt: skip
        """After a call: remembers it if it came to launches that are known.

        Args:
            kind: what `run` gave.
            ys: what gate and up gave, two halves of one tensor's rows.
            inner: what SwiGLU made of them.
            down: as `Call`'s.
            summed: what `plans.find` knows the last part by.
        """
        group = distributed_c10d._resolve_process_group(group_name)
        known = self._of.setdefault(group, {})
        if len(known) >= _MOST:
            known.clear()
        tries = known.get(kind, 0)
        known[kind] = tries + 1 if type(tries) is int else 1
        plan = plans.find(*summed)
        if plan is None or plan.with_norm != (residual is not None):
            return
        exchange = plan.memo.get("exchange")
        activation = repeated_call.find(swiglu.key_of(*ys))
        part = torch.Size((*x.shape[:-1], len(down)))
        given = (x,) if residual is None else (x, residual.x, residual.norm.weight)
        whole = residual is None or residual.x.shape == part
        if exchange is None or activation is None or not whole:
            return
        if not all(t.is_contiguous() for t in given):
            return
        gate, up = ys
        joined = torch.Size((*x.shape[:-1], gate.shape[-1] + up.shape[-1]))
        like, up_bytes = inner.new_empty(1).expand_as(inner), up.data_ptr() - gate.data_ptr()
        known[kind] = Call(activation, exchange, joined, like, part, up_bytes)
