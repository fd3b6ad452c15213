"""What masks are made of, from the graph's operations to what is recovered of them all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.masks.expressions import TRUE, Condition, Poly
from torch_fdattn.compile_backend.masks.structure import Structure

#: What a query that sees no key gets: zeros, as our ops give it; NaN; or the mean of all values, which is
#: softmax's answer where a finite number hid all of its scores.
Empty = Literal["zero", "nan", "mean"]


@dataclass(frozen=True)
class MaskTerm:
    """One operation that hides scores."""

    node: Node
    #: True where seen, True where hidden, a number to add
    kind: Literal["visible", "hidden", "added"]
    fill: float = 0.0  #: what hidden scores become, where the mask itself does not say
    factor: float = 1.0  #: by which the scores are multiplied afterwards
    dtype: torch.dtype | None = None  #: the narrowest that the scores have from there on
    #: what each dim of the scores is that it is broadcast to (`match/roles.py`)
    dims: tuple[str, ...] = ("b", "h", "q", "k")
    floor: float | None = None  #: a number that hides, which stands in place of what is lower

    @property
    def is_added(self) -> bool:
        return self.kind == "added"

    def rounded(self, fill: float) -> float:
        """Twice float32's least number is -inf, and so is that number in bfloat16."""
        return fill if self.dtype is None else torch.tensor(fill, dtype=self.dtype).item()


@dataclass(frozen=True)
class Floor:
    """A number that hides, below which no score is (`clamp`)."""

    number: float
    dtype: torch.dtype
    halves_ties: bool  #: whether a score that is this number has half of its gradient (`maximum`)


@dataclass(frozen=True)
class ExplicitMask:
    """What stays a tensor of a term: a condition, to be made from what the mask was made of, or the mask itself."""

    term: MaskTerm
    condition: Condition | None = None
    fill: float = -math.inf  #: what a boolean mask makes of its hidden entries
    limited: bool = False  #: whether the mask may hold finite numbers that our ops take for -inf
    scale: float = (
        1.0  #: by which the sum of all masks up to this one is multiplied, in `RowLevels`
    )


@dataclass(frozen=True)
class RowLevels:
    """All masks in the order in which they are written: what they hide a row by (see `hidden_rows.py`)."""

    terms: tuple[ExplicitMask, ...]
    #: of a row whose highest number is at most this, nothing of its scores is left
    limit: float | None
    flows: bool  #: whether gradients reach these scores
    #: whether keys that fills hide are another attention, which no gradient reaches
    fills_apart: bool = False

    @property
    def needs_copies(self) -> bool:
        return self.limit is not None and self.flows

    @property
    def fills(self) -> list[ExplicitMask]:
        return [kept for kept in self.terms if not kept.term.is_added]


@dataclass(frozen=True)
class NanGradients:
    """Which gradients are NaN where the output is: where -inf hides all keys of a query, and not all by fills."""

    fills: tuple[ExplicitMask, ...] = ()  #: whose keys pass none to scores; empty: all do, or none
    #: sums, each with the fills behind it
    learned: tuple[tuple[ExplicitMask, tuple[ExplicitMask, ...]], ...] = ()


@dataclass
class RecoveredMask:
    structure: Structure = field(default_factory=Structure)
    terms: list[MaskTerm] = field(default_factory=list)  #: all that it was recovered of
    slopes: Poly | None = None
    #: in the order in which they are applied to the scores
    kept: list[ExplicitMask] = field(default_factory=list)
    empty: Empty = "zero"
    flows: bool = False  #: whether gradients reach the scores of a query that sees no key
    levels: RowLevels | None = None
    nans: NanGradients = NanGradients()
    reason: str = ""  #: why something stays a tensor: a key of `report.MASK_REASONS`
    #: the masks that hold what these are made of
    roots: dict[Poly, Node] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)  #: that made the masks, and are needed no more

    @property
    def name(self) -> str:
        """As a report says it."""
        structure, terms = self.structure, []
        if structure.right == 0:
            terms.append("causal" if structure.start is None else "causal from an offset")
        if structure.left >= 0 or structure.right > 0:
            left, right = ("all" if n < 0 else n for n in (structure.left, structure.right))
            terms.append(f"window ({left}, {right})")
        if structure.chunk is not None:
            terms.append(f"chunks of {structure.chunk}")
        if structure.prefix:
            terms.append(f"a prefix of {structure.prefix}")
        if structure.lengths is not None:
            terms.append("lengths")
        if self.slopes is not None:
            terms.append("ALiBi")
        for kept in self.kept:
            what = "mask" if kept.condition is None else "padding"
            terms.append(f"explicit {what} ({self.reason})")
        return " and ".join(terms) or "full"


@dataclass(frozen=True)
class ParsedTerm:
    """A term as it was understood: a bias where the condition holds, and elsewhere one of `fills`, which hide.

    `bias` None: it was not, and is kept.
    """

    term: MaskTerm
    condition: Condition = TRUE
    fills: frozenset[float] = frozenset()
    bias: Poly | None = None
    reason: str = "mask-form"
    limited: bool = False
    infinite: bool = False  #: whether an added mask may hold -inf
    summed: bool = False  #: whether an added mask is a sum of several that hide
    floor: float = 0.0  #: the lowest finite number that an added mask may hold
    one_level: bool = False  #: whether it is the one number of its that swallows scores
    learned: bool = False  #: whether it needs a gradient

    @property
    def hides(self) -> bool:
        return bool(self.fills) or self.bias is None

    def as_tensor(self, reason: str = "") -> ParsedTerm:
        """An added mask as the numbers that it holds."""
        return replace(
            self, condition=TRUE, fills=frozenset(), bias=None, reason=reason or self.reason
        )


class KeepAsTensors(Exception):
    """Raised where terms are not to be taken apart."""
