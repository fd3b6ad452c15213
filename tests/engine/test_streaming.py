"""`stream_text` on a small random model: parts, stops, statistics; steps that are read at once or one later."""

from __future__ import annotations

import time

import pytest

from tests.engine.test_chat import Numbers
from tests.engine.tiny import POSITION, PROMPT, PROMPTS, greedy, random_model
from torch_fdattn.engine import (
    LLM,
    NgramSpeculation,
    PromptError,
    SamplingParams,
    Stats,
    stream_text,
)
from torch_fdattn.engine.stats import weight_bytes

GREEDY = SamplingParams(max_tokens=8, temperature=0)


class Halves(Numbers):
    """Every second token ends within a character, which the last one of a text lacks."""

    def stream(self, prompt):
        return _Halves()


class _Halves:
    def __init__(self):
        self._held = ""

    def push(self, token):
        text, self._held = self._held + f"{token} ", ""
        if text.count(" ") < 2:
            text, self._held = "", text
        return text

    def flush(self):
        return self._held


@pytest.fixture
def model(device):
    return random_model(device)


def numbers(texts) -> list[int]:
    return Numbers().encode("".join(texts))


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize(
    "speculation", [None, NgramSpeculation(max_tokens=3, shortest=1)], ids=["plain", "n-grams"]
)
def test_parts_are_those_of_the_tokens(run_ahead, speculation, model):
    llm = LLM(model, Numbers(), pages=8, run_ahead=run_ahead, speculation=speculation)
    params = SamplingParams(max_tokens=40, temperature=0)
    stats = Stats()
    parts = list(stream_text(llm, PROMPT, params, stats=stats))
    assert numbers(parts) == greedy(model, PROMPT, 40)
    assert (len(parts) == 40) == (speculation is None)
    assert (stats.prompt_tokens, stats.new_tokens) == (len(PROMPT), 40)
    counts = llm.stats()
    assert (counts.pages_used, counts.pages_peak) == (0, 3)  # 46 tokens are stored
    assert (counts.accepted_tokens > 0) == (speculation is not None)


def test_what_a_step_reads_is_counted(model):
    llm, stats = LLM(model, Numbers(), pages=8), Stats()
    numbers(stream_text(llm, PROMPT, SamplingParams(max_tokens=3, temperature=0), stats=stats))
    stored = len(PROMPT) + 1, len(PROMPT) + 2
    read = 2 * weight_bytes(llm.model) + sum(stored) * POSITION
    assert stats.decode_bytes == read


def test_the_callers_time_is_not_counted(model):
    llm, stats = LLM(model, Numbers(), pages=8), Stats()
    for _ in stream_text(llm, PROMPT, SamplingParams(max_tokens=3, temperature=0), stats=stats):
        time.sleep(0.5)
    assert stats.first_token_s > 0
    assert 0 < stats.decode_s < 1.0
    assert stats.tokens_per_s == pytest.approx(2 / stats.decode_s)


def test_without_running_ahead_a_token_comes_with_its_step(model):
    """And no step is taken behind the end, as one is that is read one later."""
    end = greedy(model, PROMPT, 4)[-1]
    params = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(end,))
    passes = {}
    for run_ahead in (True, False):
        llm = LLM(model, Numbers(), pages=8, run_ahead=run_ahead)
        llm.add_request("a", PROMPT, params)
        assert bool(llm.step()) != run_ahead
        outputs = []
        while llm.has_unfinished:
            outputs = llm.step() or outputs
        passes[run_ahead] = llm._runner.passes
        assert outputs[0].outputs[0].token_ids == greedy(model, PROMPT, 4)
    assert passes == {True: 5, False: 4}


@pytest.mark.parametrize("run_ahead", [True, False])
def test_many_requests_are_the_same_either_way(run_ahead, model):
    llm = LLM(model, pages=20, page_size=3, max_batch_tokens=9, run_ahead=run_ahead)
    found = [x.outputs[0].token_ids for x in llm.generate(PROMPTS, GREEDY)]
    assert found == [greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_stop_hands_out_what_was_held_back(run_ahead, model):
    llm, asked = LLM(model, Halves(), pages=8, run_ahead=run_ahead), []
    parts = list(
        stream_text(llm, PROMPT, GREEDY, should_stop=lambda: asked.append(0) or len(asked) == 3)
    )
    assert [len(part.split()) for part in parts] == [0, 2, 0, 1]
    assert numbers(parts) == greedy(model, PROMPT, 3)
    assert (llm.has_unfinished, llm.stats().pages_used) == (False, 0)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_closed_stream_leaves_a_free_engine(run_ahead, model):
    llm = LLM(model, Numbers(), pages=8, run_ahead=run_ahead)
    parts = stream_text(llm, PROMPT, GREEDY)
    next(parts)
    with pytest.raises(ValueError, match="llm must have no other request"):
        next(stream_text(llm, PROMPT, GREEDY))
    parts.close()
    assert (llm.has_unfinished, llm.stats().pages_used) == (False, 0)
    assert numbers(stream_text(llm, PROMPT, GREEDY)) == greedy(model, PROMPT, 8)


def test_what_is_refused(model):
    llm = LLM(model, Numbers(), pages=1)
    with pytest.raises(ValueError, match="llm must have a tokenizer"):
        next(stream_text(LLM(model, pages=1), PROMPT, GREEDY))
    with pytest.raises(ValueError, match="params must ask for one completion"):
        next(stream_text(llm, PROMPT, SamplingParams(n=2)))
    with pytest.raises(
        PromptError, match=r"prompt of 20 tokens .* need 27 places, the cache has 16"
    ):
        next(stream_text(llm, PROMPTS[3], GREEDY))
    assert not llm.has_unfinished
    with pytest.raises(TypeError, match="run_ahead must be a bool, got 1"):
        LLM(model, pages=1, run_ahead=1)


def test_a_closed_llm_runs_on(model):
    llm = LLM(model, Numbers(), pages=8)
    llm.close()
    assert numbers(stream_text(llm, PROMPT, GREEDY)) == greedy(model, PROMPT, 8)
