"""Compiled layers: every way gives figures on a CPU, and one that is wrong gives a reason."""

import pytest
import torch

from benchmarks import compiled
from benchmarks.cases import COMPILE_CASES, select
from benchmarks.results import Recorder, Results
from benchmarks.runner import Budget, Run
from benchmarks.timing import Timer

from .test_results import META

pytest.importorskip("transformers", reason="the models are transformers'")
TINY = select(COMPILE_CASES, "tiny", tiny_only=True)
METRICS = {
    "prefill": {"fwd_us", "compile_ms"},
    "prefill-causal": {"fwd_us", "compile_ms"},
    "decode": {"graph_us", "host_us", "compile_ms"},
    "train": {"step_ms", "compile_ms"},
    "train-llama": {"step_ms", "compile_ms"},
}


def figures(case, ways) -> dict[str, dict]:
    recorder = Recorder(Results(META | {"gpu": "cpu"}), None)
    compiled.measure(Run(Timer(torch.device("cpu")), recorder, ways, 1, Budget(None)), [case])
    return {
        way.name: {row.metric: row.value for row in recorder.results.rows if row.impl == way.name}
        for way in ways
    }


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=() if x.use == "decode" else pytest.mark.slow) for x in TINY],
    ids=lambda case: case.use,
)
def test_every_use(case, monkeypatch) -> None:
    from torch._dynamo.utils import counters

    # Inductor's own time is not what is tested here.
    monkeypatch.setattr(compiled.Backend, "options", {"lower": "aot_eager"})
    counters.clear()
    found = figures(case, compiled.BACKENDS[:2])
    assert "error" not in found["eager"] | found["fdattn"], found
    assert set(found["fdattn"]) >= METRICS[case.use]
    assert counters["fdattn"]["rewritten"] >= case.layers
    assert counters["fdattn"]["left"] == 0


def test_causal_forms_are_the_same_attention() -> None:
    """What Inductor is also timed with."""
    case = next(x for x in TINY if x.use == "train-llama")
    grads = []
    for attention in ("sdpa", *compiled._CAUSAL):
        torch.manual_seed(0)
        fn, step = compiled._train_llama(case, torch.device("cpu"), attention)
        grads.append(step(fn))
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


def test_a_wrong_model_gives_no_figures(monkeypatch) -> None:
    made = compiled.Backend.apply
    monkeypatch.setattr(
        compiled.Backend,
        "apply",
        lambda way, fn: fn if way.name == "eager" else lambda *inputs: made(way, fn)(*inputs) * 1.1,
    )
    monkeypatch.setattr(compiled.Backend, "options", {"lower": "eager"})
    found = figures(TINY[0], compiled.BACKENDS[:2])
    assert "differs from the eager model by 0.1" in found["fdattn"]["error"]
    assert "fwd_us" not in found["fdattn"]
