"""Traces of decode calls: Chrome's JSON with named ranges, on a CPU; and the host time by parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import host
from benchmarks.__main__ import main
from benchmarks.cases import DECODE_CASES, select
from benchmarks.peers import OURS
from benchmarks.profiling import CALLS, named_range, trace_decode
from benchmarks.results import Results, Row
from benchmarks.timing import Timer

from .test_results import META
from .test_runner import Peer, rows, run_with

CASES = select(DECODE_CASES, "tiny", tiny_only=True)


def ranges(path: Path) -> list[dict]:
    document = json.loads(path.read_text(encoding="utf-8"))
    found = [e for e in document["traceEvents"] if e.get("cat") == "user_annotation"]
    return sorted((e for e in found if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))


def test_a_trace_has_every_call_in_its_ranges(tmp_path: Path) -> None:
    run = run_with(OURS, Peer(), Peer(reason="no wheel"))
    assert trace_decode(run, CASES, tmp_path / "new" / "trace.json") == 2 * len(CASES)
    found = ranges(tmp_path / "new" / "trace.json")
    expected = []
    for case in CASES:
        expected.append(case.name.replace("/", ":"))
        for impl in ("fdattn", "peer"):
            expected += [impl, *(f"{impl} call {i}" for i in range(CALLS))]
    assert [event["name"] for event in found] == expected
    cases = [event for event in found if event["name"] in (c.name.replace("/", ":") for c in CASES)]
    assert cases[0]["ts"] + cases[0]["dur"] < cases[1]["ts"]  # sessions line up in one time
    document = json.loads((tmp_path / "new" / "trace.json").read_text(encoding="utf-8"))
    assert "host_name" not in document
    assert document["otherData"]["commit"] == "abc1234"
    ops = {event["name"] for event in document["traceEvents"]}
    assert "fdattn::decode" in ops


def test_an_implementation_that_fails_is_left_out_of_the_trace(tmp_path: Path, capsys) -> None:
    run = run_with(OURS, Peer(fails_at=1))
    assert trace_decode(run, CASES[:1], tmp_path / "trace.json") == 1
    assert "peer not traced: RuntimeError: call 1 fell over" in capsys.readouterr().err


def test_a_lost_device_ends_the_trace_but_keeps_it(tmp_path: Path, capsys) -> None:
    class Losing(Timer):
        def synchronize(self) -> None:
            if peer.calls > 5:
                raise RuntimeError("an illegal memory access was encountered")

    peer = Peer(fails_at=6)  # after the first case's two and three
    run = run_with(OURS, peer, timer=Losing(torch.device("cpu")))
    assert trace_decode(run, CASES, tmp_path / "trace.json") == 2
    assert "trace ends here: DeviceLost" in capsys.readouterr().err
    names = [event["name"] for event in ranges(tmp_path / "trace.json")]
    assert names[0] == CASES[0].name.replace("/", ":")


def test_the_command_writes_results_page_and_trace(tmp_path: Path, capsys) -> None:
    files = {name: str(tmp_path / f"run.{name}") for name in ("json", "html", "trace")}
    words = ["decode", "--device", "cpu", "--vs", "eager,fa3,flashinfer", "--repeats", "1"]
    words += ["--sweep", "page,dtype", *(w for name, f in files.items() for w in (f"--{name}", f))]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "Trace of 8 implementations of cases" in captured.err
    assert "Largest error of the output against fp64" in captured.out
    results = Results.load(files["json"])
    found = {(row.case, row.impl) for row in results.rows if row.metric == "max_abs_err"}
    assert ("B2 H4/2 N64 D32 fp32 page16", "eager") in found
    assert ("B2 H4/2 N64 D32 fp32 kv-int8", "fdattn") in found
    missing = {row.impl for row in results.rows if row.metric == "error"}
    assert missing == {"fa3", "flashinfer"}
    assert "<!doctype html>" in Path(files["html"]).read_text(encoding="utf-8")
    assert str(tmp_path) not in Path(files["trace"]).read_text(encoding="utf-8")


def test_named_ranges_have_no_slash() -> None:
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=on_cpu) as profiler, named_range("B1 H32/8"):
        torch.zeros(1)
    assert "B1 H32:8" in {event.key for event in profiler.key_averages()}


def test_host_time_by_parts() -> None:
    run = run_with()
    host.measure(run, CASES[:1])
    found = {row.impl: row.value for row in rows_of(run, "host_us")}
    assert set(found) == {"fdattn", "fdattn/plan", "fdattn/plan-out", "op", "empty_op"}
    assert found["empty_op"] < found["fdattn/plan-out"]
    assert all(value > 0 for value in found.values())
    assert not rows(run, "fdattn", "error")


def test_the_parts_of_host_time_add_up() -> None:
    times = {"fdattn": 30.0, "fdattn/plan": 14.0, "fdattn/plan-out": 8.0, "empty_op": 2.0}
    made = Results(META, [Row("case", impl, "host_us", us, "us") for impl, us in times.items()])
    lines = [line.split("|")[2:4] for line in host.table(made).splitlines() if line[:2] == "| "]
    found = [[word.strip() for word in line] for line in lines[2:]]
    assert found == [
        ["16.0", "53"], ["6.0", "20"], ["8.0", "27"], ["**30.0**", "**100**"], ["2.0", "7"],
    ]  # fmt: skip


def test_the_host_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--device", "cpu", "--repeats", "2"]) == 0
    assert "| **the whole call** |" in capsys.readouterr().out


def rows_of(run, metric: str) -> list:
    return [row for row in run.recorder.results.rows if row.metric == metric]
