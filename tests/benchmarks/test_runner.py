"""Nothing that was asked for vanishes: failures, missing peers, spent budgets and lost devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import attention, decode
from benchmarks.cases import ATTENTION_CASES, DECODE_CASES, select
from benchmarks.peers import OURS, PEERS, Implementation, chosen
from benchmarks.report.tables import render
from benchmarks.results import Recorder, Results, Row
from benchmarks.runner import Budget, Run
from benchmarks.timing import Timer

from .test_results import META

CPU = torch.device("cpu")
ATTENTION = select(ATTENTION_CASES, "tiny", tiny_only=True)
DECODE = select(DECODE_CASES, "tiny", tiny_only=True)


class Peer(Implementation):
    """The formula, until the chosen call fails."""

    name = "peer"

    def __init__(self, fails_at: int | None = None, reason: str | None = None) -> None:
        self.calls, self.fails_at, self.reason = 0, fails_at, reason

    def available(self, device: torch.device) -> str | None:
        return self.reason

    def attention(self, case, device):
        return self._failing(PEERS["eager"].attention(case, device))

    def decode(self, case, copies):
        return [self._failing(call) for call in PEERS["eager"].decode(case, copies)]

    def _failing(self, function: Callable) -> Callable:
        def call(*args):
            self.calls += 1
            if self.fails_at is not None and self.calls >= self.fails_at:
                raise RuntimeError(f"call {self.calls} fell over\nwith details")
            return function(*args)

        return call


def run_with(*implementations: Implementation, timer: Timer | None = None, budget=None) -> Run:
    recorder = Recorder(Results(META | {"gpu": "cpu"}), None)
    budget = budget or Budget(None)
    return Run(timer or Timer(CPU), recorder, implementations, 2, budget)


def rows(run: Run, impl: str, *metrics: str) -> list[Row]:
    found = [row for row in run.recorder.results.rows if row.impl == impl]
    return [row for row in found if row.metric in metrics] if metrics else found


@pytest.mark.parametrize(
    ("measure", "cases", "metrics"),
    [
        (
            lambda run: attention.measure(run, ATTENTION, attention.PASSES),
            ATTENTION,
            {"fwd_TFLOPs", "bwd_TFLOPs", "max_abs_err", "grad_max_abs_err"},
        ),
        (
            lambda run: decode.measure(run, DECODE),
            DECODE,
            {"eager_us", "host_us", "max_abs_err"},
        ),
    ],
    ids=["attention", "decode"],
)
class TestBenchmarks:
    def test_all_metrics_and_small_errors(self, measure, cases, metrics) -> None:
        run = run_with(OURS, Peer())
        measure(run)
        for impl in ("fdattn", "peer"):
            found = rows(run, impl)
            for case in cases:
                of_case = {row.metric for row in found if row.case == case.name}
                assert {m for m in of_case if not m.endswith("_spread")} == metrics
            for row in found:
                if row.metric.endswith("max_abs_err"):
                    assert 0 < row.value < 1e-5
                elif not row.metric.endswith("_spread"):
                    assert row.value > 0
        Results.from_json(run.recorder.results.to_json())

    @pytest.mark.parametrize("fails_at", [1, 2, 6])
    def test_a_failing_peer_becomes_error_rows(self, measure, cases, metrics, fails_at) -> None:
        run = run_with(OURS, Peer(fails_at=fails_at))
        measure(run)
        for case in cases:
            errors = [row for row in rows(run, "peer", "error") if row.case == case.name]
            assert errors, f"{case.name} has no row that says what happened to the peer"
            assert "fell over" in errors[0].value
            assert "details" not in errors[0].value
            assert metrics <= {row.metric for row in rows(run, "fdattn") if row.case == case.name}
        text = render(run.recorder.results)
        assert "Without a figure" in text
        assert "RuntimeError: call" in text
        Results.from_json(run.recorder.results.to_json())

    def test_a_missing_peer_becomes_error_rows(self, measure, cases, metrics) -> None:
        run = run_with(OURS, Peer(reason="no such wheel"))
        measure(run)
        assert [(row.case, row.value) for row in rows(run, "peer")] == [
            (case.name, "not available: no such wheel") for case in cases
        ]

    def test_a_spent_budget_is_recorded(self, measure, cases, metrics) -> None:
        ticks = iter(range(1000))
        run = run_with(OURS, budget=Budget(2.5, clock=lambda: float(next(ticks))))
        measure(run)
        first, second = (
            {row.metric for row in rows(run, "fdattn") if row.case == case.name} for case in cases
        )
        assert metrics <= first
        assert second == {"not_measured"}
        assert rows(run, "fdattn", "not_measured")[0].value == "budget of 2.5 s was spent"

    def test_after_a_lost_device_nothing_is_measured(self, measure, cases, metrics) -> None:
        class Losing(Timer):
            def synchronize(self) -> None:
                if peer.calls:
                    raise RuntimeError("an illegal memory access was encountered")

        peer = Peer(fails_at=1)
        run = run_with(peer, OURS, timer=Losing(CPU))
        measure(run)
        assert "fell over" in rows(run, "peer", "error")[0].value
        for impl in ("peer", "fdattn"):
            late = rows(run, impl, "not_measured")
            assert [row.case for row in late] == [cases[1].name]
            assert "illegal memory access" in late[0].value


def test_forward_only() -> None:
    run = run_with(OURS)
    attention.measure(run, ATTENTION[:1], ("forward",))
    metrics = {row.metric for row in rows(run, "fdattn")}
    assert metrics == {"max_abs_err", "fwd_TFLOPs", "fwd_TFLOPs_spread"}


def test_a_peer_without_backward_says_so() -> None:
    peer = Peer()
    peer.differentiable = False
    run = run_with(peer)
    attention.measure(run, ATTENTION[:1], attention.PASSES)
    errors = rows(run, "peer", "error")
    assert [row.value for row in errors] == ["backward: NotImplementedError: peer is forward only"]
    assert rows(run, "peer", "fwd_TFLOPs")


def test_peers_that_need_a_gpu_say_so_on_a_cpu() -> None:
    for name in ("cudnn", "fa2", "flex"):
        assert PEERS[name].available(CPU) == "needs a CUDA device"
    assert PEERS["eager"].available(CPU) is None
    assert "flash_attn_interface" in PEERS["fa3"].available(CPU) or (
        PEERS["fa3"].available(CPU) == "needs a CUDA device"
    )


def test_chosen() -> None:
    assert [impl.name for impl in chosen("fa2, cudnn,fa2")] == ["fdattn", "fa2", "cudnn"]
    assert [impl.name for impl in chosen("all")] == ["fdattn", *PEERS]
    assert [impl.name for impl in chosen("none")] == ["fdattn"]
    with pytest.raises(ValueError, match=r"--vs must name peers of .*'fa2'.* got fa9"):
        chosen("cudnn,fa9")
