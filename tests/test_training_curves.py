"""Trainings with our attention and torch's: the curves are one, and fall."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.report.tables import values_of
from benchmarks.results import Results
from examples.training_curves import command, text, ways
from examples.training_curves.models import BUCKETS, FARTHEST, MODELS, SIZES, buckets
from examples.training_curves.run import Curve, Setup, gap, nudge, train
from torch_fdattn.ops.library import launches

CPU = torch.device("cpu")
TEXT = text.standard_library(200_000)


@pytest.mark.parametrize("model", MODELS)
def test_the_curves_are_one_and_fall(model) -> None:
    """fp32, where rounding has no time to grow."""
    setup = Setup(model, SIZES["tiny"], 20, torch.float32, 0, CPU)
    before = launches["attention_backward/cpu"]
    ours = train(setup, "fdattn", TEXT)
    layers = {"gpt": 2, "t5": 3}[model]
    assert launches["attention_backward/cpu"] - before == 20 * layers
    torchs = train(setup, "sdpa", TEXT)
    assert max(abs(x - y) for x, y in zip(ours.losses, torchs.losses, strict=True)) < 1e-4
    assert abs(ours.validation - torchs.validation) < 1e-4
    assert ours.losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert ours.losses[-1] < ours.losses[0] - 0.7
    assert ours.validation < ours.losses[0] - 0.7


def test_the_relative_bias_is_trained() -> None:
    """Its gradient by ours is torch's, in encoder and decoder."""
    found = []
    tokens = text.batch(TEXT.training, 2, 41, torch.Generator().manual_seed(0))
    for name in ("fdattn", "sdpa/math"):
        torch.manual_seed(0)
        model = MODELS["t5"](SIZES["tiny"], ways.way(name))
        model(tokens).backward()
        found.append([bias.table.weight.grad for bias in model.biases])
    for ours, torchs in zip(*found, strict=True):
        assert torchs.abs().max() > 1e-6
        torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-7)


def test_causal_with_a_bias_by_torch() -> None:
    q, bias = torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 6)
    ours, torchs = (ways.way(name)(q, q, q, True, bias) for name in ("fdattn", "sdpa"))
    torch.testing.assert_close(ours, torchs)


def test_nudged_weights_are_the_next_numbers() -> None:
    model, nudged = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    nudged.load_state_dict(model.state_dict())
    nudge(nudged, 0)
    for a, b in zip(model.parameters(), nudged.parameters(), strict=True):
        steps = b.detach().view(torch.int32) - a.detach().view(torch.int32)
        assert steps.unique().tolist() == [-1, 0, 1]


def test_buckets() -> None:
    distance = torch.arange(-300, 301)
    one, both = buckets(distance, False), buckets(distance, True)
    assert one[distance >= 0].eq(0).all()
    behind = one[distance <= 0].flip(0)  # by how far a key is behind
    assert behind[:16].tolist() == list(range(16))
    assert behind.diff().min() == 0
    assert behind[FARTHEST:].eq(BUCKETS - 1).all()
    assert both[distance < 0].max() < BUCKETS // 2 <= both[distance > 0].min()
    assert torch.equal(both[distance < 0].flip(0) + BUCKETS // 2, both[distance > 0])


@pytest.mark.slow
def test_buckets_are_t5s() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-400, 401)
    for both in (True, False):
        theirs = T5Attention._relative_position_bucket(distance, both, BUCKETS, FARTHEST)
        assert torch.equal(buckets(distance, both), theirs)


def test_text_is_the_same_each_time(tmp_path) -> None:
    again = text.standard_library(200_000)
    assert again.digest == TEXT.digest
    assert torch.equal(again.training, TEXT.training)
    assert len(TEXT.training) + len(TEXT.validation) == 200_000
    for name in ("b", "a"):
        (tmp_path / f"{name}.py").write_text(name * 600)
    found = text.standard_library(1000, tmp_path)
    assert bytes(found.training[:601].tolist()) == b"a" * 600 + b"b"
    with pytest.raises(ValueError, match=r"folder must hold Python sources, got 0 bytes"):
        text.standard_library(1000, tmp_path / "none")


def test_command(tmp_path, capsys) -> None:
    path, plot = tmp_path / "train.json", tmp_path / "train.svg"
    words = "--steps 4 --device cpu --attention fdattn,sdpa,sdpa/math,sdpa/cudnn --json"
    assert main(["train", *words.split(), str(path), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "fdattn's curve is" in shown
    assert "sdpa/cudnn | error" in shown
    results = Results.load(path)
    losses = values_of(results, "train_loss")
    assert [case.rpartition(" ")[2] for case in losses] == ["1", "2", "3", "4"]
    assert all(set(x) == {"fdattn", "sdpa", "sdpa/math"} for x in losses.values())
    ((case, gaps),) = values_of(results, "loss_gap").items()
    assert case == "gpt 0.1M fp32"
    assert gaps["fdattn"] < 1e-5
    assert "Training, gpt 0.1M fp32" in plot.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model bert", "--model must be of gpt, t5, got 'bert'"),
        ("--attention flex", "--attention must be of fdattn, sdpa, "),
        ("--steps 0", "--steps must be at least 1, got 0"),
    ],
)
def test_wrong_words_are_named(words, message, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["train", *words.split()])
    assert message in capsys.readouterr().err


def test_verdict() -> None:
    def curve(*losses: float) -> Curve:
        return Curve(list(losses), 0.0, 1.0, 1)

    assert gap(curve(1, 2), curve(1.5, 2)) == 0.25
    torchs = {"sdpa": curve(3.0, 2.0), "sdpa/again": curve(3.0, 2.0), "sdpa/math": curve(3.0, 2.4)}
    assert "within the noise of 2.00e-01" in command.verdict([torchs | {"fdattn": curve(3.0, 2.1)}])
    assert "MORE than the noise" in command.verdict([torchs | {"fdattn": curve(3.0, 1.7)}])
    assert "no noise" in command.verdict([{"sdpa": torchs["sdpa"], "fdattn": torchs["sdpa"]}])
    near, far = (torchs | {"fdattn": curve(3.0, x)} for x in (2.1, 1.8))
    assert "within the noise of 2.00e-01" in command.verdict([near, far])
    assert "Two seeds of sdpa differ by 0.00e+00" in command.verdict([near, far])
