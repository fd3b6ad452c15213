"""Queries that see no key: what they attend to is what eager makes of the numbers that hide their keys.

Of a query that sees a key, hidden keys weigh nothing, whatever hides them. Of one that sees none

    where -inf hides all, softmax gives NaN, SDPA zeros;
    where one number hides all, all values weigh the same: a fill is that number, and a score to which -3e38 is added;
    where several numbers hide, those at the highest weigh the same, and the others nothing;
    where a smaller number is added, softmax sees the digits of the scores that are left.

The last two are told as `RowLevels`: the mask's numbers less the highest of their row, which changes no softmax and
leaves all digits to the backward's lse, where the number itself would take them; and scores of zero for rows where
nothing is left of them. Gradients reach scores as they do in eager: through a sum, not through a fill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from torch_fdattn.compile_backend.graph.nodes import guarding_hint, value
from torch_fdattn.compile_backend.masks.terms import (
    ExplicitMask,
    KeepAsTensors,
    MaskTerm,
    NanGradients,
    ParsedTerm,
    RecoveredMask,
    RowLevels,
)
from torch_fdattn.compile_backend.masks.values import SWALLOWS
from torch_fdattn.compile_backend.match.operands import D
from torch_fdattn.compile_backend.report import Unsupported
from torch_fdattn.ops.scores import MASK_LIMIT

if TYPE_CHECKING:
    from torch_fdattn.compile_backend.match.attention import MatchedAttention

#: What is added above this costs lse less than scores lose to their own rounding.
HARMLESS = -64.0
#: Beyond it the head dim cannot hold the queries' second copy (`emit/mask_arguments.py`).
MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class HiddenRows:
    """Decides for one attention."""

    safe: bool  #: whether it is SDPA, which gives zeros where -inf hides all keys
    needs_gradient: bool
    sinks: bool  #: whether there are sinks, which take the weight of rows whose keys are hidden
    promised: bool = False  #: whether the caller says that there are no such rows
    filled: bool = (
        False  #: whether all that hides is one number that no gradient passes (`floors.py`)
    )

    def settle(self, mask: RecoveredMask, reads: Sequence[ParsedTerm]) -> None:
        """Where the masks were taken apart; raises `KeepAsTensors` where that loses what hides a row."""
        if self.promised:
            return
        if self.filled:
            mask.empty = "mean"
            return
        fills = {fill for read in reads for fill in read.fills}
        hiding = [read for read in reads if read.hides]
        by_sums = all(read.term.is_added for read in hiding)
        kept = [read for read in reads if read.bias is None]
        if any(map(math.isfinite, fills)):
            # Exactly so if one operation hid them, and with no sum of such numbers, or all filled in the same.
            once = len(hiding) == 1 and not hiding[0].summed
            filled = not any(read.term.is_added for read in hiding)
            # Learned slopes have a gradient of such a row too, as a mask has.
            learned = self.needs_gradient and any(read.learned for read in hiding)
            if len(fills) > 1 or learned or not (filled or once):
                raise KeepAsTensors("mask-rows")
            mask.empty = "mean"
        else:
            infinite = any(read.infinite for read in kept) or _may_overflow(kept)
            if not self.safe and (fills or infinite):
                mask.empty = "nan"
            mask.levels = self._levels(reads, kept)
            if mask.levels:  # with which no number is too low
                mask.kept = [replace(x, limited=False) for x in mask.kept]
        mask.flows = self.needs_gradient and by_sums
        mask.nans = self._nans(reads, kept)

    def all_kept(self, reads: Sequence[ParsedTerm], reason: str) -> RecoveredMask:
        """All masks as tensors."""
        if self.filled:
            raise Unsupported(
                "mask-value", "masks that are tensors, whose sums with scores are limited"
            )
        mask = RecoveredMask(reason=reason)
        filled = {fill for read in reads if not read.term.is_added for fill in read.fills}
        added = any(
            read.term.is_added and (read.hides or read.infinite or read.floor < HARMLESS)
            for read in reads
        )
        finite = any(map(math.isfinite, filled))
        mask.flows = self.needs_gradient and not filled and not self.promised
        mask.levels = self._levels(reads, reads, several=len(filled) > 1 or (added and finite))
        if mask.levels:
            mask.kept = list(mask.levels.terms)
        else:
            for read in reads:
                if not read.term.is_added and read.fills:
                    mask.kept.append(ExplicitMask(read.term))
                elif read.term.is_added and (read.hides or read.bias.terms):
                    mask.kept.append(ExplicitMask(read.term, limited=read.limited))
        if self.promised:
            return mask
        if finite and not mask.levels:
            mask.empty = "mean"
        elif not self.safe and (
            mask.levels
            or -math.inf in filled
            or any(read.infinite for read in reads)
            or sum(read.hides for read in reads) > 1  # least + least is -inf
        ):
            mask.empty = "nan"
        mask.nans = self._nans(reads, reads)
        return mask

    def _nans(self, reads: Sequence[ParsedTerm], kept: Sequence[ParsedTerm]) -> NanGradients:
        """Of all masks, where numbers among those that are kept as tensors may be -inf."""
        if not self.needs_gradient:
            return NanGradients()
        fills = {
            i: ExplicitMask(x.term) for i, x in enumerate(reads) if not x.term.is_added and x.fills
        }
        learned = [
            (ExplicitMask(read.term), tuple(fill for j, fill in fills.items() if j > i))
            for i, read in enumerate(reads)
            if read.learned
        ]
        # Data may hide a row without a word of it in the graph, and several numbers together may be -inf.
        added = [read for read in kept if read.term.is_added]
        sums = any(read.term.is_added and read.hides for read in reads)
        sums = sums or any(read.floor == -math.inf for read in added) or _may_overflow(added)
        return NanGradients(tuple(fills.values()) if sums else (), tuple(learned))

    def _levels(
        self, reads: Sequence[ParsedTerm], kept: Sequence[ParsedTerm], several: bool = False
    ) -> RowLevels | None:
        """Of all masks, where numbers among those that are kept may hide a row and leave it something.

        several: whether fills are of more than one number, or stand with what is added.
        """
        floor = min((read.floor for read in kept), default=0.0)
        needed = several or (self.needs_gradient and floor < HARMLESS) or _are_blurred(kept)
        if self.sinks or self.promised or not needed:
            return None
        filled = {x for read in reads if not read.term.is_added for x in read.fills}
        finite = [x for x in filled if math.isfinite(x)]
        swallows = max(map(_swallowing, kept), default=SWALLOWS)
        given = any(read.floor <= _swallowing(read) for read in kept)
        # No gradient flows to scores that were filled, and one does to those to which a number is added: two
        # attentions, where one row may be hidden by both.
        apart = self.needs_gradient and bool(finite) and given
        limit = max([swallows] * given + [0.99 * x for x in finite], default=None)
        limit = swallows if apart else limit
        terms = [read.term for read in reads if read.term.is_added or read.fills]
        return RowLevels(
            _in_order(terms), limit, self.needs_gradient and (apart or not finite), apart
        )


def _in_order(terms: Sequence[MaskTerm]) -> tuple[ExplicitMask, ...]:
    """Masks as they are written, each before what multiplies the scores behind it: sums may be -inf before."""
    found = []
    for term, after in zip(terms, [*(abs(x.factor) for x in terms[1:]), 1.0], strict=True):
        factor = abs(term.factor)
        plain = replace(term, factor=term.factor / factor)
        found.append(ExplicitMask(plain, fill=term.rounded(term.fill), scale=factor / after))
    return tuple(found)


def _swallowing(read: ParsedTerm) -> float:
    """What is added below it leaves nothing of a score. (float16 has steps of 32 there.)"""
    return -(2.0**15) if read.term.is_added and read.term.dtype == torch.float16 else SWALLOWS


def _are_blurred(kept: Sequence[ParsedTerm]) -> bool:
    """Whether different sums of masks may be -inf to our ops, or are -inf in eager before they are scaled."""
    far = [
        read
        for read in kept
        if read.floor <= SWALLOWS and value(read.term.node).dtype != torch.float16
    ]
    return _lowest_sum(far) < -MASK_LIMIT and not (len(far) == 1 and far[0].one_level)


def _may_overflow(kept: Sequence[ParsedTerm]) -> bool:
    """Whether sums of several masks may be -inf."""
    dtypes = [read.term.dtype for read in kept if read.term.dtype is not None]
    least = max((torch.finfo(x).min for x in dtypes), default=-math.inf)
    return len(kept) > 1 and _lowest_sum(kept) < least


def _lowest_sum(reads: Sequence[ParsedTerm]) -> float:
    """Of masks, as they are before their sum is scaled down."""
    return sum(read.floor / min(1.0, abs(read.term.factor)) for read in reads)


def check(attention: MatchedAttention) -> None:
    """Raises `Unsupported` where a gradient would need what the op cannot give."""
    mask = attention.mask
    copies = mask.levels is not None and mask.levels.needs_copies
    if attention.softcap and (copies or (mask.flows and mask.empty == "mean")):
        raise Unsupported(
            "mask-value", "sums may hide a row, and its gradient goes through a softcap"
        )
    dim = guarding_hint(attention.q.size(D))
    if copies and (dim is None or dim > MAX_HEAD_DIM):
        raise Unsupported(
            "mask-value", f"sums may hide a row, and a head dim of {dim} leaves no column for it"
        )
