"""The results file: schema, where it goes, and what it says about the run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.results import (
    Recorder,
    Results,
    Row,
    command_line,
    commit,
    describe,
    file_name,
    output_path,
)

META = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "count": 1,
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "commit": "abc1234",
    "command": "python -m benchmarks decode",
    "date": "2026-01-31T23:59:58Z",
}
CASE = "B1 H32/8 N4096 D128 bf16"


def row(**changes: object) -> dict[str, object]:
    values = {"case": CASE, "impl": "fdattn", "metric": "graph_us", "value": 12.5, "unit": "us"}
    return values | changes


def document(*rows: dict[str, object], **meta: object) -> str:
    return json.dumps({"meta": META | meta, "rows": list(rows)})


def test_a_run_that_is_stopped_says_what_is_missing(tmp_path: Path) -> None:
    recorder = Recorder(Results(dict(META)), tmp_path / "run.json")
    recorder.expect(["first", "second"], ["fdattn", "fa2"])
    recorder.add("first", "fdattn", "graph_us", 12.0)
    recorder.came("first")
    recorder.save()
    missing = [(row.case, row.impl) for row in Results.load(recorder.path).rows if row.metric == "not_measured"]  # fmt: skip
    assert missing == [("second", "fdattn"), ("second", "fa2")]
    recorder.came("second", "fdattn")
    recorder.error("second", "fa2", "it failed")  # which is said instead
    recorder.save()
    assert Results.load(recorder.path) == recorder.results
    recorder.came("second")
    recorder.save()
    assert Results.load(recorder.path) == recorder.results


def test_round_trip(tmp_path: Path) -> None:
    recorder = Recorder(Results(dict(META)), tmp_path / "new" / "run.json")
    recorder.add_sample(CASE, "fdattn", "graph_us", 12.3456789, 0.0213)
    recorder.error(CASE, "fa3", "ImportError: no flash_attn_interface")
    recorder.not_measured(CASE, "fa2", "budget of 10 s was spent")
    recorder.save()

    loaded = Results.load(tmp_path / "new" / "run.json")
    assert loaded == recorder.results
    assert loaded.rows == [
        Row(CASE, "fdattn", "graph_us", 12.3457, "us"),
        Row(CASE, "fdattn", "graph_us_spread", 2.13, "percent"),
        Row(CASE, "fa3", "error", "ImportError: no flash_attn_interface", "text"),
        Row(CASE, "fa2", "not_measured", "budget of 10 s was spent", "text"),
    ]
    raw = json.loads((tmp_path / "new" / "run.json").read_text(encoding="utf-8"))
    assert list(raw) == ["meta", "rows"]
    assert list(raw["meta"]) == ["gpu", "count", "torch", "triton", "commit", "command", "date"]
    assert list(raw["rows"][0]) == ["case", "impl", "metric", "value", "unit"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "results must have the keys meta and rows, got list"),
        (json.dumps({"meta": META}), r"results must have the keys meta and rows, got \['meta'\]"),
        (document(host="here"), r"meta must have the keys .*'host'"),
        (document(count="1"), "meta.count must be int, got '1'"),
        (document(gpu=None), "meta.gpu must be str, got None"),
        (document(date="2026-01-31 23:59"), "meta.date must be UTC like"),
        (document(row(note="x")), r"rows\[0\] must have the keys"),
        (document(row(), row(impl="")), r"rows\[1\].impl must be a non-empty string, got ''"),
        (document(row(value="12")), r"rows\[0\].value must be a finite number, got '12'"),
        (document(row(value=float("nan"))), r"rows\[0\].value must be a finite number, got nan"),
        (document(row(value=True)), r"rows\[0\].value must be a finite number, got True"),
        (document(row(unit="ms")), r"rows\[0\].unit must be 'us' for graph_us, got 'ms'"),
        (document(row(metric="speed")), "metric must be one of .*, got 'speed'"),
        (document(row(metric="error", value=3)), r"rows\[0\] must have a text value"),
    ],
)
def test_schema_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Results.from_json(text)


def test_an_older_file_s_implementations_have_their_names_of_today() -> None:
    old = Results.from_json(document(row(impl="fdattn/gemm_epilogue")))
    assert [x.impl for x in old.rows] == ["fdattn/gemm_all_reduce"]


def test_a_value_that_is_no_number_becomes_an_error_row() -> None:
    recorder = Recorder(Results(dict(META)), None)
    recorder.add(CASE, "fdattn", "max_abs_err", float("nan"))
    assert recorder.results.rows == [
        Row(CASE, "fdattn", "error", "max_abs_err: measured nan", "text")
    ]


def test_describe_is_one_short_line() -> None:
    assert describe(ValueError("\n first \n second")) == "ValueError: first"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"
    long = describe(RuntimeError("x" * 1000))
    assert len(long) == 240
    assert long.endswith("...")


def test_file_names(tmp_path: Path) -> None:
    name = "20260131T235958Z_H100-80GB-HBM3x1_decode.json"
    assert file_name(META, "decode") == name
    assert output_path(None, META, "decode").parts[-3:] == ("benchmarks", "results", name)
    assert output_path(str(tmp_path), META, "decode") == tmp_path / name
    assert output_path(str(tmp_path / "x.json"), META, "decode") == tmp_path / "x.json"
    assert output_path(None, META | {"gpu": "cpu"}, "decode") is None


def test_command_names_no_folder_of_this_machine() -> None:
    words = ["decode", "--cases", "B1 H32/8", "--json", "/a/b/run.json", "--peers-dir=/c/peers/"]
    assert command_line(words) == (
        "python -m benchmarks decode --cases 'B1 H32/8' --json run.json --peers-dir=peers"
    )
    assert command_line(["generate"], 2) == "torchrun --nproc-per-node 2 -m benchmarks generate"


def test_commit_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FDATTN_COMMIT", raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")

    assert commit(tmp_path) == head
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "run.json").write_text("{}")
    assert commit(tmp_path) == head
    (tmp_path / "a.py").write_text("2")
    assert commit(tmp_path) == head + "+dirty"


def test_commit_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("TORCH_FDATTN_COMMIT", raising=False)
    assert commit(tmp_path) == "unknown"
    monkeypatch.setenv("TORCH_FDATTN_COMMIT", "abc1234+dirty")
    assert commit(tmp_path) == "abc1234+dirty"
    # A copy inside some other repository is not that repository's commit.
    git(tmp_path, "init", "-q")
    (tmp_path / "copy").mkdir()
    assert commit(tmp_path / "copy") == "abc1234+dirty"


def git(root: Path, *arguments: str) -> str:
    who = {
        f"GIT_{role}_{what}": "test@example.com"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True, text=True, check=True, env=os.environ | who | alone,
    )  # fmt: skip
    return done.stdout.strip()
