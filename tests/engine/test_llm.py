"""Continuous batching on a small random model: every way to batch gives the tokens of the plain model."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from tests.engine.expected import expect_greedy
from tests.engine.tiny import PROMPTS, config, greedy, random_model
from torch_fdattn.engine import LLM, LogitsError, PromptError, SamplingParams
from torch_fdattn.engine.logprobs import SLICE_TOKENS
from torch_fdattn.models import InferenceTransformer, Transformer
from torch_fdattn.ops import library

GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=2)


@pytest.fixture
def model(device):
    return random_model(device)


def engine(model, **options) -> LLM:
    return LLM(model, **{"max_model_len": 64, "pages": 64, "cuda_graph": False, **options})


def expect_all(model, prompts, outputs) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        expect_greedy(model, prompt, output.outputs[0])
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


WAYS = {
    "as it comes": {},
    **{f"chunks of {n}": {"max_batch_tokens": n} for n in (1, 2, 3, 7, 16, 19)},
    "one at a time": {"max_num_seqs": 1},
    "few pages": {"pages": 3},
    "few small pages": {"pages": 11, "page_size": 4, "max_batch_tokens": 8},
    "a token a page": {"page_size": 1, "pages": 128},
    "an odd page size": {"page_size": 5},
    "no prefix cache": {"enable_prefix_caching": False, "pages": 3},
    "batch-invariant": {"batch_invariant": True, "max_num_seqs": 3, "max_batch_tokens": 20},
    "batch-invariant, few pages": {
        "batch_invariant": True, "max_num_seqs": 4, "page_size": 4, "max_batch_tokens": 9, "pages": 11,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_every_way_to_batch_gives_the_models_tokens(device, architecture, options):
    model = random_model(device, architecture)
    llm = engine(model, **options)
    for _ in range(2):  # with prefix hits the second time
        expect_all(model, PROMPTS, llm.generate(PROMPTS, GREEDY))
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.generated_tokens == 2 * len(PROMPTS) * GREEDY.max_tokens
    few_pages = options.get("pages", 64) < 12
    assert (stats.preemptions > 0) == few_pages
    if not options.get("enable_prefix_caching", True):
        assert stats.prefix_hit_tokens == 0
    elif not few_pages:  # in which prefixes do not last
        assert stats.prefix_hit_tokens > 0


def test_requests_that_come_while_others_run(model):
    llm = engine(model, max_batch_tokens=6)
    outputs, waiting = {}, list(enumerate(PROMPTS))
    while waiting or llm.has_unfinished:
        if waiting:
            i, prompt = waiting.pop()
            llm.add_request(str(i), prompt, GREEDY)
        for output in llm.step():
            outputs[output.request_id] = output
            assert output.finished == (output.outputs[0].finish_reason is not None)
    expect_all(model, PROMPTS, [outputs[str(i)] for i in range(len(PROMPTS))])


def test_outputs_are_cumulative_and_do_not_change(model):
    llm = engine(model)
    llm.add_request("a", PROMPTS[0], GREEDY)
    outputs = []
    while llm.has_unfinished:
        outputs += llm.step()
    found = [x.outputs[0].token_ids for x in outputs]
    assert found == [found[-1][: i + 1] for i in range(GREEDY.max_tokens)]


def test_prefix_hits_are_counted_and_shared_within_a_step(model):
    prompt = list(range(40))
    llm = engine(model)
    first, second = llm.generate([prompt, [*prompt, 7, 8]], GREEDY)
    # Of the second, both full pages of the first, which the same step computes.
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert llm.stats().prefix_hit_tokens == 32
    assert llm.stats().prefix_query_tokens == 82
    (third,) = llm.generate([prompt + first.outputs[0].token_ids[:15]], GREEDY)
    assert third.num_cached_tokens == 48  # what was generated counts too
    for output in (first, second, third):
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    # A prompt of full pages: its last token is computed all the same.
    (whole,) = llm.generate([prompt[:32]], GREEDY)
    assert whole.num_cached_tokens == 16


def test_n_completions_share_the_prompts_pages(model):
    params = SamplingParams(n=3, seed=5, max_tokens=6)
    llm = engine(model)
    (output,) = llm.generate([PROMPTS[3]], params)
    assert [x.index for x in output.outputs] == [0, 1, 2]
    assert len({tuple(x.token_ids) for x in output.outputs}) == 3
    assert llm.stats().prefix_hit_tokens == 32
    (again,) = engine(model).generate([PROMPTS[3]], params)
    assert again.outputs == output.outputs


def test_prompt_logprobs(model, device):
    for options in ({}, {"max_batch_tokens": 3}, {"pages": 3}):
        llm = engine(model, **options)
        params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=3)
        for _ in range(2):  # prefix hits are not taken where all logits are asked for
            for output in llm.generate(PROMPTS, params):
                prompt = output.prompt_token_ids
                with torch.no_grad():
                    expected = model(torch.tensor([prompt], device=device))[0].log_softmax(-1)
                assert output.prompt_logprobs[0] is None
                assert len(output.prompt_logprobs) == len(prompt)
                for row, token, listed in zip(
                    expected, prompt[1:], output.prompt_logprobs[1:], strict=False
                ):
                    assert len(listed) in (3, 4)
                    top = row.topk(3)
                    assert {*top.indices.tolist(), token} == set(listed)
                    for other, entry in listed.items():
                        assert abs(entry.logprob - float(row[other])) < 1e-3
                        assert entry.rank == int((row > row[other]).sum()) + 1


def test_prompt_logprobs_take_logits_in_slices(device, monkeypatch):
    model = Transformer(dataclasses.replace(config(), max_positions=1024)).to(device)
    prompt = [(7 * i) % 64 for i in range(600)]
    llm = engine(model, max_model_len=640)
    sizes, logits_of = [], llm.model.logits

    def logits(hidden):
        sizes.append(hidden.shape[0])
        return logits_of(hidden)

    monkeypatch.setattr(llm.model, "logits", logits)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate([prompt], params)
    assert max(sizes) <= SLICE_TOKENS < len(prompt)
    with torch.no_grad():
        expected = model(torch.tensor([prompt], device=device))[0].log_softmax(-1)
    assert len(output.prompt_logprobs) == len(prompt)
    for row, token, listed in zip(expected, prompt[1:], output.prompt_logprobs[1:], strict=False):
        assert abs(listed[token].logprob - float(row[token])) < 1e-3


def test_stop_tokens_and_lengths(model):
    expected = greedy(model, PROMPTS[0], 20)
    stop = expected[5]
    first = expected.index(stop)
    llm = engine(model)
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(stop,))
    (output,) = llm.generate([PROMPTS[0]], params)
    assert output.outputs[0].token_ids == expected[: first + 1]
    assert output.outputs[0].finish_reason == "stop"
    # Not drawn before min_tokens, and the logits of others are as they are.
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(stop,), min_tokens=15)
    tokens = llm.generate([PROMPTS[0]], params)[0].outputs[0].token_ids
    assert stop not in tokens[:15]
    assert tokens[:first] == expected[:first]
    # max_tokens None: up to the model's length, of which the last token is not stored.
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=None))
    assert len(PROMPTS[0]) + len(output.outputs[0].token_ids) == 64
    assert output.outputs[0].finish_reason == "length"


def test_a_layer_is_launched_once_a_step(model, device):
    llm = engine(model)
    for i, prompt in enumerate(PROMPTS):
        llm.add_request(str(i), prompt, GREEDY)
    llm.step()  # the prompts
    label = "decode_forward/cpu" if device == "cpu" else "decode_forward/triton"
    before = library.launches[label]
    steps = 10
    for _ in range(steps):
        llm.step()
    assert library.launches[label] - before == steps * model.config.num_layers


def test_it_runs_the_inference_form(model):
    llm = engine(model)
    assert type(llm.model) is InferenceTransformer
    assert llm.model.norm.weight.data_ptr() == model.norm.weight.data_ptr()
    assert engine(llm.model).model is llm.model


def test_with_its_hooks_on_request(model):
    calls = []
    model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    (prompt,) = PROMPTS[:1]
    expect_all(model, [prompt], engine(model).generate([prompt], GREEDY))
    hooked = len(calls)
    llm = engine(model, fused=False)
    assert llm.model is model
    (output,) = llm.generate([prompt], GREEDY)
    assert len(calls) == hooked + GREEDY.max_tokens
    expect_greedy(model, prompt, output.outputs[0])


FEW_PAGES = {"pages": 24, "page_size": 4, "max_batch_tokens": 40}


@pytest.mark.parametrize(
    ("count", "options"),
    [(150, FEW_PAGES), *(pytest.param(1000, x, marks=pytest.mark.slow) for x in (FEW_PAGES, {}))],
)
def test_nothing_leaks(model, count, options):
    """Over requests of all kinds of which a third is to be aborted after some steps."""
    draw = random.Random(0)
    llm = engine(model, max_num_seqs=16, **options)
    left, steps, alive, finished = count, 0, {}, 0
    while left or llm.has_unfinished:
        while left and len(alive) < 24 and draw.random() < 0.8:
            left -= 1
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 30))]
            params = SamplingParams(max_tokens=draw.randrange(1, 20), n=draw.choice((1, 1, 2)))
            llm.add_request(str(left), prompt, params)
            alive[str(left)] = steps + draw.randrange(8) if left % 3 == 0 else None
        for output in llm.step():
            if output.finished:
                del alive[output.request_id]
                finished += 1
        for request_id in [x for x, last in alive.items() if last == steps]:
            assert llm.abort(request_id).finished
            del alive[request_id]
        steps += 1
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.pages_used, alive) == (0, 0, 0, {})
    assert 0.6 * count < finished < 0.8 * count
    assert sorted(llm._scheduler._free_rows) == list(range(16))
    assert not llm._requests
    # Every page can be handed out, and then no prefix is remembered.
    assert sorted(llm._pool.allocate(llm._pool.pages)) == list(range(llm._pool.pages))
    assert not llm._pool._by_hash


def test_an_aborted_request_gives_no_more(model):
    llm = engine(model)
    llm.add_request("a", PROMPTS[0], GREEDY)
    llm.add_request("b", PROMPTS[1], GREEDY)
    for _ in range(4):
        llm.step()
    used = llm.stats().pages_used
    output = llm.abort("a")
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == greedy(model, PROMPTS[0], 3)
    assert llm.stats().pages_used < used
    assert llm.abort("a") is None
    llm.add_request("a", PROMPTS[2], GREEDY)  # the id is free, its tokens are not mixed
    outputs = {}
    while llm.has_unfinished:
        outputs |= {x.request_id: x for x in llm.step()}
    expect_all(model, [PROMPTS[2], PROMPTS[1]], [outputs["a"], outputs["b"]])


def test_nan_is_named(model):
    llm = engine(model)
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(LogitsError, match="new token 0 of request '0'"):
        llm.generate([PROMPTS[0]], GREEDY)
    assert llm.stats().pages_used == 0


def test_a_step_that_fails_leaves_no_trace(model, monkeypatch):
    """Pages are registered before they are computed: none of them may be found after an error."""
    llm = engine(model)
    prompt = list(range(40))
    for attempt in range(3):
        llm.add_request("a", prompt, GREEDY)
        for _ in range(attempt):
            llm.step()

        def fail(*_):
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(llm.model, "hidden", fail)
            with pytest.raises(MemoryError):
                llm.step()
        assert not llm.has_unfinished
        assert llm.stats().pages_used == 0
    (output,) = llm.generate([prompt], GREEDY)
    assert output.num_cached_tokens == 0
    expect_greedy(model, prompt, output.outputs[0])


def test_batch_invariant_bits(model):
    """Log-probabilities of a request are the same bits alone, among others, with prefix hits and after a preemption."""
    options = dict(batch_invariant=True, max_num_seqs=6, page_size=4, max_batch_tokens=16)
    prompt = list(range(10, 33))
    params = SamplingParams(seed=3, max_tokens=16, logprobs=0)
    (alone,) = engine(model, **options).generate([prompt], params)
    others = [[i] * (3 * i + 1) for i in range(1, 8)]
    for more in ({}, {"pages": 14}):
        llm = engine(model, **options, **more)
        for _ in range(2):
            *_, output = llm.generate([*others, prompt], params)
            assert output.outputs == alone.outputs
        assert output.num_cached_tokens == (0 if more else 16)  # two chunks of 8
        assert (llm.stats().preemptions > 0) == ("pages" in more)


def test_bad_arguments_are_named(model, device):
    for name in ("max_num_seqs", "max_batch_tokens", "page_size", "pages", "max_model_len"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            engine(model, **{name: 0})
        with pytest.raises(TypeError, match=f"{name} must be an int, got 1.5"):
            engine(model, **{name: 1.5})
    with pytest.raises(ValueError, match="max_model_len must be at most the model's 128 positions"):
        engine(model, max_model_len=129)
    for name in ("batch_invariant", "rank_invariant", "fused"):
        with pytest.raises(TypeError, match=f"{name} must be a bool, got 1"):
            engine(model, **{name: 1})
    with pytest.raises(TypeError, match="model must be a Transformer"):
        LLM(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"max_batch_tokens must be at least .* = 272"):
        engine(model, batch_invariant=True, max_batch_tokens=256)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"cuda_graph must be None or False where .* cpu"):
            engine(model, cuda_graph=True)


def test_bad_requests_are_named(model):
    llm = engine(model, pages=3)
    add = lambda prompt, **options: llm.add_request("a", prompt, SamplingParams(**options))  # noqa: E731
    for prompt, error, message in (
        ([], PromptError, "prompt must have at least one token"),
        ([64], PromptError, "prompt must hold token ids from 0 to 63, got 64 to 64"),
        ([1.0], TypeError, "prompt must hold integer token ids, got 1.0"),
        (b"a", TypeError, "prompt must be a str or a list of token ids, got bytes"),
        ("a", TypeError, "prompt must be token ids where LLM has no tokenizer"),
        ([1] * 64, PromptError, "prompt must have fewer than max_model_len = 64 tokens, got 64"),
        ([1] * 34, PromptError, "need 49 places, the cache has 48"),
    ):
        with pytest.raises(error, match=message):
            add(prompt)
    with pytest.raises(ValueError, match="stop_token_ids must be from 0 to 63"):
        add([1], stop_token_ids=(64,))
    with pytest.raises(
        ValueError, match="stop_token_ids must leave a token to draw before min_tokens = 1"
    ):
        add([1], stop_token_ids=tuple(range(64)), min_tokens=1)
    for name in ("stop", "json_schema", "grammar"):
        with pytest.raises(ValueError, match=f"{name} needs a tokenizer"):
            add([1], **{name: ("a",) if name == "stop" else "{}"})
    assert not llm.has_unfinished
    add([1])
    with pytest.raises(ValueError, match="request_id must be of no unfinished request, got 'a'"):
        add([1])
    with pytest.raises(ValueError, match="generate must be called while no other request runs"):
        llm.generate([[1]])
    llm.abort("a")
    with pytest.raises(TypeError, match="prompts must be a list of prompts, got one"):
        llm.generate([1, 2])
    with pytest.raises(PromptError, match=r"prompts\[1\] must have at least one token"):
        llm.generate([[1], []])
    with pytest.raises(ValueError, match="one for each of 2 prompts, got 1"):
        llm.generate([[1], [2]], [GREEDY])
    assert llm.stats().waiting == 0


@pytest.mark.interpreter
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_the_kernels_serve_requests(kernel_device, kv_dtype):
    """A chunk and decodes through `norm_rotate_and_store`, `varlen_attention` and `paged_decode` as they are on a GPU."""
    model = random_model(kernel_device)
    llm = engine(model, pages=10, max_batch_tokens=12, kv_dtype=kv_dtype)
    library.launches.clear()
    params = SamplingParams(temperature=0, max_tokens=3)
    for output in llm.generate([PROMPTS[0], PROMPTS[2]], params):
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    kernels = "norm_rotate_and_store/triton", "append_kv/triton", "decode_forward/triton"
    assert [library.launches[name] for name in kernels] == [6, 0, 4]
    assert not library.launches["decode_forward/cpu"]
