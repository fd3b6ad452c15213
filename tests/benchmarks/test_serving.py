"""A record of `fdattn bench serve` becomes a results file."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.results import Results
from benchmarks.serving import results_of

RUN = {"requests": 4, "new_tokens": 200, "seconds": 2.0, "tokens_per_s": 100.0}
TIMES = {"ttft_ms": {"mean": 30.0, "p50": 28.0}, "tpot_ms": {"mean": 5.0}}
RECORD = {
    "device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "command": "fdattn bench serve", "kv_dtype": "auto", "ranks": 1, "tensor_parallel": 1,
    "time": "2026-11-29T07:47:49+00:00", "shape": "Qwen3-0.6B", "dtype": "bfloat16", "limit": {"seconds": 1.0},
    "runs": {
        "torch_fdattn": [RUN | TIMES, RUN | TIMES | {"seconds": 1.6, "tokens_per_s": 125.0}],
        "nano-vllm": [RUN, RUN | {"seconds": 2.5, "tokens_per_s": 80.0}],
    },
}  # fmt: skip


def values(record: dict) -> dict[tuple[str, str], float]:
    return {(row.impl, row.metric): row.value for row in results_of(record).rows}


def test_the_better_run_counts():
    assert values(RECORD) == {
        ("fdattn", "tokens_per_s"): 125.0, ("fdattn", "of_limit"): 62.5, ("fdattn", "first_token_ms"): 30.0,
        ("fdattn", "next_token_ms"): 5.0, ("nano-vllm", "tokens_per_s"): 100.0, ("nano-vllm", "of_limit"): 50.0,
    }  # fmt: skip


def test_a_cache_of_bytes_is_named():
    assert ("fdattn/fp8_e4m3", "of_limit") in values(RECORD | {"kv_dtype": "fp8_e4m3"})


def test_the_command_writes_it(tmp_path, capsys):
    record = tmp_path / "record.json"
    record.write_text(json.dumps(RECORD))
    assert main(["serve", str(record), "--json", str(tmp_path)]) == 0
    path = tmp_path / "20261129T074749Z_H200x1_serve.json"
    assert capsys.readouterr().out.strip() == str(path)
    assert Results.load(path).meta["gpu"] == "NVIDIA H200"


def test_answers_of_one_token_have_no_next_one():
    runs = {"torch_fdattn": [RUN | TIMES | {"tpot_ms": None}]}
    assert ("fdattn", "next_token_ms") not in values(RECORD | {"runs": runs})


def test_older_records_are_refused():
    record = {name: value for name, value in RECORD.items() if name != "command"}
    with pytest.raises(ValueError, match="got one without command"):
        results_of(record)


def test_a_servers_record_is_refused():
    with pytest.raises(ValueError, match="got one of a server"):
        results_of({"url": "http://127.0.0.1:8000"})
