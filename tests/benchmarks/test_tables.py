"""Tables and comparisons of hand-made results with known ratios."""

from __future__ import annotations

import json

import pytest

from benchmarks.metrics import METRICS, metric_named
from benchmarks.report.baselines import checks
from benchmarks.report.tables import ours, peer_ratios, ratios, render, render_summary
from benchmarks.results import Recorder, Results

from .test_results import META

DECODE = "B1 H32/8 N4096 D128 bf16"
PREFILL = "B4 H16/16 N4096 D128 causal bf16"


def results(rows: list[tuple[str, str, str, float]], **meta: object) -> Results:
    recorder = Recorder(Results(META | meta), None)
    for row in rows:
        recorder.add(*row)
    return Results.from_json(recorder.results.to_json())


def by_hand() -> Results:
    made = results(
        [
            (DECODE, "pure_read", "graph_us", 7.5),
            (DECODE, "fdattn", "graph_us", 10.0),
            (DECODE, "cudnn", "graph_us", 13.0),
            (DECODE, "fa2", "graph_us", 8.0),
            (PREFILL, "fdattn", "fwd_TFLOPs", 500.0),
            (PREFILL, "cudnn", "fwd_TFLOPs", 625.0),
            (PREFILL, "flex", "fwd_TFLOPs", 400.0),
            (PREFILL, "fdattn", "max_abs_err", 0.0123),
        ]
    )
    recorder = Recorder(made, None)
    recorder.error(PREFILL, "fa2", "RuntimeError: no | kernel")
    recorder.not_measured(PREFILL, "fa3", "budget of 5 s was spent")
    return made


def test_ratios_are_speeds_whatever_the_direction() -> None:
    made = by_hand()
    assert ratios(made, "graph_us")[DECODE] == pytest.approx(
        {"pure_read": 0.75, "cudnn": 1.3, "fa2": 0.8}
    )
    assert ratios(made, "fwd_TFLOPs")[PREFILL] == pytest.approx({"cudnn": 0.8, "flex": 1.25})
    assert ratios(made, "host_us") == {}


def test_peers_without_lengths_are_compared_with_ours_without() -> None:
    made = results(
        [
            (DECODE, impl, "graph_us", value)
            for impl, value in (
                ("fdattn", 12.0), ("fdattn/full", 10.0), ("cudnn", 11.0), ("flashinfer", 15.0)
            )
        ]
    )  # fmt: skip
    assert ratios(made, "graph_us")[DECODE] == pytest.approx({"cudnn": 1.1, "flashinfer": 1.25})
    text = render(made)
    assert f"| {DECODE} | 12.0 | 10.0 | 11.0 (1.10×) | 15.0 (1.25×) |" in text
    assert "`fdattn/full` is given no lengths" in text
    assert "`fdattn/full`" not in render(by_hand())


def test_fp8_is_compared_with_fp8() -> None:
    """bf16 of ours is no peer, whichever is faster; older files have another name; errors are published."""
    rates = ("fdattn_fp8", 500.0), ("fdattn", 625.0), ("fa3_fp8", 800.0)
    made = results([(PREFILL, impl, "fwd_TFLOPs", value) for impl, value in rates])
    made.rows += results([(PREFILL, "fdattn_fp8", "rel_err", 0.02)]).rows
    assert ratios(made, "fwd_TFLOPs")[PREFILL] == pytest.approx({"fdattn": 0.8, "fa3_fp8": 0.625})
    assert peer_ratios(made, "fwd_TFLOPs")[PREFILL] == pytest.approx({"fa3_fp8": 0.625})
    text = render_summary(made)
    assert "| case | fdattn/fp8 | fdattn | fa3_fp8 |" in text
    assert f"| {PREFILL} | 500 | 625 (0.80×) | 800 (**0.62×**) |" in text
    assert "Ours is `fdattn/fp8` here" in text
    assert f"| {PREFILL} | 2.0e-02 |" in text
    assert "e-02" not in render_summary(by_hand())  # max_abs_err


def test_many_cases_without_a_figure_are_counted() -> None:
    made = results([(f"case{i}", "fdattn", "graph_us", 1.0) for i in range(6)])
    for i in range(5):
        Recorder(made, None).error(f"case{i}", "fa2", "no")
    assert "| 5 of 6, as case0 | fa2 | error | no |" in render(made)


def test_rendered_cells() -> None:
    text = render(by_hand())
    lines = text.splitlines()
    assert "### Time in a CUDA graph, cold clean L2, µs; %: of the pure read's speed" in lines
    assert "| case | fdattn | % | cudnn | % | fa2 | % | pure_read |" in lines
    assert (
        f"| {DECODE} | 10.0 | 75 | 13.0 (1.30×) | 58 | 8.00 (**0.80×**) | 94 | 7.50 (0.75×) |"
    ) in lines
    assert f"| {PREFILL} | 500 | 625 (**0.80×**) | 400 (1.25×) |" in lines
    assert f"| {PREFILL} | 1.2e-02 |" in lines
    assert f"| {PREFILL} | fa2 | error | RuntimeError: no \\| kernel |" in lines
    assert f"| {PREFILL} | fa3 | not measured | budget of 5 s was spent |" in lines
    assert "abc1234" in lines[0]
    assert "`python -m benchmarks decode`" in lines


def test_a_missing_figure_leaves_a_dash() -> None:
    other = "B8 H32/8 N1024 D128 bf16"
    made = results(
        [
            (DECODE, "fdattn", "graph_us", 10.0),
            (DECODE, "cudnn", "graph_us", 13.0),
            (other, "cudnn", "graph_us", 18.2),
        ]
    )
    assert f"| {other} | – | 18.2 |" in render(made).splitlines()
    Recorder(made, None).add(other, "pure_read", "graph_us", 9.1)
    lines = render(made).splitlines()
    assert f"| {other} | – | – | 18.2 | 50 | 9.10 |" in lines
    assert f"| {DECODE} | 10.0 | – | 13.0 (1.30×) | – | – |" in lines


def test_cases_without_a_figure_for_one_reason_share_a_row() -> None:
    recorder = Recorder(results([(DECODE, "fdattn", "graph_us", 10.0)]), None)
    for case in (DECODE, PREFILL):
        recorder.error(case, "fa3", "not available: no wheel")
    recorder.error(PREFILL, "fa2", "no kernel")
    recorder.add("B8 H32/8 N1024 D128 bf16", "fdattn", "graph_us", 10.0)
    lines = render(recorder.results).splitlines()
    assert f"| {DECODE}, {PREFILL} | fa3 | error | not available: no wheel |" in lines
    assert f"| {PREFILL} | fa2 | error | no kernel |" in lines
    recorder.error("B8 H32/8 N1024 D128 bf16", "fa3", "not available: no wheel")
    assert "| all 3 | fa3 | error | not available: no wheel |" in render(recorder.results)


def test_spread_is_summed_up() -> None:
    recorder = Recorder(Results(dict(META)), None)
    for impl, spread in (("fdattn", 0.01), ("cudnn", 0.03), ("fa2", 0.002)):
        recorder.add_sample(DECODE, impl, "graph_us", 10.0, spread)
    line = f"- graph_us: spread over repeats 1.0 % in the middle, 3.0 % at most ({DECODE}, cudnn)"
    assert line in render(recorder.results).splitlines()


def test_ours() -> None:
    assert ours(["cudnn", "fdattn/auto", "fdattn"]) == "fdattn"
    assert ours(["fdattn/all_gather", "fdattn/auto"]) == "fdattn/auto"
    assert ours(["nccl", "fdattn/all_gather"]) == "fdattn/all_gather"
    assert ours(["cudnn", "fdattn2"]) is None


def test_a_run_counts_within_eight_percent_of_baseline() -> None:
    good = results(
        [
            (DECODE, "pure_read", "graph_us", 7.4 * 1.08),
            (DECODE, "cudnn", "graph_us", 9.0),  # faster counts
            (PREFILL, "flex", "fwd_TFLOPs", 365 * 0.93),
            (PREFILL, "fdattn", "fwd_TFLOPs", 1.0),  # ours is not a baseline
        ]
    )
    assert [check.counts for check in checks(good)] == [True, True, True]
    assert "This run counts: 3 floors and peers within 8 % of baseline." in render(good)

    bad = results(
        [
            (DECODE, "cudnn", "graph_us", 13.2 * 1.1),
            (PREFILL, "flex", "fwd_TFLOPs", 365 * 0.9),
            (PREFILL, "fa2", "fwd_TFLOPs", 300.0),
        ]
    )
    assert [check.counts for check in checks(bad)] == [False, False, True]
    text = render(bad)
    assert "2 of 3 floors and peers over 8 % slower than baseline" in text
    assert f"| {PREFILL} | flex | fwd_TFLOPs | 328 | 365 | 0.90× |" in text


def test_other_gpus_have_no_baselines() -> None:
    rows = [(DECODE, "cudnn", "graph_us", 99.0)]
    assert checks(results(rows, gpu="NVIDIA H200")) is None
    assert "No baselines for this GPU." in render(results(rows, gpu="NVIDIA H200"))
    text = render(results(rows, gpu="cpu"))
    assert "is not a result" in text
    assert "baseline" not in text


def test_figures_keep_the_digits_that_matter() -> None:
    time = METRICS["graph_us"]
    assert [time.format(x) for x in (0.1234, 7.456, 13.26, 1365.4)] == [
        "0.123", "7.46", "13.3", "1365",
    ]  # fmt: skip
    assert metric_named("graph_us_spread").unit == "percent"
    with pytest.raises(ValueError, match="must be a speed or a time to form a ratio"):
        METRICS["max_abs_err"].speedup(1.0, 2.0)


def test_a_file_made_by_hand_reads_like_one_of_ours() -> None:
    row = {"case": DECODE, "impl": "fdattn", "metric": "graph_us", "value": 10, "unit": "us"}
    text = json.dumps({"meta": META, "rows": [row]})
    assert "| 10.0 |" in render(Results.from_json(text))
