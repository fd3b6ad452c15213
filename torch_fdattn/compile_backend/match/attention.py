"""An attention that was recognised, whatever it was written as."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch.fx import Node

from torch_fdattn.compile_backend.masks.expressions import Poly
from torch_fdattn.compile_backend.masks.structure import MaskSizes
from torch_fdattn.compile_backend.masks.terms import RecoveredMask
from torch_fdattn.compile_backend.match.operands import B, H, Operand, S, trace_operand

_NOTE = "heads of K and V not repeated"


class Temperature(NamedTuple):
    """What the product of q and k is multiplied by, or divided by: it is multiplied into q."""

    node: Node  #: a tensor or a symbolic number
    how: Literal["mul", "div"]
    dims: tuple[str, ...]  #: as those of a `MaskTerm`


@dataclass
class MatchedAttention:
    form: str
    result: Node  #: what is to be replaced
    q: Operand
    k: Operand
    v: Operand
    #: which of (B, H, S, D) each dim of the result is, or BOTH or INNER
    out_dims: tuple[int, ...] = (0, 1, 2, 3)
    #: groups of heads and heads of a group, where the scores have a dim of each
    groups: tuple[int, int] | None = None
    softmax_dims: tuple[str, ...] = ("b", "h", "q", "k")  #: what each of its dims is
    scale: float | None = None
    temperatures: list[Temperature] = field(default_factory=list)
    softcap: float = 0.0
    sinks: tuple[Poly, Node] | None = None  #: and the concatenation of scores and sinks
    mask: RecoveredMask = field(default_factory=RecoveredMask)
    masked: bool = False  #: whether the graph holds a mask, whatever became of it
    between: list[Node] = field(default_factory=list)  #: nodes that the op replaces
    notes: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> MaskSizes:
        return score_sizes(self.q, self.k)

    def note_repeated_heads(self) -> None:
        if _NOTE not in self.notes:
            self.notes.append(_NOTE)

    def unrepeated(self, operand: Operand) -> Operand:
        """K or V without copies of its heads, and with a dim for them; as it was where there is no difference."""
        path: list[Node] = []
        source = trace_operand(operand, path, scalings=False)
        if not source.repeats and operand.both is None and operand.inner is None:
            return operand
        self.between += path
        if source.repeats:
            self.note_repeated_heads()
        return source


def score_sizes(q: Operand, k: Operand) -> MaskSizes:
    return MaskSizes(q.size(B), q.size(H), q.size(S), k.size(S))
