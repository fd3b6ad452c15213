"""Up to how many rows `dist.decode` exchanges by `fused`, and from there on by `two_shot`: both over few local keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch

from torch_fdattn.dist import decode
from torch_fdattn.dist.decode.auto import FUSED_ROWS
from torch_fdattn.tune.session import Measurement, Session

SECTION = "dist_decode"
#: Rows: batch · heads, of which a sequence has HEADS.
ROWS, HEADS, QUICK_ROWS, QUICK_HEADS = tuple(2**i for i in range(4, 14)), 16, (4, 8), 2
STRATEGIES = ("fused", "two_shot")
#: Keys a rank: few, so that the exchange is what differs.
KEYS = 64


@torch.no_grad()
def measure(session: Session) -> list[dict]:
    if not session.shares_memory(SECTION):
        return []
    times: dict[int, Mapping[str, float]] = {}
    for rows in QUICK_ROWS if session.quick else ROWS:
        if session.expired():
            session.note(f"{SECTION}: time is up at {rows} rows")
            break
        taken = _times(session, rows)
        if len(taken) == len(STRATEGIES):
            times[rows] = taken
        else:
            session.note(f"{SECTION}: a strategy failed at {rows} rows")
    if not times:
        return []
    fused_rows = crossover(times)
    for rows, taken in times.items():
        shipped, chosen = (STRATEGIES[rows > limit] for limit in (FUSED_ROWS, fused_rows))
        case = f"{session.ranks} ranks, {rows} rows"
        session.report(Measurement(SECTION, case, shipped, chosen, taken[shipped], taken[chosen]))
    return [dict(ranks=session.ranks, fused_rows=fused_rows)]


def _times(session: Session, rows: int) -> dict[str, float]:
    heads, dim = (QUICK_HEADS, 16) if session.quick else (HEADS, 128)
    made = torch.Generator(session.device).manual_seed(0)  # the same queries on all ranks
    new = partial(torch.randn, generator=made, device=session.device, dtype=session.half)
    batch = rows // heads
    q, k, v = new((batch, heads, 1, dim)), *(new((batch, heads, KEYS, dim)) for _ in range(2))
    lens = torch.full((batch,), KEYS * session.ranks, dtype=torch.int32, device=session.device)
    group = session.group.group_name
    calls = {name: [partial(decode, q, k, v, lens, group, strategy=name)] for name in STRATEGIES}
    return session.clock.compare(calls)


def crossover(times: Mapping[int, Mapping[str, float]]) -> int:
    """The rows up to which `fused` is to be taken: the limit under which the product of all times is the smallest.

    Where fused is never the slower one, nothing says how far it goes: FUSED_ROWS at least.
    """

    def cost(limit: int) -> float:
        return sum(math.log(taken[STRATEGIES[rows > limit]]) for rows, taken in times.items())

    best = min((0, *sorted(times)), key=cost)
    return max(best, FUSED_ROWS) if best == max(times) else best
