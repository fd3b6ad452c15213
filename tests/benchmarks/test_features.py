"""The features table: every feature is right where an implementation has it, and a reason stands where not."""

import pytest
import torch

from benchmarks import attention, features, peers
from benchmarks.cases import FEATURE_CASES, select
from benchmarks.results import Recorder, Results
from benchmarks.runner import Budget, Run
from benchmarks.timing import Timer

from .test_results import META

TINY = select(FEATURE_CASES, "tiny", tiny_only=True)
#: (feature, implementation) for which there is no form.
WITHOUT = {("softcap", "sdpa"): "no softcap"} | {
    (case.feature, "sdpa-mask"): "has a mask" for case in TINY if case.feature not in ("plain", "dropout")
}  # fmt: skip


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.feature)
def test_every_feature(case) -> None:
    recorder = Recorder(Results(META | {"gpu": "cpu"}), None)
    run = Run(
        Timer(torch.device("cpu")),
        recorder,
        peers.chosen("sdpa,sdpa-mask", peers.FEATURED),
        1,
        Budget(None),
    )
    attention.measure(run, [case], attention.PASSES)
    for impl in ("fdattn", "sdpa", "sdpa-mask"):
        found = {row.metric: row.value for row in recorder.results.rows if row.impl == impl}
        if reason := WITHOUT.get((case.feature, impl)):
            assert reason in found["error"]
            continue
        assert "error" not in found, found
        assert {"fwd_us", "bwd_us"} <= set(found)
        if case.feature != "dropout":
            assert found["max_abs_err"] < 1e-5
            assert found["grad_max_abs_err"] < 1e-5


def test_a_bias_is_trained_where_it_is_asked_for() -> None:
    by_feature = {case.feature: case for case in TINY}
    for feature, trained in (("bias", 0), ("bias-grad", 1)):
        assert len(features.extras_of(by_feature[feature], torch.device("cpu")).trained) == trained


def test_wrong_peers_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"--vs must name peers of \['fa3', 'flex', 'sdpa', 'sdpa-mask'\], got fa2"
    ):
        peers.chosen("fa2", peers.FEATURED)
