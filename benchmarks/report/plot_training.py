"""Loss curves over steps, all ways to attend in one plot, and their distance to torch's below it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ..results import Results
from .tables import in_order, is_ours, values_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CASE = re.compile(r"(.*) step (\d+)")
_BASE = "sdpa"


def curves(results: Results) -> tuple[str, dict[str, dict[int, float]]]:
    """(what was trained, loss by implementation and step); of several seeds the first."""
    title, found = "", {}
    for case, by_impl in values_of(results, "train_loss").items():
        match = _CASE.fullmatch(case)
        title = title or match[1]
        if match[1] != title:
            continue
        for impl, loss in by_impl.items():
            found.setdefault(impl, {})[int(match[2])] = loss
    return title, {impl: found[impl] for impl in in_order(found)}


def draw(figure: Figure, results: Results) -> None:
    title, found = curves(results)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    differ = False
    for index, (impl, losses) in enumerate(found.items()):
        style = dict(color=f"C{index}", linewidth=2.2 if is_ours(impl) else 1.2)
        dashes = (0, (4, 2 * index)) if index else "-"  # curves that lie on each other all show
        above.plot(list(losses), list(losses.values()), label=impl, linestyle=dashes, **style)
        if impl != _BASE and _BASE in found:
            apart = [abs(loss - found[_BASE][step]) or math.nan for step, loss in losses.items()]
            below.plot(list(losses), apart, **style)
            differ |= not all(map(math.isnan, apart))
    above.set_ylabel("loss, nats a byte")
    above.set_title(f"Training, {title}")
    above.legend()
    below.set_ylabel(f"|loss - {_BASE}'s|")
    below.set_xlabel("step")
    below.set_yscale("log" if differ else "linear")
    for axes in (above, below):
        axes.grid(alpha=0.3)
