"""Replicated MLPs of few rows, past what their parts look up one by one.

A call like former ones is two products by BLAS, a launch of SwiGLU and a launch that sums over the ranks
(`low_latency`), or a product with SwiGLU in it and one that sums (`gemm_epilogue`), and a norm's. Its parts each ask who watches, what they are given and what was decided before, which takes the host
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
        return _by_values(self.exchange, inner, down, self.part, added_to, norm_weight)


def _by_values(
    exchange: Exchange, inner: Tensor, down: Tensor, shape: torch.Size, added_to: Tensor | None, norm_weight: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor] | None:  # fmt: skip
    """A product by BLAS, of this shape, and a launch that sums; None: nothing was sent."""
    part = F.linear(inner, down)
    if part.shape != shape:
        return None
    if added_to is None:
        result = total = torch.empty_like(part)
        done = exchange(part, total)
    else:
        result = added, normed = torch.empty_like(part), torch.empty_like(part)
        done = exchange(part, None, added_to, norm_weight, normed, added)
    launches["dist/known_mlp"] += done
    return result if done else None


class FewCall(NamedTuple):
    """What one kind of call of few rows came to: SwiGLU in the product, and a sum by either way."""

    gated: tuple[Step, ...]
    sums: Exchange
    by_product: bool  # whether it multiplies as well, or is `Call`'s
    norm: tuple[Step, ...] | None  # behind it, if that multiplies and there is a residual
    inner: Tensor  # as `Call`'s
    part: Tensor  # so, of the result
    weights: tuple[int, int]  # where gate's and up's lay, side by side

    def __call__(
        self, x: Tensor, weights: tuple[Tensor, Tensor, Tensor], added_to: Tensor | None, norm_weight: Tensor | None,
        eps: float | None,
    ) -> Tensor | tuple[Tensor, Tensor] | None:  # fmt: skip
        """As `Call`. weights: of gate, up and down."""
        gate, up, down = weights
        at = gate.data_ptr()
        if (at, up.data_ptr()) != self.weights or not self.sums.is_alike():
            return None
        inner = torch.empty_like(self.inner, memory_format=torch.contiguous_format)
        if not repeated_call.launched(self.gated, (inner.data_ptr(), x.data_ptr(), at, at)):
            return None
        if not self.by_product:
            return _by_values(self.sums, inner, down, self.part.shape, added_to, norm_weight)
        y = torch.empty_like(self.part, memory_format=torch.contiguous_format)
        if not self.sums(y, inner, down, down):
            return None
        launches["dist/known_mlp"] += 1
        if added_to is None:
            return y
        normed, added = torch.empty_like(y), torch.empty_like(y)
        if not repeated_call.again(self.norm, (y, added_to, norm_weight, normed, added)):
            # The sum is made: not once more, which the other ranks would not take part in.
            from torch_fdattn.dist.tp_linear.row_norm import sum_norm  # imports triton

            flat = [t.flatten(0, -2) for t in (y, added_to)]
            normed, added = sum_norm(flat[0], None, flat[1], norm_weight, eps, None)
        return added.view_as(y), normed.view_as(y)


class KnownMLP:
    """The calls that a layer knows, by group; deep copies of a layer know none."""

    def __init__(self) -> None:
        # Weak: what a group's ranks map goes with it. An int: how often such a call was made that is not known.
        self._of: weakref.WeakKeyDictionary[
            dist.ProcessGroup, dict[tuple, Call | FewCall | int]
        ] = weakref.WeakKeyDictionary()

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
        kind, added_to, norm_weight = _kind(how, x, residual, down)
        call = self._find(group_name, kind)
        if type(call) is not Call:
            return None, kind if call < _TRIES else None
        found = call(y, down, added_to, norm_weight)
        return found, kind if found is None else None

    def run_few(
        self, group_name: str, x: Tensor, weights: tuple[Tensor, Tensor, Tensor], residual: Any, how: tuple
    ) -> tuple[Tensor | tuple[Tensor, Tensor] | None, tuple | None]:  # fmt: skip
        """`run`, of `FewCall`s, before anything was launched, and for `learn_few`."""
        *first, down = weights
        kind, added_to, norm_weight = _kind(("few", *how), x, residual, down, *first)
        call = self._find(group_name, kind)
        if type(call) is not FewCall:
            return None, kind if call < _TRIES else None
        eps = None if residual is None else residual.norm.eps
        found = call(x, weights, added_to, norm_weight, eps)
        return found, kind if found is None else None

    def _find(self, group_name: str, kind: tuple | None) -> Call | FewCall | int:
        """What is known of such calls, or how many there were."""
        if kind is None:
            return _TRIES
        known = self._of.get(distributed_c10d._resolve_process_group(group_name))
        return 0 if known is None else known.get(kind, 0)

    def _tried(self, group_name: str, kind: tuple) -> dict[tuple, Call | FewCall | int]:
        """Counts a call that was not known; the group's calls."""
        group = distributed_c10d._resolve_process_group(group_name)
        known = self._of.setdefault(group, {})
        if len(known) >= _MOST:
            known.clear()
        tries = known.get(kind, 0)
        known[kind] = tries + 1 if type(tries) is int else 1
        return known

    def learn_few(
        self, group_name: str, kind: tuple, x: Tensor, joined: Tensor, weights: tuple[Tensor, Tensor, Tensor],
        inner: Tensor, residual: Any, summed: tuple,
    ) -> None:  # fmt: skip
        """`learn`, of what `run_few` gave. joined: gate's and up's weights as one."""
        from torch_fdattn.dist.tp_linear import (  # import triton
            gated_product,
            gemm_epilogue,
            row_norm,
        )

        known = self._tried(group_name, kind)
        plan, (gate, up, down) = _plan(summed, residual), weights
        if plan is None:
            return
        gated = repeated_call.find(gated_product.key_of(x.flatten(0, -2), joined))
        name = gemm_epilogue.name_of(inner.flatten(0, -2), down, None, None)
        sums, by_product = plan.memo.get("exchange"), name in plan.memo
        part, norm = x.new_empty(1).expand(*x.shape[:-1], len(down)), None
        if by_product:
            sums = plan.memo[name]
        if residual is not None:
            if by_product:
                key = row_norm.key_of_sum(part.flatten(0, -2), residual.norm.eps)
                norm = repeated_call.find(key)
            whole = residual.x.shape == part.shape and residual.x.is_contiguous()
            if not whole or not residual.norm.weight.is_contiguous() or (by_product and norm is None):  # fmt: skip
                return
        if sums is None or gated is None or not x.is_contiguous():
            return
        like = inner.new_empty(1).expand_as(inner)
        where = gate.data_ptr(), up.data_ptr()
        known[kind] = FewCall(gated, sums, by_product, norm, like, part, where)

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
        known = self._tried(group_name, kind)
        plan = _plan(summed, residual)
        if plan is None:
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


def _plan(summed: tuple, residual: Any) -> Any:
    """The plan of the last part, if it is one with a norm where there is a residual, and only there."""
    plan = plans.find(*summed)
    return plan if plan is not None and plan.with_norm == (residual is not None) else None


def _kind(
    how: tuple, x: Tensor, residual: Any, down: Tensor, *others: Tensor
) -> tuple[tuple | None, Tensor | None, Tensor | None]:
    """(what such calls are known by; None: by nothing), the residual and its norm's weight, if there are any."""
    none = None, None, None
    if checks.CHECK_VALUES or torch.is_grad_enabled():
        return none
    added_to = norm_weight = None
    if residual is not None:
        added_to = residual.x
        norm_weight = plain_weight(residual.norm, x.dtype, added_to.dtype)
        if norm_weight is None:
            return none
    if not library.runs_unseen(x, down, *others, added_to, norm_weight):
        return none
    if x.is_cuda and torch.cuda.is_current_stream_capturing():  # where the host has time
        return none
    kind = how, *repeated_call.metadata(x, down)
    if added_to is not None:
        kind += residual.norm.eps, *repeated_call.metadata(added_to, norm_weight)
    return kind, added_to, norm_weight
