"""What `e2e` and `generate` time: the passes of a batch over its cache, and a request's tokens."""

from __future__ import annotations

import pytest
import torch

from benchmarks.distributed import static_batch
from benchmarks.distributed.static_batch import StaticBatch
from benchmarks.generate import _seconds
from tests.engine.tiny import PROMPT, random_model
from torch_fdattn.engine import LLM


class Rerun:
    """In the place of a captured step, without a GPU: warm-ups, and a run for each replay."""

    made = 0

    def __init__(self, run, device) -> None:
        Rerun.made += 1
        self._run = run
        for _ in range(2):
            run()

    def __call__(self) -> torch.Tensor:
        return self._run()


@pytest.mark.parametrize("captures", [False, True])
def test_passes_give_the_models_logits(monkeypatch, captures: bool) -> None:
    """Prompts in chunks, steps, and a step that is taken back; a capture for each width, which leaves no trace."""
    monkeypatch.setattr(static_batch, "CapturedStep", Rerun)
    monkeypatch.setattr(Rerun, "made", 0)
    model = random_model("cpu")
    batch = StaticBatch(model, 2, 16, prefill_chunk=5)
    batch._captures = captures
    tokens = torch.randint(64, (2, 14), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens)
    for _ in range(2):
        batch.truncate(0)
        torch.testing.assert_close(batch(tokens[:, :12]), expected[:, 11], atol=2e-4, rtol=1e-4)
        for _ in range(2):
            batch.truncate(12)
            for end in (12, 13):
                found = batch(tokens[:, end : end + 1])
                torch.testing.assert_close(found, expected[:, end], atol=2e-4, rtol=1e-4)
    assert batch.cache.held == batch.cache.lengths.tolist() == [14, 14]
    assert Rerun.made == (3 if captures else 0)  # of 5, 2 and 1 tokens


def test_wide_passes_are_not_captured(monkeypatch) -> None:
    monkeypatch.setattr(static_batch, "CapturedStep", Rerun)
    monkeypatch.setattr(Rerun, "made", 0)
    monkeypatch.setattr(static_batch, "CAPTURED_TOKENS", 5)
    batch = StaticBatch(random_model("cpu"), 2, 16, prefill_chunk=16)
    batch._captures = True
    batch(torch.ones(2, 3, dtype=torch.int64))
    assert Rerun.made == 0
    batch(torch.ones(2, 2, dtype=torch.int64))
    assert Rerun.made == 1
    batch.close()
    batch(torch.ones(2, 1, dtype=torch.int64))
    assert Rerun.made == 1


@pytest.mark.parametrize("run_ahead", [True, False])
def test_every_token_of_a_request_has_its_time(run_ahead: bool) -> None:
    llm = LLM(random_model("cpu"), pages=4, enable_prefix_caching=False, run_ahead=run_ahead)
    for _ in range(2):
        times = _seconds(llm, PROMPT, 6)
        assert len(times) == 6
        assert times == sorted(times)
    assert llm.stats().prefix_hit_tokens == 0
