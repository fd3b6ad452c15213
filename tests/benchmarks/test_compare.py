"""Two results files side by side: net changes, what got lost, and the exit status of a regression."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.report.compare import compare
from benchmarks.results import Recorder, Results

from .test_tables import DECODE, PREFILL, results

OTHER = "B8 H32/8 N1024 D128 bf16"


def decode_run(ours: float, peer: float = 13.0, host: float = 20.0, **meta: object) -> Results:
    rows = [
        (DECODE, "fdattn", "graph_us", ours),
        (DECODE, "cudnn", "graph_us", peer),
        (DECODE, "fdattn", "GBps", 1e4 / ours),
        (DECODE, "cudnn", "GBps", 1e4 / peer),
        (DECODE, "fdattn", "host_us", host),
    ]
    return results(rows, **meta)


def test_the_machine_is_divided_out() -> None:
    before = decode_run(12.0, 13.0, commit="a1")
    after = decode_run(10.0, 12.5, commit="b2")
    Recorder(after, None).add(PREFILL, "fdattn", "fwd_TFLOPs", 1.0)  # only in one file
    lines = compare(before, after).render().splitlines()
    # Ours 1.2× faster, the peer 1.04×: 1.15× is ours.
    assert f"| {DECODE} | fdattn | graph_us | 12.0 | 10.0 | 1.20× | 1.04× | 1.15× |" in lines
    assert f"| {DECODE} | cudnn | graph_us | 13.0 | 12.5 | 1.04× | – | – |" in lines
    assert f"| {DECODE} | fdattn | GBps | 833 | 1000 | 1.20× | 1.04× | 1.15× |" in lines
    assert f"| {DECODE} | fdattn | host_us | 20.0 | 20.0 | 1.00× | – | – |" in lines
    assert not any(PREFILL in line for line in lines)
    assert lines[0].startswith("a: 1 × NVIDIA H100")
    assert "commit b2" in lines[2]
    assert "Different machines" not in "\n".join(lines)


def test_different_machines_and_nothing_shared() -> None:
    one = results([(DECODE, "fdattn", "graph_us", 12.0)])
    two = results([(DECODE, "fdattn", "graph_us", 12.0)], gpu="NVIDIA H200")
    assert "**Different machines" in compare(one, two).render()
    assert "No figure of ours is in both files." in compare(one, results([])).render()


def test_regressions_are_net_and_bold() -> None:
    slow_machine = compare(decode_run(10.0, 13.0), decode_run(11.0, 14.3))
    assert slow_machine.regressions(3) == []
    slower = compare(decode_run(10.0, 13.0), decode_run(11.0, 13.0))
    assert {c.metric.name for c in slower.regressions(5)} == {"graph_us", "GBps"}
    assert slower.regressions(10) == []
    text = slower.render(5)
    assert f"| {DECODE} | fdattn | graph_us | 10.0 | 11.0 | **0.91×** | 1.00× | **0.91×** |" in text
    assert text.endswith("2 of ours slower by more than 5 %, 0 fail in b.\n")
    peer = compare(decode_run(10.0, 13.0), decode_run(10.0, 26.0))
    assert not any(change.impl == "cudnn" for change in peer.regressions(5))


def test_metrics_are_chosen() -> None:
    found = compare(decode_run(10.0), decode_run(10.0, host=40.0), ["graph_us"])
    assert {change.metric.name for change in found.changes} == {"graph_us"}
    assert not found.regressions(5)
    with pytest.raises(ValueError, match=r"--metrics must be of fwd_TFLOPs, .*, got speed"):
        compare(decode_run(1.0), decode_run(1.0), ["speed"])


def test_what_got_lost_is_listed() -> None:
    before, after = decode_run(10.0), decode_run(10.0)
    for case in (OTHER, PREFILL):
        Recorder(before, None).add(case, "fdattn", "graph_us", 10.0)
    Recorder(before, None).add(OTHER, "cudnn", "graph_us", 10.0)
    Recorder(after, None).error(OTHER, "fdattn", "first call: RuntimeError: no | kernel")
    found = compare(before, after)
    text = found.render(5)
    assert "### Ours in a, without a figure in b" in text
    reason = "error: first call: RuntimeError: no \\| kernel"
    assert f"| {OTHER} | fdattn | graph_us | {reason} |" in text
    assert f"| {PREFILL} | fdattn | graph_us | not asked for |" in text
    assert "0 of ours slower by more than 5 %, 1 fail in b." in text
    assert [row[0] for row in found.failures] == [OTHER]


@pytest.mark.parametrize(
    ("after", "options", "status"),
    [
        (decode_run(11.0), [], 0),
        (decode_run(11.0), ["--threshold", "5"], 1),
        (decode_run(11.0), ["--threshold", "10"], 0),
        (decode_run(10.0, host=40.0), ["--threshold", "10"], 1),
        (decode_run(10.0, host=40.0), ["--threshold", "10", "--metrics", "graph_us,GBps"], 0),
    ],
)
def test_exit_status(
    after: Results, options: list[str], status: int, tmp_path: Path, capsys
) -> None:
    decode_run(10.0).save(tmp_path / "a.json")
    after.save(tmp_path / "b.json")
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options]) == status
    assert "| case | impl | metric | a | b |" in capsys.readouterr().out


def test_a_call_that_fails_now_is_a_regression(tmp_path: Path, capsys) -> None:
    decode_run(10.0).save(tmp_path / "a.json")
    after = results([(DECODE, "cudnn", "graph_us", 13.0)])
    Recorder(after, None).error(DECODE, "fdattn", "first call: RuntimeError")
    after.save(tmp_path / "b.json")
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["compare", *files, "--threshold", "5"]) == 1
    assert "fail in b" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["compare", *files, "--threshold", "-1"])
    assert "--threshold must be 0 or more percent, got -1" in capsys.readouterr().err
