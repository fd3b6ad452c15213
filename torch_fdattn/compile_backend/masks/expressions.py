"""What one entry of a mask is: numbers and conditions over (batch, head, query, key), sizes and tensors' entries.

Numbers are polynomials, so that `arange(n)[None] - arange(n)[:, None]` and `k - q` are one thing. Sizes that are
symbols stand in the coefficients. Conditions are conjunctions and the like of "this polynomial is at least 0".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass

import sympy
from torch.fx import Node

#: A coefficient: a number, or a sympy expression over the graph's sizes.
Coefficient = int | float | sympy.Expr


@dataclass(frozen=True)
class Axis:
    """The index of the entry in one dimension of the scores: "b", "h", "q" or "k"."""

    name: str


@dataclass(frozen=True)
class Lookup:
    """An entry of a tensor that the graph holds, and that is not looked into."""

    node: Node
    index: tuple[Poly, ...]


@dataclass(frozen=True)
class Quotient:
    """⌊of / by⌋ of integers."""

    of: Poly
    by: int


@dataclass(frozen=True)
class Magnitude:
    of: Poly


@dataclass(frozen=True)
class Select:
    """`yes` where the condition holds, else `no`."""

    condition: Condition
    yes: Poly
    no: Poly


Atom = Axis | Lookup | Quotient | Magnitude | Select
#: A product of atoms with their powers; the empty one is 1.
Monomial = frozenset


@dataclass(frozen=True)
class Poly:
    terms: frozenset[tuple[Monomial, Coefficient]]

    @staticmethod
    def of(terms: Iterable[tuple[Monomial, Coefficient]]) -> Poly:
        sums: dict[Monomial, Coefficient] = {}
        for monomial, factor in terms:
            sums[monomial] = sums.get(monomial, 0) + factor
        expanded = ((m, _plain(c)) for m, c in sums.items())
        return Poly(frozenset((m, c) for m, c in expanded if c != 0))

    @staticmethod
    def atom(atom: Atom) -> Poly:
        return Poly(frozenset({(frozenset({(atom, 1)}), 1)}))

    def __add__(self, other: Poly) -> Poly:
        return Poly.of([*self.terms, *other.terms])

    def __sub__(self, other: Poly) -> Poly:
        return self + other * number(-1)

    def __mul__(self, other: Poly) -> Poly:
        return Poly.of((_times(m, n), c * d) for m, c in self.terms for n, d in other.terms)

    @property
    def constant(self) -> Coefficient | None:
        """Its value, where it depends on nothing but sizes."""
        if not self.terms:
            return 0
        ((monomial, factor), *more) = self.terms
        return factor if not more and not monomial else None

    def coefficient(self, atom: Atom) -> Coefficient:
        """Of the atom alone, to the first power."""
        return dict(self.terms).get(frozenset({(atom, 1)}), 0)

    def without(self, *atoms: Atom) -> Poly:
        """Less the terms that are one of these atoms alone."""
        gone = {frozenset({(atom, 1)}) for atom in atoms}
        return Poly(frozenset((m, c) for m, c in self.terms if m not in gone))

    @property
    def atoms(self) -> set[Atom]:
        return {atom for monomial, _ in self.terms for atom, _ in monomial}

    @property
    def is_made_of_indices(self) -> bool:
        """Whether it is a sum of indices, which are at least 0, times integers."""
        return all(
            isinstance(c, int) and all(isinstance(x, Axis) for x, _ in m) for m, c in self.terms
        )

    @property
    def single(self) -> tuple[Atom, Coefficient, Poly] | None:
        """(atom, its factor, the rest) of a polynomial with one `Select` or `Magnitude`, to the first power."""
        found = [
            (atom, monomial)
            for monomial, _ in self.terms
            for atom, _ in monomial
            if isinstance(atom, (Select, Magnitude))
        ]
        if len(found) != 1 or found[0][1] != frozenset({(found[0][0], 1)}):
            return None
        atom = found[0][0]
        return atom, self.coefficient(atom), self.without(atom)


def sort_key(x: object) -> str:
    """A key to sort by, equal in all processes. `repr` is not: sets are in the order of hashes, which are random.

    Graphs that depended on it would miss torch's caches, and differ between ranks.
    """
    if isinstance(x, frozenset):
        return f"frozenset({{{', '.join(sorted(map(sort_key, x)))}}})"
    if isinstance(x, tuple):
        return f"({', '.join(map(sort_key, x))})"
    if is_dataclass(x):
        values = ", ".join(
            f"{field.name}={sort_key(getattr(x, field.name))}" for field in fields(x)
        )
        return f"{type(x).__name__}({values})"
    return repr(x)


def number(value: Coefficient) -> Poly:
    return Poly.of([(frozenset(), value)])


def _plain(factor: Coefficient) -> Coefficient:
    if not isinstance(factor, sympy.Expr):
        return factor
    factor = sympy.expand(factor)
    return int(factor) if factor.is_Integer else factor


def _times(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
    return frozenset(powers.items())


@dataclass(frozen=True)
class NonNegative:
    """Of integers."""

    of: Poly


@dataclass(frozen=True)
class IsZero:
    """Of integers."""

    of: Poly


@dataclass(frozen=True)
class Holds:
    """A boolean entry of a tensor."""

    of: Lookup


@dataclass(frozen=True)
class Both:
    parts: frozenset[Condition]


@dataclass(frozen=True)
class Either:
    parts: frozenset[Condition]


@dataclass(frozen=True)
class Not:
    of: IsZero | Holds


Condition = NonNegative | IsZero | Holds | Both | Either | Not
TRUE, FALSE = Both(frozenset()), Either(frozenset())


def both(*parts: Condition) -> Condition:
    return _joined(Both, parts, FALSE)


def either(*parts: Condition) -> Condition:
    return _joined(Either, parts, TRUE)


def _joined(kind: type, parts: tuple[Condition, ...], absorbing: Condition) -> Condition:
    flat: set[Condition] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, kind) else {part}
    if absorbing in flat:
        return absorbing
    return next(iter(flat)) if len(flat) == 1 else kind(frozenset(flat))


def negation(condition: Condition) -> Condition:
    if isinstance(condition, NonNegative):
        return non_negative(number(-1) - condition.of)
    if isinstance(condition, Both):
        return either(*map(negation, condition.parts))
    if isinstance(condition, Either):
        return both(*map(negation, condition.parts))
    return condition.of if isinstance(condition, Not) else Not(condition)


def non_negative(poly: Poly) -> Condition:
    """poly >= 0, of integers."""
    value = poly.constant
    if isinstance(value, (int, float)):
        return TRUE if value >= 0 else FALSE
    if poly.is_made_of_indices:
        signs = {c > 0 for _, c in poly.terms}
        if signs == {True}:
            return TRUE
        if signs == {False} and dict(poly.terms).get(frozenset(), 0) < 0:
            return FALSE
    found = poly.single
    if found is None:
        return NonNegative(poly)
    atom, factor, rest = found
    if isinstance(atom, Magnitude):
        if factor != -1:
            return NonNegative(poly)
        return both(non_negative(rest - atom.of), non_negative(rest + atom.of))  # |x| <= rest
    return select(atom, lambda branch: non_negative(branch * number(factor) + rest))


def is_zero(poly: Poly) -> Condition:
    value = poly.constant
    if isinstance(value, (int, float)):
        return TRUE if value == 0 else FALSE
    found = poly.single
    if found is None or isinstance(found[0], Magnitude):
        return IsZero(poly)
    atom, factor, rest = found
    return select(atom, lambda branch: is_zero(branch * number(factor) + rest))


def select(atom: Select, test) -> Condition:
    """test(value) as a condition."""
    yes, no = test(atom.yes), test(atom.no)
    return either(both(atom.condition, yes), both(negation(atom.condition), no))


def as_number(condition: Condition) -> Poly:
    """1 where it holds, else 0."""
    return choice(condition, number(1), number(0))


def choice(condition: Condition, yes: Poly, no: Poly) -> Poly:
    if condition == TRUE or yes == no:
        return yes
    return no if condition == FALSE else Poly.atom(Select(condition, yes, no))


def conjuncts(condition: Condition) -> list[Condition]:
    return list(condition.parts) if isinstance(condition, Both) else [condition]


def atoms_of(expression: Poly | Condition) -> Iterator[Atom]:
    """All atoms, those inside of others too."""
    if isinstance(expression, (Both, Either)):
        for part in expression.parts:
            yield from atoms_of(part)
        return
    if isinstance(expression, Holds):
        found = {expression.of}
    elif isinstance(expression, Poly):
        found = expression.atoms
    else:
        yield from atoms_of(expression.of)
        return
    for atom in found:
        yield atom
        inside = {
            Lookup: lambda x: x.index,
            Quotient: lambda x: (x.of,),
            Magnitude: lambda x: (x.of,),
            Select: lambda x: (x.condition, x.yes, x.no),
            Axis: lambda x: (),
        }[type(atom)](atom)
        for each in inside:
            yield from atoms_of(each)


def axes_of(expression: Poly | Condition) -> set[str]:
    """Which of "bhqk" it depends on."""
    return {atom.name for atom in atoms_of(expression) if isinstance(atom, Axis)}
