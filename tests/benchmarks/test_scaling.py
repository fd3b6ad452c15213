"""The model of times over GPUs: its parts, how far it is from what was measured, new runs, its figure and its table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.distributed.models import config_named, kv_bytes, model_bytes
from benchmarks.report import scaling
from benchmarks.report.scaling import Curve, Line, Measured, ModelSizes, panels, section
from benchmarks.results import RESULTS_DIR, Recorder, Results

BF16 = torch.bfloat16


def curves(folder: Path = RESULTS_DIR) -> dict[str, Curve]:
    return {curve.name: curve for each in panels(Measured(folder)).values() for curve in each}


def test_a_line_is_through_its_points() -> None:
    line = Line.through((10.0, 7.0), (30.0, 11.0))
    assert (line.fixed, line.rate) == (5.0, 5.0)
    assert (line(10.0), line(30.0), line(0.0)) == (7.0, 11.0, 5.0)


@pytest.mark.parametrize("gpus", [1, 2, 8, 16])
def test_sizes_are_those_of_the_model(gpus: int) -> None:
    """Of the embedding a step reads a few rows."""
    config, sizes = config_named("Qwen/Qwen3-32B"), ModelSizes()
    weights = model_bytes(config, BF16, gpus) - config.vocab_size * config.hidden_size * BF16.itemsize  # fmt: skip
    assert sizes.step_bytes(gpus, 0, 0) == weights
    assert sizes.step_bytes(gpus, 4, 100) == weights + kv_bytes(config, BF16, gpus, 4, 100)
    assert sizes.heads == config.num_heads


def test_the_model_is_as_far_from_what_was_measured_as_the_note_says() -> None:
    errors = {
        (name, gpus): curve.predict(gpus) / us - 1
        for name, curve in curves().items()
        for gpus, us in curve.measured.items()
    }
    assert {gpus for _, gpus in errors} == {1, 2, 4}
    for (name, _), error in errors.items():
        limit = 0.07 if name.startswith("decode") else 0.16 if "ring" in name else 0.12
        assert abs(error) < (0.22 if "128 sequences" in name else limit), (name, error)


def test_predictions_are_bounded_by_what_they_are_made_of() -> None:
    """More GPUs help until latency and wires take as long, and never more than their number."""
    found = curves()
    for name, curve in found.items():
        counts = [n for n in (*scaling.HOST, *scaling.RACK) if n <= curve.largest]
        times = [curve.predict(n) for n in counts]
        for n, us in zip(counts, times, strict=True):
            assert us >= 0.97 * times[0] / n, (name, n)
    decode = found["decode B1 H32/8 N32768 D128 bf16"]
    assert decode.predict(72) > decode.predict(16)  # it sends more than it saves
    ring = found["ring B1 H16/16 N131072 D128 causal bf16 forward"]
    assert ring.predict(32) > 0.9 * ring.predict(16)  # bound by its wires
    assert found["Qwen3-32B decode step, 8 sequences of 256"].largest == 64


def test_a_run_on_eight_gpus_is_a_row(tmp_path) -> None:
    folder = shutil.copytree(RESULTS_DIR, tmp_path / "results")
    decode, ring = "B1 H64/8 N1048576 D128 bf16", "ring B1 H16/16 N1048576 D128 causal bf16 forward"
    for name, case, impl, metric, value in (
        ("H100-80GB-HBM3x8_dist-decode-compare", decode, "fdattn/auto", "graph_us", 180.0),
        ("H200x8_ring-1048576", ring, "fdattn/ring", "latency_ms", 950.0),
    ):
        path = next(RESULTS_DIR.glob("*_H200x2_ring-131072.json"))
        made = Results(Results.load(path).meta | {"count": 8, "commit": "1234567"})
        recorder = Recorder(made, folder / f"20990101T000000Z_{name}.json")
        recorder.add(case, impl, metric, value)
        recorder.save()
    found = curves(folder)
    assert found[f"decode {decode}"].measured[8] == 180.0
    assert found[f"{ring}, commit 1234567"].measured == {8: 950e3}
    text = section(folder)
    assert f"| decode {decode} | 8 | 180 µs |" in text
    assert f"| {ring}, commit 1234567 | 8 | 950 ms |" in text
    assert "20990101T000000Z_H200x8_ring-1048576.json" in text


def test_without_the_runs_of_its_constants_there_is_none(tmp_path) -> None:
    assert section(tmp_path) == "Not measured yet.\n"
    pytest.importorskip("matplotlib")
    from benchmarks.report.scaling_figure import draw

    with pytest.raises(ValueError, match="the runs that the model's constants are from, got none"):
        draw(tmp_path / "none.svg", tmp_path)


def test_the_figure_says_what_is_a_prediction_and_is_of_the_newest_runs(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.report import scaling_figure

    assert main(["scaling", "-o", str(tmp_path / "scaling.svg")]) == 0
    measured = Measured()
    panels(measured)
    runs = scaling_figure.runs_of(measured)
    for path in (tmp_path / "scaling.svg", scaling_figure.PATH):
        text = path.read_text("utf-8")
        assert runs in text, "run python -m benchmarks scaling"
        assert "Dashed, beyond 8 GPUs: a prediction" in text
        for name, curve in curves().items():
            assert (name in text) == curve.drawn
