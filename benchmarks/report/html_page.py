"""One HTML file with everything that a results file holds: no scripts, no styles or images elsewhere.

First what it ran on and where ours is slower than a peer, then the plots (where matplotlib is
installed), then what `tables.py` shows, our losses marked, and the results file itself, to be copied out.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from ..metrics import METRICS
from ..results import Results
from .plot import inline_svg, plottable
from .tables import (
    ON_A_CPU,
    PERCENT,
    Cell,
    Table,
    machine_of,
    ours,
    peer_ratios,
    ratio_text,
    sections,
    values_of,
    versions_of,
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
    title = f"torch_fdattn: {escape(name)}"
    about = escape(f"{machine_of(results)}, {versions_of(results)}")
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{about}<br><code>{escape(str(results.meta['command']))}</code></p>",
        f"<p><strong>{ON_A_CPU}</strong></p>" if results.meta["gpu"] == "cpu" else "",
        _losses(results),
        *_plots(results),
        '<p class="note">(n×): how many times faster ours is than that one; marked where a peer is ahead of ours.</p>',
        *(_table(x) if isinstance(x, Table) else _text(x) for x in sections(results)),
        _source(results),
    ]  # fmt: skip
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _losses(results: Results) -> str:
    """Each peer that is ahead of ours anywhere; floors are ahead by definition."""
    compared, rows = 0, []
    for metric in METRICS.values():
        if metric.higher is None or metric.name == "GBps":  # which says the same as graph_us
            continue
        values = values_of(results, metric.name)
        for case, peers in peer_ratios(results, metric.name).items():
            compared += len(peers)
            own = ours(values[case])
            for peer, ratio in peers.items():
                if own is not None and ratio < 1:
                    here, there = (metric.format(values[case][x]) for x in (own, peer))
                    rows.append([case, metric.name, here, peer, there, ratio_text(ratio)])
    if not compared:
        return "<h2>Where we lose</h2>\n<p>No peer has a figure beside ours.</p>"
    text = f"Ours is slower in {len(rows)} of {compared} comparisons (case, metric, peer)."
    columns = ["case", "metric", "ours", "peer", "its figure", "our speed over its"]
    return _table(Table("Where we lose", columns, rows, text))


def _plots(results: Results) -> Iterator[str]:
    try:
        figures = [inline_svg(results, axis) for axis in plottable(results)]
    except RuntimeError as failure:
        figures = []
        yield f'<h2>Plots</h2>\n<p class="note">{escape(str(failure))}</p>'
    yield from (f"<figure>{figure}</figure>" for figure in figures)


def _source(results: Results) -> str:
    """The results file as a link that holds it."""
    data = base64.b64encode(results.to_json().encode()).decode()
    return (
        f'<h2>Data</h2>\n<p><a download="results.json" href="data:application/json;base64,{data}">'
        f"results.json</a>, from which this page was made ({len(results.rows)} rows).</p>"
    )


def _text(text: str) -> str:
    """Paragraphs of Markdown, and lists; of its marks those that `tables.py` uses."""
    if text.startswith("- "):
        entries = (f"<li>{escape(line[2:])}</li>" for line in text.splitlines())
        return f"<h2>Spread over repeats</h2>\n<ul>{''.join(entries)}</ul>"
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", f"<p>{escape(text)}</p>") if text else ""


def _table(table: Table) -> str:
    """Nothing but text is aligned as text."""
    kind = "" if any(isinstance(x, Cell) for row in table.rows for x in row) else ' class="text"'
    columns = ("% of pure read" if x == PERCENT else escape(x) for x in table.columns)
    head = "".join(f"<th>{x}</th>" for x in columns)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    note = f"<p>{escape(table.note)}</p>\n" if table.note else ""
    made = f"<table{kind}><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    return f"<h2>{escape(table.title)}</h2>\n{note}{made if table.rows else ''}"


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    kind = "lose" if cell.loses else "win" if cell.ratio is not None and cell.ratio >= 1 else ""
    ratio = f" <small>({ratio_text(cell.ratio)})</small>" if cell.ratio is not None else ""
    return f"<td{f' class={kind}' if kind else ''}>{escape(cell.text)}{ratio}</td>"
