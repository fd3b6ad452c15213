"""From conditions on (batch, head, query, key) to what the kernels know: start, window, lengths; from a bias to ALiBi.

A condition `q - k + r >= 0` bounds keys from above, `k - q + r >= 0` from below, where r is the same for all
queries and keys of a sequence. What is neither is left over, and stays an explicit mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import sympy

from torch_fdattn.compile_backend.graph.nodes import statically_true
from torch_fdattn.compile_backend.masks import chunks as mask_chunks
from torch_fdattn.compile_backend.masks.chunks import MaskPart
from torch_fdattn.compile_backend.masks.expressions import (
    Axis,
    Condition,
    Magnitude,
    NonNegative,
    Poly,
    Select,
    axes_of,
    negation,
    number,
    sort_key,
)

_Q, _K = Axis("q"), Axis("k")


class MaskSizes(NamedTuple):
    """Of the scores; ints or SymInts."""

    batch: object
    heads: object
    queries: object
    keys: object

    def is_provable(self, poly: Poly, test: Callable) -> bool:
        """Whether a test of what the polynomial is holds for all sizes that the graph may be called with."""
        constant = poly.constant
        if constant is None:
            return False
        if isinstance(constant, sympy.Expr):
            symbolic = next((x for x in self if not isinstance(x, int)), None)
            if symbolic is None:
                return False  # of a number that the call is given, and no size
            constant = symbolic.node.shape_env.create_symintnode(constant, hint=None)
        return statically_true(test(constant))

    def poly(self, name: str) -> Poly:
        size = getattr(self, name)
        return number(size if isinstance(size, int) else size.node.expr)

    @property
    def default_start(self) -> Poly:
        """Where queries begin if they are the last of the keys."""
        return self.poly("keys") - self.poly("queries")


class Bound(NamedTuple):
    condition: Condition
    by: Poly  #: r of the condition


@dataclass
class Structure:
    """Query i stands at start + i among the keys 0, 1, …, and sees those from `left` before to `right` after it."""

    start: Poly | None = None  #: None: any, since neither bound is one
    left: int = -1
    right: int = -1
    lengths: Poly | None = None  #: keys that are valid, of each sequence
    #: only keys of the query's own chunk of this many; then there are no lengths and no rest
    chunk: int | None = None
    #: so many first keys are seen by all queries, causal ones too; of all ranks' tokens alone
    prefix: int = 0
    rest: list[Condition] = field(default_factory=list)

    def is_never_empty(self, sizes: MaskSizes) -> bool:
        """Whether every query is known to see a key."""
        if self.rest:
            return False
        if self.lengths is not None:
            return self.start is None and sizes.is_provable(self.lengths, lambda x: x >= 1)
        start = self.start or number(0)
        last = start + sizes.poly("queries") - number(1 + self.left)
        return (
            self.right < 0 or sizes.is_provable(start + number(self.right), lambda x: x >= 0)
        ) and (
            self.left < 0
            or sizes.is_provable(sizes.poly("keys") - number(1) - last, lambda x: x >= 0)
        )  # fmt: skip

    def moved_to(self, start: Poly) -> Structure | None:
        """The same with queries that are said to stand elsewhere; None where no window says it."""
        if self.start is None:
            return replace(self, start=start)
        shift = (start - self.start).constant
        if not isinstance(shift, int):
            return None
        left = self.left + shift if self.left >= 0 else -1
        right = self.right - shift if self.right >= 0 else -1
        if (self.left >= 0 and left < 0) or (self.right >= 0 and right < 0):
            return None
        return replace(self, start=start, left=left, right=right)

    def aligned(self, sizes: MaskSizes, distances: bool) -> Structure:
        """With no start, where queries may then stand as the last of the keys; distances: between these matter."""
        ends = sizes.default_start
        # Lengths would say where queries stand, and lengths are clamped to the keys there are.
        if self.start is None or self.lengths is not None or (distances and self.start != ends):
            return self
        moved = self.moved_to(ends)
        return self if moved is None else replace(moved, start=None)


def structured(condition: Condition, sizes: MaskSizes, chunks: bool) -> Structure:
    """The same condition, as far as it is structure; chunks: whether they may be a part of it."""
    found = Structure()
    rest: list[MaskPart] = []
    above: list[Bound] = []
    below: list[Bound] = []
    lengths: list[Bound] = []
    # One query stands wherever it is said to stand.
    one_query = statically_true(sizes.queries == 1)
    for part, says in mask_chunks.parts(condition, sizes):
        kind, by = _bound(says)
        if kind in ("above", "length") and (kind == "above" or one_query):
            above.append(Bound(part, by))
        elif kind in ("below", "from") and (kind == "below" or one_query):
            below.append(Bound(part, by))
        elif kind == "length":
            lengths.append(Bound(part, by + number(1)))
        else:
            rest.append(MaskPart(part, says))
    found.rest = [part.of for part in rest]
    above = [x for x in above if not _allows_all(x.by - sizes.poly("keys"), -1, sizes)]
    below = [x for x in below if not _allows_all(x.by - sizes.poly("queries"), -1, sizes)]
    lengths = [x for x in lengths if not _allows_all(x.by - sizes.poly("keys"), 0, sizes)]
    above, below = _tightest(above, sizes), _tightest(below, sizes)
    if above:
        first, *others = above
        found.start, found.right = first.by, 0
        if one_query:  # a second bound of one query's keys is a length like any other
            lengths += [Bound(x.condition, x.by + number(1)) for x in others]
        else:
            found.rest += [x.condition for x in others]
    below = _with_left_window(found, below)
    if one_query and found.right == 0 and found.left < 0:
        lengths.append(Bound(above[0].condition, found.start + number(1)))
        found.start, found.right = None, -1
        below = _with_left_window(found, below)  # from where its keys begin, however far that is
    found.rest += [x.condition for x in below]
    if lengths:
        lengths = _tightest(lengths, sizes)
        found.lengths = lengths[0].by
        found.rest += [x.condition for x in lengths[1:]]
    alone = len(found.rest) == len(rest) and found.lengths is None
    packed = found.moved_to(number(0)) if chunks and alone else None
    if packed is not None:  # queries of packed sequences begin where their keys do
        causal = found.right == 0 and found.start == number(0)
        packed.chunk = mask_chunks.size_of(rest, sizes, causal)
        if packed.chunk:
            return replace(packed, rest=[])
    return found


def _with_left_window(structure: Structure, below: list[Bound]) -> list[Bound]:
    """Takes the bound from below that is a window with integer bounds; returns the others."""
    for bound in below:
        if structure.start is None:
            structure.start, structure.left = bound.by * number(-1), 0
        else:
            width = (structure.start + bound.by).constant
            if not isinstance(width, int) or width < 0:
                continue
            structure.left = width
        return [x for x in below if x is not bound]
    return below


def _bound(part: Condition) -> tuple[str, Poly | None]:
    """("above", r) of k <= q + r; ("below", r) of k >= q - r; ("length", r) of k <= r; ("from", r) of k >= -r."""
    if not isinstance(part, NonNegative):
        return "", None
    of_k, of_q = part.of.coefficient(_K), part.of.coefficient(_Q)
    by = part.of.without(_K, _Q)
    if axes_of(by) - {"b"} or not all(isinstance(c, int | sympy.Expr) for _, c in by.terms):
        return "", None
    kinds = {(-1, 1): "above", (1, -1): "below", (-1, 0): "length", (1, 0): "from"}
    return kinds.get((of_k, of_q), ""), by


def _allows_all(excess: Poly, minimum: int, sizes: MaskSizes) -> bool:
    return sizes.is_provable(excess, lambda x: x >= minimum)


def _tightest(bounds: list[Bound], sizes: MaskSizes) -> list[Bound]:
    """Without those that follow from another."""
    kept: list[Bound] = []
    for bound in bounds:
        if any(sizes.is_provable(bound.by - other.by, lambda x: x >= 0) for other in kept):
            continue
        kept = [x for x in kept if not sizes.is_provable(x.by - bound.by, lambda d: d >= 0)]
        kept.append(bound)
    return kept


class SplitBias(NamedTuple):
    """What is added to scores: a bias where the conditions hold, and elsewhere one of `fills`, which hide."""

    conditions: list[Condition]
    fills: set[float]
    bias: Poly


def is_for_all_keys(bias: Poly) -> bool:
    """Whether it is a number that changes no softmax: the same for all keys, and not one that swallows scores."""
    constant = bias.constant
    return isinstance(constant, (int, float)) and abs(constant) < 1e4


def split(added: Poly, hides: Callable[[float], bool]) -> SplitBias:
    conditions: list[Condition] = []
    fills: set[float] = set()
    while True:
        for atom in sorted(added.atoms, key=sort_key):
            factor = added.coefficient(atom) if isinstance(atom, Select) else 0
            if not isinstance(factor, (int, float)) or not factor:
                continue
            offset = dict(added.terms).get(frozenset(), 0)
            yes, no = ((x * number(factor) + number(offset)).constant for x in (atom.yes, atom.no))
            hidden = [isinstance(x, (int, float)) and hides(x) for x in (yes, no)]
            if hidden[0] == hidden[1]:
                continue
            conditions.append(negation(atom.condition) if hidden[0] else atom.condition)
            fills.add(float(yes if hidden[0] else no))
            seen = atom.no if hidden[0] else atom.yes
            added = added.without(atom) + seen * number(factor)
            break
        else:
            return SplitBias(conditions, fills, added)


def slopes(bias: Poly, structure: Structure, sizes: MaskSizes) -> tuple[Poly, Structure] | None:
    """ALiBi: (slopes, the structure with where queries stand), where the bias is -slope · |query - key|.

    What is the same for all keys of a query changes no softmax: where keys after the query are hidden, slope · key
    is ALiBi too.
    """
    of_keys = [(m, c) for m, c in bias.terms if "k" in _axes(m)]
    atoms = {atom for m, _ in of_keys for atom, _ in m if "k" in axes_of(Poly.atom(atom))}
    if len(atoms) != 1 or not all((*atoms, 1) in m for m, _ in of_keys):
        return None
    (atom,) = atoms
    slope = Poly.of((m - {(atom, 1)}, c) for m, c in of_keys)
    constant = {x for m, c in bias.terms if (m, c) not in of_keys for x, _ in m}
    if (
        structure.chunk
        or axes_of(slope) - {"b", "h"}
        or any(isinstance(x, Select) for x in slope.atoms)
    ):
        return None
    # Any other number may be infinite, and then is not without effect.
    if not constant <= {*slope.atoms, _Q}:
        return None
    if not is_for_all_keys(number(dict(bias.terms).get(frozenset(), 0))):
        return None
    if atom == _K:
        if structure.start is None:  # from beyond all keys
            structure = replace(structure, start=sizes.poly("keys") - number(1), right=0)
        return (slope, structure) if structure.right == 0 else None
    if not isinstance(atom, Magnitude):
        return None
    start = _where_distances_begin(atom, sizes)
    moved = None if start is None else structure.moved_to(start)
    return None if moved is None else (slope * number(-1), moved)


def _where_distances_begin(distance: Magnitude, sizes: MaskSizes) -> Poly | None:
    """start in |start + q - k|."""
    kind, by = _bound(NonNegative(distance.of))
    if kind == "above" or (kind == "length" and statically_true(sizes.queries == 1)):
        return by
    return by * number(-1) if kind == "below" else None


def _axes(monomial: Iterable) -> set[str]:
    return {name for atom, _ in monomial for name in axes_of(Poly.atom(atom))}
