"""The tables of tensor-parallel matmuls in docs/performance.md, from the newest `tp_crossover` of each machine.

Needs no torch, as all that shows results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..results import RESULTS_DIR, Results, newest
from .summary import eager_note
from .tables import values_of

_CASE = re.compile(r"tp_crossover (\w+) M(\d+) N(\d+) K(\d+) (\w+) x(\d+)")
#: Rows that the tables show, of those measured.
_ROWS = (1, 16, 128, 1024, 4096)
_TITLES = {
    "all_gather_matmul": "all-gather → matmul",
    "matmul_reduce_scatter": "matmul → reduce-scatter",
    "matmul_all_reduce": "matmul → all-reduce",
}
_PRODUCT, _EAGER, _FUSED = "gemm_alone", "eager", "torch_symm"
#: More than so much slower counts as slower: less is noise.
_SLOWER = 1.02


def section(folder: Path = RESULTS_DIR) -> str:
    found = newest(folder, "*_tp-crossover.json")
    return "\n".join(_machine(path, Results.load(path)) for path in found)


def _machine(path: Path, run: Results) -> str:
    graphs, eager = values_of(run, "graph_us"), values_of(run, "eager_us")
    parts = ["### {count} × {gpu}\n".format(**run.meta)]
    parts.append(
        "torch {torch}, triton {triton}, commit {commit}; slowest rank; µs in CUDA graphs, bold the fastest of ours, which "
        "`auto` takes; in brackets the ratio of eager torch's NCCL + BLAS to it.".format(**run.meta)
        + f" `{run.meta['command']}`; every figure, eager ones too: `benchmarks/results/{path.name}`.\n"
    )
    for op, title in _TITLES.items():
        cases = [case for case in graphs if _of(case)[0] == op and _of(case)[1] in _ROWS]
        if cases:
            parts += [*_table(title, cases, graphs), ""]
    parts.append(f"{_verdict(graphs, eager)} {eager_note([run])}".rstrip() + "\n")
    return "\n".join(parts)


def _of(case: str) -> tuple[str, int, int, int]:
    """(op, M, N, K)"""
    found = _CASE.match(case)
    return found[1], *map(int, found.groups()[1:4])


def _table(title: str, cases: list[str], graphs: Mapping) -> Iterator[str]:
    ours = list(dict.fromkeys(x for case in cases for x in graphs[case] if x.startswith("fdattn/")))
    names = [x.removeprefix("fdattn/") for x in ours]
    yield f"| {title}: M, N, K | {' | '.join(names)} | NCCL + BLAS | torch's fused | BLAS alone |"
    yield "| --- " * (len(ours) + 4) + "|"
    for case in cases:
        times = graphs[case]
        best = _best(times)
        cells = [_number(times.get(x), times[_EAGER] if x == best else None) for x in ours]
        peers = [_number(x) for x in (times.get(_EAGER), _fused(times), times.get(_PRODUCT))]
        yield f"| {', '.join(map(str, _of(case)[1:]))} | {' | '.join(cells + peers)} |"


def _best(times: Mapping[str, float]) -> str:
    return min((x for x in times if x.startswith("fdattn/")), key=times.__getitem__)


def _fused(times: Mapping[str, float]) -> float:
    return min((us for x, us in times.items() if x.startswith(_FUSED)), default=math.nan)


def _number(us: float | None, eager: float | None = None) -> str:
    if us is None or math.isnan(us):
        return "–"
    text = f"{us:.3g}" if us < 1000 else f"{us:.0f}"
    return text if eager is None else f"**{text}** ({eager / us:.2f})"


def _verdict(graphs: Mapping, eager: Mapping) -> str:
    """How often, and by how much at most, what `auto` takes is slower than the peers."""

    def slower(times_of: Mapping, peer) -> tuple[int, float, str]:
        ratios = {}
        for case, times in times_of.items():
            us = times.get(_best(graphs[case])) if case in graphs else None
            other = peer(times)
            if us is not None and not math.isnan(other):
                ratios[case] = us / other
        worst = max(ratios, key=ratios.__getitem__)
        return sum(x > _SLOWER for x in ratios.values()), ratios[worst], worst

    def told(times_of: Mapping, peer) -> str:
        count, most, case = slower(times_of, peer)
        op, *sizes = _of(case)
        return f"{count} (at most {most:.2f}: {_TITLES[op]}, {', '.join(map(str, sizes))})"

    def nccl(times: Mapping) -> float:
        return times.get(_EAGER, math.nan)

    return (
        f"Of {len(graphs)} cases so many are slower than a peer by more than {100 * (_SLOWER - 1):.0f} %: in graphs than "
        f"NCCL + BLAS {told(graphs, nccl)}, than torch's fused ops {told(graphs, _fused)}; in eager calls, one queued "
        f"after another, than NCCL + BLAS {told(eager, nccl)}, than torch's fused ops {told(eager, _fused)}."
    )
