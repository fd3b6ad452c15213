"""Attention of CPU tensors: every kind gives figures, and one that is wrong gives a reason."""

import pytest
import torch

from benchmarks import cpu
from benchmarks.cases import CPU_CASES, select
from benchmarks.results import Recorder, Results
from benchmarks.runner import Budget, Run
from benchmarks.timing import Timer

from .test_results import META

TINY = select(CPU_CASES, "tiny", tiny_only=True)


def figures(case) -> dict[tuple[str, str], object]:
    recorder = Recorder(Results(META | {"gpu": "cpu"}), None)
    run = Run(Timer(torch.device("cpu")), recorder, (), 1, Budget(None))
    run.cases([case], lambda case, _: cpu.measure(run, case))
    return {(row.impl, row.metric): row.value for row in recorder.results.rows}


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    """Its own time is not what is tested here; every call is sampled once."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda fn, backend="inductor", **options: compiled(
            fn,
            backend="fdattn" if backend == "fdattn" else "eager",
            options={"lower": "eager"} if backend == "fdattn" else None,
            **options,
        ),
    )
    monkeypatch.setattr(cpu, "SAMPLE_US", 1.0)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.kind)
def test_every_kind(case) -> None:
    found = figures(case)
    assert not [key for key in found if key[1] in ("error", "not_measured")], found
    pairs = {(name, "eager_us") for name in ("sdpa", "fdattn")}
    pairs |= {(name, "compiled_us") for name in ("inductor", "fdattn")}
    if case.kind in ("varlen", "paged"):
        pairs.add(("fdattn_op", "compiled_us"))
    if case.queries > 1:
        pairs |= {(name, "step_ms") for name in ("sdpa", "fdattn")}
    assert pairs <= set(found)


def test_a_wrong_result_gives_no_figures(monkeypatch) -> None:
    calls = cpu.calls_of(TINY[0])
    wrong = calls._replace(ours=lambda q, k, v: calls.torchs(q, k, v) * 0.5)
    monkeypatch.setattr(cpu, "calls_of", lambda case: wrong)
    found = figures(TINY[0])
    assert "differs from SDPA by" in found["fdattn", "error"]
    assert ("fdattn", "eager_us") not in found
    assert ("sdpa", "eager_us") in found


def test_it_says_what_it_ran_on() -> None:
    assert cpu.processor().startswith("CPU ")
    assert cpu.processor().endswith(f"{torch.get_num_threads()} threads")
