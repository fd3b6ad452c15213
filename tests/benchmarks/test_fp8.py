"""attention_fp8's benchmark: rates and errors of each, and a reason for a peer that is not there."""

import sys
import types

import pytest
import torch

import torch_fdattn
from benchmarks import fp8
from benchmarks.cases import FP8_CASES, select
from benchmarks.results import Recorder, Results
from benchmarks.runner import Budget, Run
from benchmarks.timing import Timer

from .test_results import META


@pytest.fixture
def figures():
    (case,) = select(FP8_CASES, "tiny", tiny_only=True)
    recorder = Recorder(Results(META | {"gpu": "cpu"}), None)
    run = Run(Timer(torch.device("cpu")), recorder, (), 1, Budget(None))
    run.cases([case], lambda case, _: fp8.measure(run, case))
    return {(row.impl, row.metric): row.value for row in recorder.results.rows}


@pytest.fixture
def fa3(monkeypatch):
    """Its interface, by our dequantised attention."""

    def flash_attn_func(q, k, v, *, causal, q_descale, k_descale, v_descale):
        tensors = (
            x.float() * scale[:, None, :, None]
            for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale))
        )
        return torch_fdattn.attention(*tensors, causal=causal, layout="bshd")[0]

    module = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)


def test_rates_and_errors(fa3, figures):
    names = fp8.OURS, fp8.BF16, fp8.FA3
    metrics = "rel_err", "fwd_TFLOPs"
    assert {(name, metric) for name in names for metric in metrics} <= set(figures)
    assert figures[fp8.BF16, "rel_err"] < 1e-6
    assert figures[fp8.OURS, "rel_err"] < 3e-3  # rounded to bf16
    assert figures[fp8.FA3, "rel_err"] < 1e-6


def test_without_the_peer(figures):
    assert "flash_attn_interface" in figures[fp8.FA3, "error"]
    assert (fp8.FA3, "fwd_TFLOPs") not in figures
