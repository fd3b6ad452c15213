"""Steps over every cache captured in a CUDA graph: the same as eager ones, and no trace of the capture."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.engine.cached_batch import CachedBatch
from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.engine.graphs import CapturedStep

pytestmark = pytest.mark.gpu

CACHES = [
    ("contiguous", {}),
    ("paged", {}),
    ("paged", {"page_size": 5}),
    ("contiguous", {"kv_dtype": "fp8_e4m3"}),
    ("paged", {"kv_dtype": "fp8_e4m3"}),
    ("paged", {"kv_dtype": "int8", "page_size": 1}),
]


class Replayed(CachedBatch):
    """Whose steps are replays; captured before anything is stored."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        batch = len(self.cache.held)
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._counts = torch.zeros(batch, dtype=torch.int32, device=self.device)
        with torch.inference_mode():
            self._captured = CapturedStep(self._decode, self.device)

    @torch.inference_mode()
    def step(self, tokens, active=None):
        counts = [1] * len(tokens) if active is None else list(map(int, active))
        self.cache.reserve(counts)
        self._counts.copy_(torch.tensor(counts))
        self._tokens.copy_(tokens)
        return self._captured()

    def _decode(self):
        step = self.cache.ragged_step(self._counts, 1)
        return self.model(self._tokens, step, last_only=True)[:, -1]


@pytest.mark.parametrize(("kind", "options"), CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_equal_eager_ones(kind, options, dtype):
    """Pages come between replays, in a table that stays where it is; scales come after the capture."""
    model = random_model("cuda").to(dtype)
    captured, eager = (
        x(model, kind, batch=len(PROMPTS), **options) for x in (Replayed, CachedBatch)
    )
    for _ in range(2):  # the second time over pages and scales that stand already
        torch.testing.assert_close(captured.prefill(PROMPTS), eager.prefill(PROMPTS))
        for step in range(7):
            tokens = torch.randint(64, (4, 1), device="cuda")
            active = [step != 2, True, step < 2, True]
            found, expected = captured.step(tokens, active), eager.step(tokens, active)
            torch.testing.assert_close(found[active], expected[active])
            assert captured.cache.held == captured.cache.lengths.tolist() == eager.cache.held
        for each in (captured, eager):
            each.cache.truncate(13)
    for layer in range(2):
        for ours, theirs in zip(captured.cache.layer(layer), eager.cache.layer(layer), strict=True):
            torch.testing.assert_close(ours.float(), theirs.float())


@pytest.mark.parametrize(("kind", "options"), CACHES)
def test_the_capture_leaves_no_trace(kind, options):
    cache = Replayed(random_model("cuda"), kind, batch=len(PROMPTS), **options).cache
    assert not any(view.float().any() for view in cache.layer(1))
    assert cache.held == cache.lengths.tolist() == [0] * 4
    if cache.scales is not None:
        assert not cache.calibrated
        assert (cache.scales.k == 1).all()


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
