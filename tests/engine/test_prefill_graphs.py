"""Prefill passes by width: the same logits and cache as eager passes, few graphs, bounded memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.engine import Engine, prefill
from torch_fdattn.engine.prefill import MAX_TOKENS, PrefillGraphs, default_widths


@pytest.fixture
def captured(device, monkeypatch) -> list:
    """Kinds of pass in the order in which they were captured. On a CPU a stand-in runs a pass for each replay."""
    kinds: list = []
    capture = PrefillGraphs._capture

    def noted(self, kind: tuple) -> None:
        kinds.append(kind)
        capture(self, kind)

    class Rerun:
        def __init__(self, run, device, pool, stream) -> None:
            self._run = run
            for _ in range(2):
                run()

        def __call__(self):
            return self._run()

    monkeypatch.setattr(PrefillGraphs, "_capture", noted)
    if device != "cuda":
        monkeypatch.setattr(prefill, "CapturedStep", Rerun)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    return kinds


def engine_of(model, widths, **options) -> Engine:
    """With captured passes of these widths, on CPUs too."""
    options = {"capacity": 48, "batch": len(PROMPTS), **options}
    engine = Engine(model, cuda_graph=False, **options)
    engine._prefill_graphs = PrefillGraphs(
        engine._pass, widths, engine.batch, engine.capacity, engine.device,
        engine.cache.shapes_follow_longest,
    )  # fmt: skip
    return engine


def of_sequences(engine: Engine) -> list[torch.Tensor]:
    """What each layer's cache holds of each sequence, contiguous caches alone."""
    return [
        stored[i, :, :length]
        for layer in range(engine.model.config.num_layers)
        for stored in engine.cache.layer(layer)
        for i, length in enumerate(engine.cache.held)
    ]


@pytest.mark.parametrize("chunk", [5, 20, 512])
@pytest.mark.parametrize("widths", [[4, 20], [7, 24, 40], [48]])
def test_as_eager_passes(device, captured, widths, chunk) -> None:
    model = random_model(device)
    engine, eager = engine_of(model, widths, prefill_chunk=chunk), engine_of(model, [], prefill_chunk=chunk)  # fmt: skip
    for _ in range(2):  # the second replays
        engine.reset()
        eager.reset()
        found, expected = engine.prefill(PROMPTS), eager.prefill(PROMPTS)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        assert engine.cache.held == eager.cache.held == engine.cache.lengths.tolist()
        for ours, theirs in zip(of_sequences(engine), of_sequences(eager), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    longest = max(map(len, PROMPTS))
    assert bool(captured) == (min(chunk, longest) <= max(widths))


def test_a_later_prompt_comes_behind_the_first(device, captured) -> None:
    model = random_model(device)
    engine, eager = engine_of(model, [16, 24]), engine_of(model, [])
    later = [prompt[:3] for prompt in PROMPTS]
    for prompts in (PROMPTS, later):
        found, expected = engine.prefill(prompts), eager.prefill(prompts)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert [kind[0] for kind in captured] == [24, 16]


@pytest.mark.parametrize("options", [
    dict(kv_cache="paged", page_size=4), dict(kv_cache="paged", page_size=16, kv_dtype="int8"),
    dict(kv_dtype="int8"),
], ids=str)  # fmt: skip
def test_other_caches(device, captured, options) -> None:
    """Whose shapes follow what is stored: the longest sequence is part of the kind, in powers of two."""
    model = random_model(device)
    engine = engine_of(model, [20, 24], prefill_chunk=20, **options)
    eager = engine_of(model, [], prefill_chunk=20, **options)
    prompts = [prompt[:9] for prompt in PROMPTS]
    for _ in range(3):  # the first of a quantised cache sets its scales
        found, expected = engine.prefill(prompts), eager.prefill(prompts)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert captured
    assert {kind[2] for kind in captured} <= {16, 32}


def test_prompts_of_one_length_have_no_padding(device, captured) -> None:
    model = random_model(device)
    engine, eager = engine_of(model, [8, 16]), engine_of(model, [])
    for length in (8, 7, 16):
        prompts = [(prompt * 16)[:length] for prompt in PROMPTS]
        found, expected = engine.prefill(prompts), eager.prefill(prompts)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert captured == [(8, True, None), (8, False, None), (16, True, None)]


def test_few_graphs_are_kept(device, captured, monkeypatch) -> None:
    monkeypatch.setattr(prefill, "MAX_GRAPHS", 2)
    engine = engine_of(random_model(device), [4, 8, 12])
    for length in (4, 8, 4, 12, 4, 8):  # of three the least recently used one goes
        engine.reset()
        engine.prefill([(prompt * 16)[:length] for prompt in PROMPTS])
    assert [kind[0] for kind in captured] == [4, 8, 12, 8]
    assert len(engine._prefill_graphs._graphs) == 2


def test_logits_stay_what_they_were(device, captured) -> None:
    engine = engine_of(random_model(device), [24])
    first = engine.prefill(PROMPTS)
    kept = first.clone()
    engine.prefill([prompt[:2] for prompt in PROMPTS])
    assert torch.equal(first, kept)


def test_default_widths() -> None:
    widths = default_widths(8, 512)
    assert (widths[0], widths[-1]) == (16, 512)
    assert all(b / a <= 1.25 for a, b in itertools.pairwise(widths))
    assert default_widths(32, 4096)[-1] == MAX_TOKENS // 32
    assert default_widths(1, 7) == [7]
    assert default_widths(2 * MAX_TOKENS, 512) == []


def test_refusals(device) -> None:
    model = random_model(device)
    with pytest.raises(ValueError, match="prefill_widths must be None or empty where nothing"):
        Engine(model, capacity=48, cuda_graph=False, prefill_widths=[4])
    for widths in (5, [4.5], [True], ["16"], iter([4])):
        with pytest.raises(
            TypeError, match="prefill_widths must be None or a list or tuple of int"
        ):
            Engine(model, capacity=48, prefill_widths=widths)
    if device == "cuda":
        with pytest.raises(ValueError, match="prefill_widths must be from 1 to 48 columns"):
            Engine(model, capacity=48, prefill_widths=[49])


def test_engines_on_gpus_capture(device) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    engine = Engine(random_model(device), batch=len(PROMPTS), capacity=48)
    engine.prefill(PROMPTS)
    assert engine._prefill_graphs._graphs
    assert 0 < engine.prefill_graph_bytes < 1 << 30
    engine.close()
    assert engine.prefill_graph_bytes == 0
