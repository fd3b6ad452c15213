"""Which numbers an additive mask may hold, and which of them hide scores."""

from __future__ import annotations

import math

import torch

from torch_fdattn.compile_backend.graph.nodes import value
from torch_fdattn.compile_backend.graph.parameters import is_learned
from torch_fdattn.compile_backend.masks.expressions import Lookup, Monomial, Poly, Select, number
from torch_fdattn.ops.scores import MASK_LIMIT

#: What is added below this leaves no digit of a score, in float64 neither.
SWALLOWS = -1e16


def hides(fill: float, dtype: torch.dtype) -> bool:
    """-inf, or so close to the dtype's lowest number that a hidden score's weight is zero whatever the scores."""
    lowest_number = torch.finfo(dtype).min
    # float16 has no such margin: scores of some ten thousand are possible.
    return fill <= (lowest_number if dtype == torch.float16 else lowest_number / 4)


def constants(entry: Poly) -> list[float]:
    """The constants that an entry is one of; -inf and several below our ops' limit where it may be anything."""
    found = _constants(entry)
    return [-math.inf, -3 * MASK_LIMIT, -2 * MASK_LIMIT] if found is None else found


def _constants(entry: Poly) -> list[float] | None:
    if isinstance(entry.constant, (int, float)):
        return [float(entry.constant)]
    single = entry.single
    if single is None or not isinstance(single[0], Select):
        return None
    atom, factor, rest = single
    parts = [_constants(branch * number(factor) + rest) for branch in (atom.yes, atom.no)]
    return None if None in parts else parts[0] + parts[1]


def lowest(entry: Poly) -> float:
    """The lowest finite number that an additive mask may hold; -inf where it may be any.

    Of what parameters alone make no number that hides is expected: they would have learned it.
    """
    return _bounds(entry)[0]


def _bounds(entry: Poly) -> tuple[float, float]:
    """(the lowest, the highest) finite number that an entry may be."""
    low = high = 0.0
    for monomial, factor in entry.terms:
        ends = _bounds_of(monomial)
        if isinstance(factor, (int, float)) and math.isfinite(factor):
            ends = [factor * x if x else 0.0 for x in ends]  # 0 times infinity is no number
        low, high = low + min(ends), high + max(ends)
    return low, high


def _bounds_of(monomial: Monomial) -> tuple[float, float]:
    if not monomial:
        return 1.0, 1.0
    atoms = [atom for atom, _ in monomial]
    given = [x.node for x in atoms if isinstance(x, Lookup)]
    if any(value(x).is_floating_point() and not is_learned(x) for x in given):
        return -math.inf, math.inf
    if len(monomial) == 1 and isinstance(atoms[0], Select) and (atoms[0], 1) in monomial:
        ends = [
            _bounds(branch)
            for branch in (atoms[0].yes, atoms[0].no)
            if branch.constant not in (math.inf, -math.inf)
        ]
        return min((x for x, _ in ends), default=0.0), max((x for _, x in ends), default=0.0)
    if any(isinstance(x, Select) for x in atoms):
        return -math.inf, math.inf
    if given and all(map(is_learned, given)):
        return 0.0, 0.0
    # Products of indices are no numbers that swallow scores, nor are those that the call counts by.
    return SWALLOWS / 2, -SWALLOWS / 2
