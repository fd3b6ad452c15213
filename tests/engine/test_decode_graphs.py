"""Passes of decodes by bucket: which bucket, what pads it, and that the padding leaves no trace; captured where there is a GPU."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.engine.expected import expect_greedy
from tests.engine.repeated import repeated as repeated
from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.engine import LLM, NgramSpeculation, SamplingParams
from torch_fdattn.engine.decode_graphs import DecodeGraphs, decode_buckets

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def test_buckets():
    assert decode_buckets(1) == [1]
    assert decode_buckets(3) == [1, 2, 3]
    assert decode_buckets(16) == [1, 2, 4, 8, 16]
    assert decode_buckets(40) == [1, 2, 4, 8, 16, 32, 40]
    assert decode_buckets(40, smallest=40) == [40]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_buckets_give_the_tokens_of_eager_passes(repeated, kv_dtype, batch_invariant):
    options = dict(
        max_num_seqs=8, max_batch_tokens=24, max_model_len=64, pages=20, kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    model = random_model("cpu")
    eager, llm = LLM(model, **options), LLM(model, **options)
    runner = llm._runner
    runner._graphs = DecodeGraphs(
        runner._decode, runner.rows, 8, 8 if batch_invariant else 1, runner._draw
    )
    prompts = PROMPTS[:3]
    expected, found = (x.generate(prompts, GREEDY) for x in (eager, llm))
    for output, other in zip(found, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        if kv_dtype is None:
            expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    calls = {size: graph.calls for size, graph in runner._graphs._graphs.items()}
    # Three at a time, in the bucket of four; in batch-invariant mode there is one bucket.
    assert calls == ({8: 19} if batch_invariant else {8: 0, 4: 19, 2: 0, 1: 0})
    if kv_dtype is None and not batch_invariant:
        torch.testing.assert_close(runner._kv.k, eager._runner._kv.k, atol=1e-4, rtol=1e-4)
    padding = runner.rows.padding_row
    assert (runner.rows.pages[padding] == -1).all()
    assert not runner.rows.tokens[padding].any()


PLAIN = [
    SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=3, max_tokens=9),
    SamplingParams(seed=4, temperature=0.5, max_tokens=14, logprobs=2),
]  # fmt: skip
OTHERS = [
    SamplingParams(seed=5, top_p=0.7, max_tokens=12), SamplingParams(seed=5, repetition_penalty=1.5),
    SamplingParams(seed=5, min_p=0.2), SamplingParams(seed=5, min_tokens=9, stop_token_ids=(3, 4)),
]  # fmt: skip


def test_batch_invariant_draws_are_replayed(repeated):
    """Of a batch that is padded to its full size."""
    model, options = random_model("cpu"), dict(max_num_seqs=6, max_batch_tokens=64, max_model_len=64, pages=40)  # fmt: skip
    eager, llm = (LLM(model, batch_invariant=True, **options) for _ in range(2))
    runner = llm._runner
    runner._graphs = DecodeGraphs(runner._decode, runner.rows, 6, 6, runner._draw)
    expected, found = (x.generate(PROMPTS[:3], PLAIN) for x in (eager, llm))
    for output, other in zip(found, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
    assert {size: graph.calls for size, graph in runner._graphs._draws.items()} == {6: 13}


@pytest.mark.parametrize("other", [None, *OTHERS], ids=str)
def test_draws_of_plain_batches_are_replayed(repeated, other):
    """The same tokens as eager draws; where one asks for more than a temperature, all are drawn outside."""
    options = dict(max_num_seqs=4, max_batch_tokens=24, max_model_len=64, pages=20)
    model = random_model("cpu")
    eager, llm = LLM(model, **options), LLM(model, **options)
    runner = llm._runner
    runner._graphs = DecodeGraphs(runner._decode, runner.rows, 4, 1, runner._draw)
    params = PLAIN if other is None else [*PLAIN[:2], other]
    expected, found = (x.generate(PROMPTS[:3], params) for x in (eager, llm))
    for output, same in zip(found, expected, strict=True):
        assert output.outputs[0].token_ids == same.outputs[0].token_ids
        if output.outputs[0].logprobs is not None:
            expect_until_they_part(output.outputs[0], same.outputs[0], 1e-4)
    graphs = runner._graphs
    steps, draws = (sum(x.calls for x in own.values()) for own in (graphs._graphs, graphs._draws))
    assert steps == runner.passes - 1
    assert (draws == steps) == (other is None)
    assert not runner.rows.tokens[runner.rows.padding_row].any()


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_proposals_have_buckets_of_their_own(repeated, kv_dtype):
    """As many tokens a sequence as it can have proposals and one: what is fewer is padded, and stored nowhere."""
    options = dict(max_num_seqs=8, max_model_len=64, pages=30, page_size=4, kv_dtype=kv_dtype)
    model, speculation = random_model("cpu"), NgramSpeculation(shortest=1, max_sequences=3)
    eager, llm = (LLM(model, **options, speculation=speculation) for _ in range(2))
    runner = llm._runner
    runner._graphs = DecodeGraphs(runner._decode, runner.rows, 8, 1, runner._draw)
    wide = functools.partial(runner._decode, queries=8)
    runner._speculative_graphs = DecodeGraphs(wide, runner.rows, 3, 1)
    prompts = [PROMPTS[0] * 2, *PROMPTS[:2]]
    expected, found = (x.generate(prompts, GREEDY) for x in (eager, llm))
    assert [x.outputs for x in found] == [x.outputs for x in expected]
    graphs = runner._graphs, runner._speculative_graphs
    plain, proposed = ([x.calls for x in own._graphs.values()] for own in graphs)
    assert sum(plain) + sum(proposed) == runner.passes - 1  # all but the prompts'
    assert sum(proposed) > 5
    assert llm.stats() == eager.stats()
    assert llm.stats().accepted_tokens > 0
    assert (runner.rows.pages[runner.rows.padding_row] == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
def test_captured_proposals_give_the_models_tokens(device, kv_dtype):
    model = random_model(device)
    options = dict(
        max_num_seqs=8, max_model_len=64, pages=30, kv_dtype=kv_dtype,
        speculation=NgramSpeculation(shortest=1),
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=64)
    llm = LLM(model, cuda_graph=True, **options)
    outputs = llm.generate([PROMPTS[0] * 2, *PROMPTS], params)
    assert llm.stats().accepted_tokens > 0
    if kv_dtype is None:
        for output in outputs:
            expect_greedy(model, output.prompt_token_ids, output.outputs[0])
        return
    eager = LLM(model, cuda_graph=False, **options).generate([PROMPTS[0] * 2, *PROMPTS], params)
    for output, other in zip(outputs, eager, strict=True):
        expect_until_they_part(output.outputs[0], other.outputs[0], 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_captured_passes_give_the_models_tokens(device, kv_dtype, batch_invariant):
    model = random_model(device)
    options = dict(
        max_num_seqs=8, max_batch_tokens=32, max_model_len=64, pages=30, kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=64)
    outputs = LLM(model, cuda_graph=True, **options).generate(PROMPTS, params)
    if kv_dtype is None:
        for output in outputs:
            expect_greedy(model, output.prompt_token_ids, output.outputs[0])
        return
    eager = LLM(model, cuda_graph=False, **options).generate(PROMPTS, params)
    for output, other in zip(outputs, eager, strict=True):
        expect_until_they_part(output.outputs[0], other.outputs[0], 0.1)


def expect_until_they_part(found, expected, limit: float) -> None:
    """Log-probabilities within `limit`, as long as the tokens are the same: a value on the border of two stored numbers may
    be rounded to the other one, where products of another batch size differ by a last bit."""
    for token, other, own, theirs in zip(
        found.token_ids, expected.token_ids, found.logprobs, expected.logprobs, strict=True
    ):
        for entry, value in own.items():
            assert abs(value.logprob - theirs[entry].logprob) < limit
        if token != other:
            return
