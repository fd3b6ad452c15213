"""Cases: names in the one format, labels, selection, and the arithmetic behind the figures."""

from __future__ import annotations

import re

import pytest

from benchmarks.cases import (
    ATTENTION_CASES,
    DECODE_CASES,
    GENERATE_CASES,
    select,
)
from benchmarks.report.baselines import BASELINES
from benchmarks.shapes import MATMUL_CASE, AttentionCase, DecodeCase, Shape, parse_name

ALL = (*ATTENTION_CASES, *DECODE_CASES, *GENERATE_CASES)


def test_names() -> None:
    names = {case.label: case.name for case in ALL}
    assert names["hd128 4k causal"] == "B4 H16/16 N4096 D128 causal bf16"
    assert names["hd64 16k full"] == "B1 H32/32 N16384 D64 full bf16"
    assert names["hd256 16k causal"] == "B1 H8/8 N16384 D256 causal bf16"
    assert names["hd128 8k causal 32/8"] == "B2 H32/8 N8192 D128 causal bf16"
    assert names["B1 H32/8 N4096"] == "B1 H32/8 N4096 D128 bf16"
    assert names["B64 H32/8 N4096 page1"] == "B64 H32/8 N4096 D128 bf16 page1"
    assert names["B32 H32/8 N32768 page16 ragged-uniform"] == (
        "B32 H32/8 N32768 D128 bf16 page16 ragged-uniform"
    )
    assert names["smollm2 prompt32 bf16"] == "B1 H9/3 N160 D64 bf16 smollm2 prompt32"


def test_names_are_unique_and_parse_back() -> None:
    for cases in (ATTENTION_CASES, DECODE_CASES, GENERATE_CASES):
        assert len({case.name for case in cases}) == len(cases)
        assert len({case.label for case in cases}) == len(cases)
    for case in ALL:
        assert parse_name(case.name).name == case.name
        assert re.fullmatch(r"B\d+ H\d+/\d+ N\d+ D\d+( \S+)+", case.name)


def test_parse_name() -> None:
    assert parse_name("B1 H32/8 N4096 D128 bf16 page16") == Shape(
        1, 32, 8, 4096, 128, ("bf16", "page16")
    )
    with pytest.raises(ValueError, match="case must look like 'B1 H32/8 N4096 D128 bf16', got 'x'"):
        parse_name("x")


def test_prefill_cases_have_16384_tokens_and_2048_channels() -> None:
    for case in ATTENTION_CASES:
        if not case.tiny:
            assert case.batch * case.seq_len == 16384
            if case.heads == case.kv_heads:
                assert case.heads * case.head_dim == 2048


def test_flops_and_bytes() -> None:
    case = AttentionCase("x", 2, 3, 1, 100, 64, causal=True)
    assert case.forward_flops == 4 * 2 * 3 * 100 * 100 * 64 / 2
    assert case.backward_flops == 2.5 * case.forward_flops
    assert AttentionCase("x", 2, 3, 1, 100, 64, causal=False).forward_flops == (
        2 * case.forward_flops
    )
    assert DecodeCase(2, 32, 8, 1000, 128, "bf16").kv_bytes == 2 * 2 * 8 * 1000 * 128 * 2
    assert DecodeCase(2, 32, 8, 1000, 128, "fp32").kv_bytes == 2 * 2 * 8 * 1000 * 128 * 4


def test_every_baseline_belongs_to_a_case() -> None:
    names = {case.name for case in ALL} | {MATMUL_CASE}
    assert {case for case, _, _ in BASELINES} <= names
    measured = {case for case, _, _ in BASELINES}
    assert {case.name for case in (*ATTENTION_CASES, *DECODE_CASES) if not case.tiny} <= measured
    assert BASELINES["B4 H16/16 N4096 D128 causal bf16", "flex", "fwd_TFLOPs"] == 365
    assert BASELINES["B1 H16/16 N16384 D128 causal bf16", "fa2", "bwd_TFLOPs"] == 313
    assert BASELINES["B1 H32/8 N4096 D128 bf16", "pure_read", "graph_us"] == 7.4
    paged = "B64 H32/8 N32768 D128 bf16 page16 ragged-power"
    assert BASELINES[paged, "flashinfer", "graph_us"] == 566
    assert BASELINES["B64 H32/8 N4096 D128 bf16 page1", "fa3", "graph_us"] == 370.4


def test_select() -> None:
    def labels(wanted: str | None, tiny_only: bool = False) -> list[str]:
        return [case.label for case in select(ATTENTION_CASES, wanted, tiny_only=tiny_only)]

    assert labels("hd128 1k") == ["hd128 1k causal"]
    assert labels("hd256, hd128 4k") == ["hd128 4k causal", "hd128 4k full", "hd256 16k causal"]
    assert labels("N8192") == ["hd128 8k causal 32/8"]
    assert labels("tiny") == ["tiny causal", "tiny full"]
    assert labels("tiny full") == ["tiny full"]
    assert labels(None) == [case.label for case in ATTENTION_CASES if not case.tiny]
    assert labels(None, tiny_only=True) == ["tiny causal", "tiny full"]
    assert not any(label.startswith("tiny") for label in labels("causal"))
    assert labels("hd64, not full") == ["hd64 4k causal", "hd64 16k causal"]
    assert labels("not full, not hd128") == [
        "hd64 4k causal",
        "hd64 16k causal",
        "hd256 16k causal",
    ]
    with pytest.raises(ValueError, match=r"--cases must match one of \[hd128 4k.*got 'hd96'"):
        labels("hd96")
    with pytest.raises(ValueError, match=r"--cases must match one of \[tiny causal, tiny full\]"):
        labels("hd128 4k", tiny_only=True)
