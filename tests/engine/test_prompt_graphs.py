"""Passes of prompts by bucket, alone and beside decodes: what pads them leaves no trace; captured where there is a GPU."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.engine.expected import expect_greedy
from tests.engine.repeated import repeated as repeated
from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.engine import LLM, NgramSpeculation, SamplingParams
from torch_fdattn.engine.decode_graphs import DecodeGraphs
from torch_fdattn.engine.prompt_graphs import CHUNKS, PromptGraphs, prompt_buckets

LONGER = [prompt for prompt in PROMPTS if len(prompt) > 1]  # a single token is one of the decodes
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=64)
SIZES = dict(max_num_seqs=12, max_model_len=64, pages=60, page_size=4)


def test_buckets():
    assert prompt_buckets(8) == [8]
    assert prompt_buckets(16) == [16]
    assert prompt_buckets(100) == [16, 24, 32, 48, 64, 96, 100]


def captured(model, largest: int = 40, **options) -> tuple[LLM, PromptGraphs]:
    """An engine of CPU passes whose decodes and prompts go through buckets."""
    llm = LLM(model, **SIZES | options)
    runner, batch = llm._runner, SIZES["max_num_seqs"]
    runner._graphs = DecodeGraphs(runner._decode, runner.rows, batch, 1, runner._draw)
    if "speculation" in options:
        proposed = functools.partial(runner._decode, queries=runner._max_queries)
        runner._speculative_graphs = DecodeGraphs(proposed, runner.rows, batch, 1)
    runner._prompt_graphs = PromptGraphs(runner._prompts, runner.rows, largest)
    return llm, runner._prompt_graphs


def calls(graphs: PromptGraphs) -> dict[int, int]:
    return {size: graph.calls for size, graph in graphs._graphs.items() if graph.calls}


def expect_no_trace(llm: LLM) -> None:
    rows = llm._runner.rows
    assert (rows.pages[rows.padding_row] == -1).all()
    assert not rows.tokens[rows.padding_row].any()


@pytest.mark.parametrize("tokens", [8192, 14])
def test_buckets_give_the_tokens_of_eager_passes(repeated, tokens):
    """30 tokens of prompts in one pass, or in three of at most 14, of which two are beside decodes."""
    model = random_model("cpu")
    eager = LLM(model, max_batch_tokens=tokens, **SIZES)
    llm, graphs = captured(model, max_batch_tokens=tokens)
    expected, found = (x.generate(LONGER, PARAMS) for x in (eager, llm))
    for output, other in zip(found, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    assert calls(graphs) == ({32: 1} if tokens == 8192 else {16: 3})
    torch.testing.assert_close(llm._runner._kv.k, eager._runner._kv.k, atol=1e-4, rtol=1e-4)
    expect_no_trace(llm)


def test_a_prompt_behind_a_cached_prefix(repeated):
    model = random_model("cpu")
    llm, graphs = captured(model)
    shared = list(range(1, 18))
    llm.generate([shared], PARAMS)
    (output,) = llm.generate([[*shared, 40, 41, 42]], PARAMS)
    assert llm.stats().prefix_hit_tokens == 16
    expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    assert calls(graphs) == {24: 1, 16: 1}
    expect_no_trace(llm)


def run_in_turns(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict:
    """A new request each second step, beside those that decode."""
    left, outputs = list(enumerate(zip(prompts, params, strict=True))), {}
    while left or llm.has_unfinished:
        if left:
            name, (prompt, own) = left.pop(0)
            llm.add_request(str(name), prompt, own)
        for _ in range(2):
            for output in llm.step():
                outputs[output.request_id] = output
    return outputs


@pytest.mark.parametrize("options", [{}, {"speculation": NgramSpeculation(max_tokens=3)}], ids=["", "n-grams"])  # fmt: skip
def test_prompts_beside_decodes(repeated, options):
    """Two passes, each in its graphs, give the tokens and log-probabilities of one, whatever is drawn and in whatever order."""
    model = random_model("cpu")
    params = [
        SamplingParams(temperature=t, seed=5, max_tokens=9, logprobs=64, n=n, **more)
        for t, n, more in ((0, 1, {}), (0.9, 2, {}), (0.7, 1, {"top_k": 9}), (0, 1, {"min_p": 0.1}))
    ]
    prompts = [[*prompt, *prompt] for prompt in (*LONGER, [3, 1])]
    eager = run_in_turns(LLM(model, **SIZES, **options), prompts, params)
    llm, graphs = captured(model, **options)
    found = run_in_turns(llm, prompts, params)
    assert found.keys() == eager.keys()
    for name, output in found.items():
        for one, other in zip(output.outputs, eager[name].outputs, strict=True):
            assert one.token_ids == other.token_ids
            for entries, others in zip(one.logprobs, other.logprobs, strict=True):
                for token, entry in entries.items():
                    assert abs(entry.logprob - others[token].logprob) < 1e-4
    assert sum(calls(graphs).values()) == len(prompts)
    expect_no_trace(llm)


def test_a_last_token_whose_prefix_this_step_stores(repeated):
    """A sequence that joins with one token to compute is one of the decodes, and sees what the step's prompt stores: one pass."""
    model = random_model("cpu")
    llm, graphs = captured(model)
    prompt = list(range(1, 18))
    llm.add_request("decodes", PROMPTS[0], PARAMS)
    llm.step()
    assert sum(calls(graphs).values()) == 1
    llm.add_request("stores", prompt, PARAMS)
    llm.add_request("sees", prompt, PARAMS)
    while llm.has_unfinished:
        for output in llm.step():
            if output.finished:
                expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    assert llm.stats().prefix_hit_tokens == 16
    assert sum(calls(graphs).values()) == 1


@pytest.mark.parametrize(
    "case", ["more chunks", "more tokens", "prompt log-probabilities", "a trace"]
)
def test_other_passes_are_eager(repeated, case):
    model = random_model("cpu")
    llm, graphs = captured(model)
    prompts, params = LONGER, PARAMS
    if case == "more chunks":
        prompts = [[x, x] for x in range(CHUNKS + 1)]
    if case == "more tokens":
        prompts = [list(range(41))]
    if case == "prompt log-probabilities":
        params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0)
    llm._runner.replays_graphs = case != "a trace"
    for output in llm.generate(prompts, params):
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    assert not calls(graphs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_graph_tokens": -1}, "must be an int of 0 or more, got -1"),
        ({"prompt_graph_tokens": True}, "must be an int of 0 or more, got True"),
        ({"prompt_graph_tokens": 32, "cuda_graph": False}, "must be 0 without CUDA graphs, got 32"),
    ],
    ids=["negative", "bool", "no graphs"],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=f"prompt_graph_tokens {message}"):
        LLM(random_model("cpu"), **SIZES, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "other", [{"kv_dtype": "int8"}, {"batch_invariant": True}], ids=["kv_dtype", "batch_invariant"]
)
def test_what_is_not_captured_is_refused(device, other):
    with pytest.raises(ValueError, match=f"prompt_graph_tokens must be 0 with {next(iter(other))}"):
        LLM(random_model(device), prompt_graph_tokens=32, **SIZES, **other)


@pytest.mark.gpu
def test_captured_passes_give_the_models_tokens(device):
    model = random_model(device)
    llm = LLM(model, prompt_graph_tokens=48, **SIZES)
    for output in llm.generate([*LONGER, PROMPTS[0] * 2], PARAMS):
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    params = [PARAMS] * len(LONGER)
    for output in run_in_turns(llm, [[*x, *x] for x in LONGER], params).values():
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    for prompt in (*LONGER, PROMPTS[3] * 2):  # alone, behind prefixes
        (output,) = llm.generate([prompt], PARAMS)
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    expect_no_trace(llm)


@pytest.mark.gpu
def test_captured_passes_of_bfloat16(device):
    """Where sm_90 has kernels of its own; as far from float32 as eager passes."""
    exact = random_model(device)
    model = random_model(device).to(torch.bfloat16)
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=64)
    found = LLM(model, prompt_graph_tokens=48, **SIZES).generate(LONGER, one)
    eager = LLM(model, **SIZES).generate(LONGER, one)
    for output, other in zip(found, eager, strict=True):
        logits = exact(torch.tensor([output.prompt_token_ids], device=device))[0, -1].log_softmax(
            -1
        )
        errors = []
        for one_output in (output, other):
            (entries,) = one_output.outputs[0].logprobs
            values = torch.tensor([entries[token].logprob for token in range(64)], device=device)
            errors.append(float((values - logits).abs().max()))
        assert errors[0] <= 2 * errors[1] + 1e-3
