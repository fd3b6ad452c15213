"""Parameters crossed by pairs: every value of each with every value of each other, not their whole product."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest


def pairwise(**values: Iterable) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with the fewest cases that greedy choice finds, the same on every run and rank."""
    given = {name: list(options) for name, options in values.items()}
    indices = itertools.product(*(range(len(options)) for options in given.values()))
    left = {case: set(itertools.combinations(enumerate(case), 2)) for case in indices}
    missing, chosen = set().union(*left.values()), []
    while missing:
        case = max(left, key=lambda case: len(left[case] & missing))
        missing -= left.pop(case)
        chosen.append(case)
    cases = [
        tuple(options[i] for options, i in zip(given.values(), case, strict=True))
        for case in sorted(chosen)
    ]
    ids = ["-".join(str(getattr(x, "__name__", x)) for x in case) for case in cases]
    return pytest.mark.parametrize(tuple(given), cases, ids=ids)
