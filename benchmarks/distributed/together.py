"""Steps that all ranks take or none: one that fails on any rank fails on all of them, with the reason.

Without this a rank that raised would go on to the next implementation, and the others would wait for it in
this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ..ranks import Ranks
from ..results import describe

Result = TypeVar("Result")


class StepFailed(RuntimeError):
    """Some rank's failure, raised on all.

    refused: it said that it has no such form. wrong: it computed something else than it should.
    """

    def __init__(self, reason: str, failure: str) -> None:
        super().__init__(reason)
        self.refused = failure == NotImplementedError.__name__
        self.wrong = failure == AssertionError.__name__


def together(ranks: Ranks, step: str, function: Callable[[], Result]) -> Result:
    """The function's result, if it raised nothing on any rank. What it does must not make ranks wait
    for one that raised before: a collective stands alone, or behind what all ranks raise or none.

    Raises:
        StepFailed: with the first rank's exception.
    """
    result, failure = None, None
    try:
        result = function()
    except Exception as raised:
        failure = type(raised).__name__, describe(raised)
    failures: list = [None] * ranks.size
    dist.all_gather_object(failures, failure, ranks.group)
    found = [(rank, *said) for rank, said in enumerate(failures) if said is not None]
    if found:
        rank, kind, text = found[0]
        where = "" if len(found) == ranks.size else f"rank {rank}: "
        raise StepFailed(f"{step}: {where}{text}", kind)
    return result
