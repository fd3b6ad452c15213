"""From the times at which tokens came to the figures of serving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_PERCENTILES = (50, 90, 99)


@dataclass
class Timing:
    """One request: when it was sent, and after which times how many of its tokens had come.

    Attributes:
        start: in seconds of one clock.
        seen: (time, tokens by then), growing.
    """

    start: float
    seen: list[tuple[float, int]] = field(default_factory=list)

    def saw(self, time: float, num_tokens: int) -> None:
        if num_tokens > (self.seen[-1][1] if self.seen else 0):
            self.seen.append((time, num_tokens))


@dataclass(frozen=True)
class TimedRun:
    """A workload once: all of its requests."""

    timings: Sequence[Timing]
    num_prompt_tokens: int

    def figures(self) -> dict[str, Any]:
        """Tokens and seconds; TTFT, TPOT and ITL in ms, each with its mean and percentiles.

        TTFT: from a request's sending to its first token. TPOT: of a request, from its first token to its
        last one over the tokens between. ITL: between tokens that came one after the other; of tokens that
        came together each has its part.
        """
        answered = [x for x in self.timings if x.seen]
        new = sum(x.seen[-1][1] for x in answered)
        start = min(x.start for x in self.timings)
        seconds = max((x.seen[-1][0] for x in answered), default=math.nan) - start
        ttft = [x.seen[0][0] - x.start for x in answered]
        tpot = [
            (x.seen[-1][0] - x.seen[0][0]) / (x.seen[-1][1] - x.seen[0][1])
            for x in answered
            if x.seen[-1][1] > x.seen[0][1]
        ]
        itl = [
            (time - before) / (count - num_before)
            for x in answered
            for (before, num_before), (time, count) in zip(x.seen, x.seen[1:], strict=False)
            for _ in range(count - num_before)
        ]
        return {
            "requests": len(answered),
            "prompt_tokens": self.num_prompt_tokens,
            "new_tokens": new,
            "seconds": seconds,
            "tokens_per_s": new / seconds,
            "requests_per_s": len(answered) / seconds,
            "ttft_ms": _summary(ttft),
            "tpot_ms": _summary(tpot),
            "itl_ms": _summary(itl),
        }


def _summary(seconds: list[float]) -> dict[str, float] | None:
    """None: nothing to take a percentile of."""
    if not seconds:
        return None
    ordered = sorted(1e3 * x for x in seconds)
    ranks = {f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in _PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks}
