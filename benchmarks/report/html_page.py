"""One HTML file with everything that a results file holds: no scripts, no styles or images elsewhere.

First what it ran on and where ours is slower than a peer, then the plots (where matplotlib is
installed), then a table for each metric with our losses marked, spreads, the check against the
baselines, what has no figure and why, and the results file itself, to be copied out.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..metrics import METRICS
from ..results import Results
from ..shapes import FLOORS
from .baselines import TOLERANCE, checks
from .plot import inline_svg, plottable
from .tables import (
    PERCENT,
    Cell,
    failure_rows,
    is_ours,
    metric_cells,
    ours,
    ratio_text,
    ratios,
    spread_lines,
    table_title,
    values_of,
)

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --lose: #d33; --win: #2a7; --soft: #8881; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 14px; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .text td, .text th { text-align: left; }
.text td:last-child { white-space: normal; }
thead th { background: var(--soft); } tbody tr:hover { background: var(--soft); }
small { opacity: .8; } .win small { color: var(--win); }
.lose { background: color-mix(in srgb, var(--lose) 18%, transparent); font-weight: 600; }
.note { opacity: .8; } figure { margin: 1rem 0; background: #fff; width: fit-content; max-width: 100%; }
figure svg { max-width: 100%; height: auto; display: block; }
"""


def write_html(results: Results, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_html(results), encoding="utf-8")
    return path


def render_html(results: Results) -> str:
    name = str(results.meta["command"]).partition("benchmarks ")[2].partition(" ")[0] or "results"
    body = "\n".join((
        _heading(results, name), _losses(results), _plots(results), _metrics(results),
        _spreads(results), _baselines(results), _failures(results), _source(results),
    ))  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>torch_fdattn: {escape(name)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _heading(results: Results, name: str) -> str:
    meta = {key: escape(str(value)) for key, value in results.meta.items()}
    text = (
        f"<h1>torch_fdattn: {escape(name)}</h1>\n<p>{meta['count']} × {meta['gpu']}, torch {meta['torch']}, "
        f"triton {meta['triton']}, commit {meta['commit']}, {meta['date']}<br><code>{meta['command']}</code></p>"
    )
    if results.meta["gpu"] == "cpu":
        text += "\n<p><strong>Measured on a CPU: shows that the machinery runs, is not a result.</strong></p>"
    return text


def _losses(results: Results) -> str:
    """Each peer that is ahead of ours anywhere; floors are ahead by definition."""
    compared, rows = 0, []
    for metric in METRICS.values():
        if metric.higher is None or metric.name == "GBps":  # which says the same as graph_us
            continue
        values = values_of(results, metric.name)
        for case, by_impl in ratios(results, metric.name).items():
            peers = {i: r for i, r in by_impl.items() if i not in FLOORS and not is_ours(i)}
            compared += len(peers)
            own = ours(values[case])
            rows += [
                [case, metric.name, metric.format(values[case][own]), peer,
                 metric.format(values[case][peer]), ratio_text(ratio)]
                for peer, ratio in peers.items() if own is not None and ratio < 1
            ]  # fmt: skip
    if not compared:
        return "<h2>Where we lose</h2>\n<p>No peer has a figure beside ours.</p>"
    text = f"<p>Ours is slower in {len(rows)} of {compared} comparisons (case, metric, peer).</p>"
    if rows:
        head = ["case", "metric", "ours", "peer", "its figure", "our speed over its"]
        text += _text_table(head, rows)
    return f"<h2>Where we lose</h2>\n{text}"


def _plots(results: Results) -> str:
    try:
        figures = [inline_svg(results, axis) for axis in plottable(results)]
    except RuntimeError as failure:
        return f'<h2>Plots</h2>\n<p class="note">{escape(str(failure))}</p>'
    if not figures:
        return ""
    return "<h2>Plots</h2>\n" + "\n".join(f"<figure>{figure}</figure>" for figure in figures)


def _metrics(results: Results) -> str:
    parts = [
        '<p class="note">(n×): how many times faster ours is than that one; marked where a peer is '
        "ahead of ours.</p>"
    ]
    for metric in METRICS.values():
        values = values_of(results, metric.name)
        if not values:
            continue
        columns, rows = metric_cells(metric, values)
        lines = [
            f"<tr><td>{escape(case)}</td>{''.join(_cell(cell) for cell in cells)}</tr>"
            for case, cells in rows
        ]
        title = table_title(metric, columns)
        parts.append(f"<h2>{escape(title)}</h2>\n{_table(columns, lines)}")
    return "\n".join(parts)


def _cell(cell: Cell) -> str:
    kind = "lose" if cell.loses else "win" if cell.ratio is not None and cell.ratio >= 1 else ""
    ratio = f" <small>({ratio_text(cell.ratio)})</small>" if cell.ratio is not None else ""
    return f"<td{f' class={kind}' if kind else ''}>{escape(cell.text)}{ratio}</td>"


def _spreads(results: Results) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in spread_lines(results))
    return f"<h2>Spread over repeats</h2>\n<ul>{items}</ul>" if items else ""


def _baselines(results: Results) -> str:
    found = checks(results)
    if not found:
        return "" if found is None else "<p>No floor or peer of this run has a baseline.</p>"
    slow = [check for check in found if not check.counts]
    text = (
        f"<h2>Baselines</h2>\n<p>{len(found) - len(slow)} of {len(found)} floors and peers are within "
        f"{100 * TOLERANCE:.0f} % of baseline or faster"
    )
    if not slow:
        return f"{text}: this run counts.</p>"
    rows = [
        [c.case, c.impl, c.metric.name, c.metric.format(c.value), c.metric.format(c.baseline),
         ratio_text(c.speed)]
        for c in slow
    ]  # fmt: skip
    head = ["case", "impl", "metric", "here", "baseline", "speed"]
    return f"{text}; the cases of these do not count:</p>\n{_text_table(head, rows)}"


def _failures(results: Results) -> str:
    rows = failure_rows(results)
    if not rows:
        return ""
    return "<h2>Without a figure</h2>\n" + _text_table(["case", "impl", "what", "why"], rows)


def _source(results: Results) -> str:
    """The results file as a link that holds it."""
    data = base64.b64encode(results.to_json().encode()).decode()
    return (
        f'<h2>Data</h2>\n<p><a download="results.json" href="data:application/json;base64,{data}">'
        f"results.json</a>, from which this page was made ({len(results.rows)} rows).</p>"
    )


def _text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"<tr>{''.join(f'<td>{escape(x)}</td>' for x in row)}</tr>" for row in rows]
    return _table(columns, lines, kind="text")


def _table(columns: Sequence[str], lines: Sequence[str], kind: str = "") -> str:
    head = "".join(
        f"<th>{'% of pure read' if column == PERCENT else escape(column)}</th>"
        for column in columns
    )
    opening = f'<table class="{kind}">' if kind else "<table>"
    body = "\n".join(lines)
    return f"{opening}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
