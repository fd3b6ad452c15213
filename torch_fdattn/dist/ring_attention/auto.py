"""Strategy `auto`: the one that `fdattn tune` has measured to be the fastest for about as many tokens on these ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.dist.groups import is_traced
from torch_fdattn.dist.symm.availability import available
from torch_fdattn.dist.tuned import entries_on_all_ranks

AUTO, SECTION = "auto", "ring_attention"
#: Where nothing is measured: the least memory, and every mask, dtype and device.
UNMEASURED = "ring"

_log = logging.getLogger("torch_fdattn")


def choose(q: Tensor, group_name: str, world_size: int, total: int) -> str:
    """The strategy for q (B, H, S_r, D) of a sequence of `total` tokens, the same on all ranks, which all ask.

    Of a captured graph whose ranks have not asked before, and in traces, it is UNMEASURED.
    """
    if world_size == 1 or is_traced(q):
        return UNMEASURED
    entries = entries_on_all_ranks(SECTION, group_name, q)
    chosen = nearest(entries, world_size, total)
    if chosen == "one_sided" and (q.dtype == torch.float64 or not available(group_name, q.device)):
        chosen = UNMEASURED
    _log.debug("ring_attention: strategy %s for %d tokens on %d ranks", chosen, total, world_size)
    return chosen


def nearest(entries: Sequence[dict], ranks: int, total: int) -> str:
    """The strategy measured on so many ranks at the nearest number of tokens by ratio; of two as near, the larger one's."""
    measured = [pair for x in entries if x["ranks"] == ranks for pair in x["choices"]]
    if not measured or total < 1:
        return UNMEASURED
    return min(measured, key=lambda pair: (abs(math.log2(pair[0] / total)), -pair[0]))[1]
