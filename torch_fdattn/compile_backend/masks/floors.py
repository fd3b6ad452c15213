"""Scores that are limited from below by a number that hides (`clamp(min=finfo.min)`, `max`) once they are masked.

Of a query that sees a key this changes nothing. Of one that sees none all hidden keys are at that number: -inf too,
to which no gradient flows then. A number that is added and leaves nothing of a score is that number already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from torch_fdattn.compile_backend.masks.expressions import both
from torch_fdattn.compile_backend.masks.structure import MaskSizes, structured
from torch_fdattn.compile_backend.masks.terms import Floor, ParsedTerm
from torch_fdattn.compile_backend.masks.values import SWALLOWS, lowest
from torch_fdattn.compile_backend.report import Unsupported


def may_hide(read: ParsedTerm) -> bool:
    """Whether numbers that the call is given are added, which may hide what the graph does not say."""
    return read.term.is_added and read.bias is not None and lowest(read.bias) <= SWALLOWS


def is_of_no_effect(reads: Sequence[ParsedTerm], sizes: MaskSizes) -> bool:
    """Whether every query is known to see a key."""
    if any(read.bias is None for read in reads):
        return False
    structure = structured(both(*(read.condition for read in reads)), sizes, True)
    return not structure.rest and structure.is_never_empty(sizes)


def limited(
    reads: Sequence[ParsedTerm], floor: Floor, needs_gradient: bool
) -> list[ParsedTerm] | None:
    """What masks are with that limit; None where they are so without it; raises `Unsupported`."""
    hiding = [read for read in reads if read.hides]
    if not hiding:
        return None
    infinite = all(read.fills == {-math.inf} for read in hiding)
    if floor.dtype == torch.float16 and not infinite:  # whose least number leaves digits of a score
        raise Unsupported("mask-value", "float16 scores of a row that is hidden are limited")
    if any(read.bias is None for read in reads):
        (read, *others) = hiding
        if needs_gradient or others or len(reads) > 1 or not read.term.is_added:
            raise Unsupported("mask-value", "a mask from data, whose sums with scores are limited")
        term = replace(read.term, floor=floor.number / read.term.factor)
        if read.term.factor <= 0:
            raise Unsupported("mask-value", "a mask that is subtracted, and its difference limited")
        return [replace(read, term=term, infinite=False, floor=floor.number)]
    fills = {fill for read in hiding for fill in read.fills}
    if any(fill > floor.number for fill in fills):
        raise Unsupported("mask-value", f"scores are hidden by more than {floor.number:g}")
    added = [read for read in hiding if read.term.is_added]
    if needs_gradient and added and fills != {-math.inf}:
        alone = len(hiding) == 1 and not hiding[0].summed and fills == {floor.number}
        if not alone or floor.halves_ties:
            raise Unsupported(
                "mask-value", "which scores of a row that is hidden have a gradient is not known"
            )
        return None
    return [replace(x, fills=frozenset({floor.number})) if x.fills else x for x in reads]
