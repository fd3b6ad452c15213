"""Chunked masks: a query sees the keys of its own chunk, i // C == j // C, mostly none of them behind it.

Where the quotient of a key is compared, what is compared are bounds of the key itself: ⌊j / C⌋ >= m is j >= C·m, and
⌊j / C⌋ <= m is j <= C·m + C - 1. So the chunk of the only query is a window from ⌊position / C⌋·C on, for a counter
on the device too; a sequence that fits into one chunk has none; and what is left, queries that each have a bound of
their own, is attention over packed sequences where all tokens are there from the first on.
"""

from __future__ import annotations

from typing import NamedTuple

from torch_fdattn.compile_backend.masks.expressions import (
    Axis,
    Condition,
    IsZero,
    NonNegative,
    Poly,
    Quotient,
    axes_of,
    both,
    conjuncts,
    non_negative,
    number,
    sort_key,
)

_Q, _K = Axis("q"), Axis("k")


class MaskPart(NamedTuple):
    """What follows from a conjunct of a mask; all such parts together are the conjunct again."""

    of: Condition  #: the conjunct
    says: Condition


def parts(condition: Condition, sizes) -> list[MaskPart]:
    """The conjuncts in order, with bounds of keys in place of bounds of quotients, less what follows from others."""
    found: list[MaskPart] = []
    for conjunct in sorted(conjuncts(condition), key=sort_key):
        says = _of_keys(conjunct)
        says = both(*(_simpler(part, sizes) for part in conjuncts(says)))
        found += [MaskPart(conjunct, part) for part in sorted(conjuncts(says), key=sort_key)]
    for part in list(found):
        others = [x.says for x in found if x is not part]
        if any(_follows(part.says, other) for other in others):
            found.remove(part)
    return found


def size_of(parts: list[MaskPart], sizes, causal: bool) -> int | None:
    """C, where the parts say of queries and keys that both begin with the first that they share a chunk, and no more.

    causal: whether keys behind the query are hidden anyway.
    """
    if (sizes.poly("queries") - sizes.poly("keys")).constant != 0 or not parts:
        return None
    for atom in _quotients(parts[0].says):
        first = Poly.atom(atom) * number(atom.by)
        begins = non_negative(Poly.atom(_K) - first)
        ends = non_negative(first + number(atom.by - 1) - Poly.atom(_K))
        says = {part.says for part in parts}
        if atom.of == Poly.atom(_Q) and (says == {begins, ends} or (causal and says == {begins})):
            return atom.by
    return None


def is_chunked(condition: Condition) -> bool:
    """Whether queries see keys by their own chunk, among other conditions."""
    return any(
        isinstance(part, NonNegative)
        and abs(part.of.coefficient(_K)) == 1
        and any(
            part.of.coefficient(atom) == -part.of.coefficient(_K) * atom.by
            and "q" in axes_of(atom.of)
            for atom in _quotients(part)
        )
        for conjunct in conjuncts(condition)
        for part in conjuncts(_of_keys(conjunct))
    )


def _quotients(condition: Condition) -> list[Quotient]:
    atoms = condition.of.atoms if isinstance(condition, (NonNegative, IsZero)) else ()
    return sorted((atom for atom in atoms if isinstance(atom, Quotient)), key=sort_key)


def _of_keys(condition: Condition) -> Condition:
    """The same, of the keys, where it is of their one quotient."""
    of_keys = [atom for atom in _quotients(condition) if "k" in axes_of(atom.of)]
    if len(of_keys) != 1:
        return condition
    (atom,) = of_keys
    sign, rest = condition.of.coefficient(atom), condition.of.without(atom)
    if abs(sign) != 1 or "k" in axes_of(rest) or atom in rest.atoms:
        return condition
    # ⌊of / by⌋ is compared with `limit`.
    limit = rest * number(-sign * atom.by)
    least = non_negative(atom.of - limit)
    most = non_negative(limit + number(atom.by - 1) - atom.of)
    if isinstance(condition, IsZero):
        return both(least, most)
    return least if sign == 1 else most


def _simpler(condition: Condition, sizes) -> Condition:
    """With numbers in place of the quotients that are the same for all entries."""
    for atom in _quotients(condition) if isinstance(condition, NonNegative) else ():
        found = _only_value(atom, sizes)
        if found is not None:
            poly = condition.of
            factor = number(poly.coefficient(atom))
            rest = poly.without(atom)
            if atom not in rest.atoms:
                condition = non_negative(rest + factor * number(found))
                return both(*(_simpler(part, sizes) for part in conjuncts(condition)))
    return condition


def _only_value(atom: Quotient, sizes) -> int | None:
    """⌊of / by⌋, where the indices in `of` are all within one chunk."""
    if not atom.of.is_made_of_indices:
        return None
    least = most = number(0)
    names = {"b": "batch", "h": "heads", "q": "queries", "k": "keys"}
    for monomial, factor in atom.of.terms:
        term = number(factor)
        if not monomial:
            least, most = least + term, most + term
            continue
        ((axis, power), *others) = monomial
        if others or power != 1:
            return None
        last = (sizes.poly(names[axis.name]) - number(1)) * term
        if factor > 0:
            most = most + last
        else:
            least = least + last
    if not isinstance(least.constant, int):
        return None
    found = least.constant // atom.by
    end = number((found + 1) * atom.by)
    return found if sizes.is_provable(most - end, lambda x: x < 0) else None


def _follows(condition: Condition, other: Condition) -> bool:
    """Whether a condition holds wherever the other does."""
    if condition == other:
        return True
    if not isinstance(condition, NonNegative) or not isinstance(other, NonNegative):
        return False
    more = condition.of - other.of
    return any(_is_what_remains(more, atom) for atom in _quotients(NonNegative(more)))


def _is_what_remains(poly: Poly, atom: Quotient) -> bool:
    """Whether it is at least of % by, or by - 1 - of % by, neither of which is ever negative."""
    factor, rest = poly.coefficient(atom), poly.without(atom)
    if factor == -atom.by:
        spare = (rest - atom.of).constant
        return isinstance(spare, int) and spare >= 0
    spare = (rest + atom.of).constant
    return factor == atom.by and isinstance(spare, int) and spare >= atom.by - 1
