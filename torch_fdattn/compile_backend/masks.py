"""Masks: what is added to scores or fills them. The one place where a mask becomes a keyword of ours.

Now only masks that a graph makes from nothing are recovered: they are computed when the graph is compiled
and compared with the causal ones, entry by entry. Everything else is left with the reason "mask".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Node

from torch_fdattn.compile_backend.constants import constant
from torch_fdattn.compile_backend.mutations import written_between
from torch_fdattn.compile_backend.report import Left

#: Which keys a query sees: all; those up to its own index; or so, with the last query at the last key.
Causal = Literal["full", "top-left", "bottom-right"]


@dataclass
class MaskTerm:
    """One operation that hides scores."""

    node: Node
    kind: Literal[
        "visible", "hidden", "added"
    ]  #: True where seen, True where hidden, a number to add
    fill: float = 0.0  #: what hidden scores become, where the mask itself does not say
    factor: float = 1.0  #: by which the scores are multiplied afterwards


@dataclass
class Recovered:
    causal: Causal = "full"
    nodes: list[Node] = field(default_factory=list)  #: that made the masks, and are needed no more


class Masks:
    """Recovers the masks of one graph; remembers them, since all layers mostly share one."""

    def __init__(self) -> None:
        self._constants: dict[Node, tuple[Tensor, list[Node]] | None] = {}

    def recover(
        self, terms: list[MaskTerm], q_len: object, kv_len: object, dtype: torch.dtype, until: Node
    ) -> Recovered:
        """What all masks together let a query see; raises `Left` where that is not proven.

        dtype: of the scores; until: the node where attention happens.
        """
        if not terms:
            return Recovered()
        if not isinstance(q_len, int) or not isinstance(kv_len, int):
            raise Left("mask", "an explicit mask over lengths that are not known before the call")
        visible = torch.ones(q_len, kv_len, dtype=torch.bool)
        nodes: list[Node] = []
        for term in terms:
            if term.node not in self._constants:
                self._constants[term.node] = constant(term.node)
            found = self._constants[term.node]
            if found is None:
                raise Left("mask", "an explicit mask that is not made of constants in this graph")
            mask, makers = found
            if written_between(makers[0], until, makers) is not None:
                raise Left("mask", "an explicit mask that is written to in place")
            visible = visible & _one_for_all(_visible(term, mask, dtype), q_len, kv_len)
            nodes += makers
        return Recovered(_kind(visible), nodes)


def _visible(term: MaskTerm, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as True where a score stays as it is."""
    if term.kind == "added":
        if not mask.is_floating_point():
            raise Left("mask", f"a mask of {mask.dtype} is added to the scores")
        for fill in mask[mask != 0].unique().tolist():
            _check_hides(fill * term.factor, dtype, "mask")
        return mask == 0
    if mask.dtype != torch.bool:
        raise Left("mask", f"a mask of {mask.dtype}, not bool")
    seen = mask if term.kind == "visible" else ~mask
    if not seen.all():
        _check_hides(term.fill * term.factor, dtype, "mask-value")
    return seen


def _check_hides(fill: float, dtype: torch.dtype, code: str) -> None:
    """-inf, or so close to the dtype's least that a hidden score's weight is zero whatever the scores."""
    least = torch.finfo(dtype).min
    # float16 has no such room: scores of some ten thousand are possible.
    if not fill <= (least if dtype == torch.float16 else least / 4):
        raise Left(code, f"scores are hidden by {fill:g}, which does not hide them for certain")


def _one_for_all(visible: Tensor, q_len: int, kv_len: int) -> Tensor:
    """The mask as (S_q, S_kv), where it is the same for every batch and head."""
    try:
        visible = visible.expand(*torch.broadcast_shapes(visible.shape, (q_len, kv_len)))
    except RuntimeError:
        raise Left("mask", f"a mask of shape {tuple(visible.shape)}") from None
    flat = visible.reshape(-1, *visible.shape[-2:])
    if flat.shape[1:] != (q_len, kv_len) or not flat.shape[0] or not (flat == flat[0]).all():
        raise Left("mask", "an explicit mask that differs between batches or heads")
    return flat[0]


def _kind(visible: Tensor) -> Causal:
    q_len, kv_len = visible.shape
    if visible.all():
        return "full"
    everything = torch.ones_like(visible)
    if torch.equal(visible, everything.tril()):
        return "top-left"
    # With fewer keys than queries some rows would see nothing: NaN or a mean there, and zero here.
    if kv_len >= q_len and torch.equal(visible, everything.tril(kv_len - q_len)):
        return "bottom-right"
    raise Left("mask", "an explicit mask that is neither empty nor causal")
