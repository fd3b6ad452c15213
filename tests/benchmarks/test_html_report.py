"""The HTML page: complete, self-contained, well formed, losses marked."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser

import pytest

from benchmarks.report.html_page import render_html
from benchmarks.results import Recorder, Results

from .test_tables import DECODE, by_hand, results

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Tags closed in order, and whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe"):
            self.fetched.append(tag)
        self.fetched += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href")
            and not (value or "#").startswith(("#", "data:"))
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(made: Results) -> str:
    page = render_html(made)
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert not checker.fetched
    assert not re.search(r"url\((?!#)|@import", page)
    return page


def test_tables_and_losses() -> None:
    page = checked(by_hand())
    assert "NVIDIA H100 80GB HBM3" in page
    assert "commit abc1234" in page
    assert "<th>% of pure read</th>" in page
    assert "<td class=lose>10.0</td><td>75</td>" in page  # fa2 is ahead
    assert "<td class=win>13.0 <small>(1.30×)</small></td><td>58</td>" in page
    assert "<td class=lose>8.00 <small>(0.80×)</small></td><td>94</td>" in page
    assert "<td>7.50 <small>(0.75×)</small></td>" in page  # a floor is no loss
    assert "Ours is slower in 2 of 4 comparisons" in page
    assert f"<td>{DECODE}</td><td>graph_us</td><td>10.0</td><td>fa2</td><td>8.00</td>" in page
    assert "RuntimeError: no | kernel" in page
    assert "budget of 5 s was spent" in page


def test_the_file_is_inside() -> None:
    made = by_hand()
    data = re.search(r"data:application/json;base64,([^\"]+)", checked(made))[1]
    assert Results.from_json(base64.b64decode(data).decode()) == made


def test_text_is_escaped() -> None:
    made = results(
        [(DECODE, "fdattn", "graph_us", 10.0)], command="python -m benchmarks decode '<b>'"
    )
    Recorder(made, None).error(DECODE, "fa2", "<script>alert(1)</script>")
    page = checked(made)
    assert "&lt;script&gt;" in page
    assert "No peer has a figure beside ours." in page


def test_plots_are_inline() -> None:
    pytest.importorskip("matplotlib")
    names = [f"B1 H32/8 N{n} D128 bf16" for n in (1024, 4096)]
    names += [f"B16 H32/8 N4096 D128 bf16 page{page}" for page in (1, 16)]
    rows = [
        (name, impl, "GBps", 1000.0 + i)
        for name in names
        for i, impl in enumerate(("fdattn", "fa3"))
    ]
    page = checked(results(rows))
    assert page.count("<svg") == 2
    assert "<metadata" not in page
    assert "<!DOCTYPE svg" not in page


def test_without_matplotlib_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = checked(results([(DECODE, "fdattn", "GBps", 10.0)]))
    assert "plots need matplotlib" in page
    assert "<svg" not in page
