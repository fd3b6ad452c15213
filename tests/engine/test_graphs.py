"""Decode steps captured in a CUDA graph: the same as eager ones, captured once, refused when full."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.engine.tiny import PROMPTS, greedy, random_model
from torch_fdattn.engine import Engine, Sampling
from torch_fdattn.engine.graphs import CapturedStep

pytestmark = pytest.mark.gpu


def engines(dtype=torch.float32, **options) -> tuple[Engine, Engine]:
    """A captured one and an eager one, on one model."""
    model = random_model("cuda").to(dtype)
    return tuple(
        Engine(model, batch=len(PROMPTS), capacity=48, cuda_graph=captured, **options)
        for captured in (True, False)
    )


def count_passes(engine: Engine) -> list[int]:
    widths: list[int] = []
    engine.model.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[1]))
    return widths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_captured_step_equals_the_eager_one(dtype):
    captured, eager = engines(dtype)
    for _ in range(2):  # the second time over what the first has stored
        torch.testing.assert_close(captured.prefill(PROMPTS), eager.prefill(PROMPTS))
        for step in range(4):
            tokens = torch.randint(64, (4, 1), device="cuda")
            active = [step != 2, True, step < 2, True]
            found, expected = captured.step(tokens, active), eager.step(tokens, active)
            torch.testing.assert_close(found[active], expected[active])
            assert captured.cache.held == captured.cache.lengths.tolist() == eager.cache.held


def test_the_capture_leaves_no_trace():
    engine, _ = engines()
    assert engine.cache.held == engine.cache.lengths.tolist() == [0] * 4
    assert not any(view.any() for view in engine.cache.layer(1))


def test_it_is_captured_once():
    engine, _ = engines(prefill_chunk=8)
    passes = count_passes(engine)
    for _ in range(2):
        list(engine.generate(PROMPTS, 10))
        engine.reset()
    assert passes == [8] * 3  # one width of prefill: two warm-ups and the capture


def test_sequences_end_by_themselves():
    engine, eager = engines()
    ends = [greedy(engine.model, PROMPTS[0], 3)[-1]]
    found = list(engine.generate(PROMPTS, 12, eos_ids=ends))
    assert found == list(eager.generate(PROMPTS, 12, eos_ids=ends))
    assert any(None in tokens for tokens in found)
    assert engine.cache.held == engine.cache.lengths.tolist() == eager.cache.held


def test_draws_follow_the_seed():
    engine, eager = engines()
    sampling = Sampling(temperature=1.5, top_p=0.9, seed=3)
    expected = list(eager.generate(PROMPTS, 12, sampling=sampling))
    for _ in range(2):
        assert list(engine.generate(PROMPTS, 12, sampling=sampling)) == expected
        engine.reset()


def test_an_overflow_is_refused_before_the_replay():
    engine, _ = engines()
    engine.prefill([[1] * 47, [1], [1], [1]])
    tokens = torch.ones(4, 1, dtype=torch.int64, device="cuda")
    engine.step(tokens)
    before = [view.clone() for view in engine.cache.layer(0)]
    with pytest.raises(ValueError, match="sequence 0 must fit the cache's capacity of 48 tokens"):
        engine.step(tokens)
    assert engine.cache.held == engine.cache.lengths.tolist() == [48, 2, 2, 2]
    assert all(map(torch.equal, before, engine.cache.layer(0)))


def test_it_goes_on_after_truncate_and_reset():
    engine, _ = engines()
    first = list(engine.generate(PROMPTS, 8))
    engine.truncate(1)  # each prompt's first token
    rest = [prompt[1:] or [9] for prompt in PROMPTS]
    found = list(zip(*engine.generate(rest, 8), strict=True))
    for prompt, more, tokens in zip(PROMPTS, rest, found, strict=True):
        assert list(tokens) == greedy(engine.model, [prompt[0], *more], 8)
    engine.reset()
    assert list(engine.generate(PROMPTS, 8)) == first


def test_a_closed_engine_steps_eagerly():
    engine, _ = engines()
    expected = list(engine.generate(PROMPTS, 5))
    engine.reset()
    engine.close()
    passes = count_passes(engine)
    assert list(engine.generate(PROMPTS, 5)) == expected
    assert passes == [20, 1, 1, 1, 1]


CACHES = [
    {"kv_cache": "paged"},
    {"kv_cache": "paged", "page_size": 5},
    {"kv_dtype": "fp8_e4m3"},
    {"kv_cache": "paged", "kv_dtype": "fp8_e4m3"},
    {"kv_cache": "paged", "kv_dtype": "int8", "page_size": 1},
]


@pytest.mark.parametrize("options", CACHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_over_pages_and_bytes_equal_eager_ones(options, dtype):
    """Pages come between replays, in a table that stays where it is; scales come after the capture."""
    captured, eager = engines(dtype, **options)
    for _ in range(2):  # the second time over pages and scales that stand already
        torch.testing.assert_close(captured.prefill(PROMPTS), eager.prefill(PROMPTS))
        for step in range(7):
            tokens = torch.randint(64, (4, 1), device="cuda")
            active = [step != 2, True, step < 2, True]
            found, expected = captured.step(tokens, active), eager.step(tokens, active)
            torch.testing.assert_close(found[active], expected[active])
            assert captured.cache.held == captured.cache.lengths.tolist() == eager.cache.held
        captured.truncate(13), eager.truncate(13)
    for layer in range(2):
        for ours, theirs in zip(captured.cache.layer(layer), eager.cache.layer(layer), strict=True):
            torch.testing.assert_close(ours.float(), theirs.float())


@pytest.mark.parametrize("options", CACHES, ids=str)
def test_the_capture_leaves_no_trace_in_pages_and_scales(options):
    engine, _ = engines(**options)
    assert not any(view.float().any() for view in engine.cache.layer(1))
    assert engine.cache.held == engine.cache.lengths.tolist() == [0] * 4
    if engine.cache.scales is not None:
        assert not engine.cache.calibrated
        assert (engine.cache.scales.k == 1).all()


def test_a_first_token_without_a_prompt_sets_the_scales():
    """That step runs eagerly; the graph reads the scales from the next one on."""
    captured, eager = engines(kv_dtype="int8")
    passes = count_passes(captured)
    for _ in range(3):
        tokens = torch.randint(64, (4, 1), device="cuda")
        torch.testing.assert_close(captured.step(tokens).clone(), eager.step(tokens))
    assert torch.equal(captured.cache.scales.k, eager.cache.scales.k)
    assert passes == [1]


def test_pages_run_out_before_the_replay():
    captured, _ = engines(kv_cache="paged", page_size=4, pages=5)
    captured.prefill([[1] * 8, [1], [1], [1]])
    tokens = torch.ones(4, 1, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="pages must be at least 6 for sequences of 9, 2, 2, 2"):
        captured.step(tokens)
    assert captured.cache.held == captured.cache.lengths.tolist() == [8, 1, 1, 1]
    captured.truncate(4)
    assert captured.step(tokens).isfinite().all()


class Owner:
    """Of a graph, in a cycle: what Python's collector alone finds."""

    def __init__(self, graph: CapturedStep) -> None:
        self.graph, self.itself = graph, self


@pytest.fixture
def eager_collector():
    """Collects whatever is garbage at every 10th allocation."""
    thresholds = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("eager_collector")
def test_a_capture_outlives_graphs_that_become_garbage_in_it():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(4, device="cuda")
    owners = [Owner(CapturedStep(lambda: x + 1, device)) for _ in range(3)]

    def run():
        owners.pop()  # two warm-ups and the capture
        kept = [[] for _ in range(1000)]
        return x + len(kept)

    step = CapturedStep(run, device)
    assert not owners
    assert gc.isenabled()
    torch.testing.assert_close(step(), torch.full_like(x, 1001))
