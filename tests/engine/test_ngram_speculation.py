"""Speculation by n-grams: no option lets it change a token, a log-probability or a page."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from types import SimpleNamespace

import pytest
import torch

from tests.engine import tiny
from tests.engine.expected import TIE, expect_greedy
from tests.server.fake_engine import CharacterTokenizer
from tests.tiny_model import save_tiny_model
from torch_fdattn.engine import LLM, AsyncLLM, NgramSpeculation, SamplingParams
from torch_fdattn.models import RopeConfig, Transformer, load_tokenizer
from torch_fdattn.models.config import LayerConfig
from torch_fdattn.ops import library

SPECULATION = NgramSpeculation(shortest=1, max_sequences=100)
#: Prompts that repeat themselves, and such that do not.
PROMPTS = [*tiny.PROMPTS, tiny.PROMPT * 3, [1, 2, 3] * 8]


def model_of(device, **changes) -> Transformer:
    """As `tiny.random_model`, of a configuration with these changes."""
    torch.manual_seed(0)
    model = Transformer(dataclasses.replace(tiny.config(), **changes)).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture
def model(device):
    return model_of(device)


def engine(model, **options) -> LLM:
    options = {"max_model_len": 64, "pages": 400, "cuda_graph": False, **options}
    return LLM(model, options.pop("tokenizer", None), **options)


REQUESTS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, logprobs=2),
    "drawn": SamplingParams(temperature=0.4, top_p=0.9, seed=3, max_tokens=24, logprobs=0),
    "top_k and min_p": SamplingParams(temperature=0.8, top_k=3, min_p=0.1, seed=4, max_tokens=17),
    "penalties": SamplingParams(
        temperature=0.5, seed=5, repetition_penalty=1.1, presence_penalty=-0.3, frequency_penalty=0.1,
        max_tokens=24,
    ),
    "n": SamplingParams(n=3, temperature=0.6, seed=6, max_tokens=12),
    "prompt_logprobs": SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1),
    "one token": SamplingParams(temperature=0, max_tokens=1),
    "to the model's length": SamplingParams(temperature=0, max_tokens=None),
    "stop_token_ids": SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(50,)),
    "min_tokens": SamplingParams(
        temperature=0.3, seed=7, max_tokens=24, min_tokens=9, stop_token_ids=(9, 42, 11, 35)
    ),
}  # fmt: skip
WAYS = {
    "as it comes": {},
    "chunks of 3": {"max_batch_tokens": 3},
    "few small pages": {"pages": 19, "page_size": 4, "max_batch_tokens": 8},
    "no prefix cache": {"enable_prefix_caching": False, "page_size": 5},
    "15 proposals": {"speculation": NgramSpeculation(max_tokens=15, shortest=1, longest=2)},
    "few sequences": {"speculation": NgramSpeculation(shortest=1, max_sequences=3)},
}
MORE_WAYS = {
    "chunks of 19": {"max_batch_tokens": 19},
    "few rows": {"max_num_seqs": 3},
    "few pages": {"pages": 5},
    "a token a page": {"page_size": 1, "pages": 2000},
    "1 proposal": {"speculation": NgramSpeculation(max_tokens=1, shortest=1)},
}


def expect_equal(outputs, expected) -> None:
    for output, plain in zip(outputs, expected, strict=True):
        assert output.finished
        for own, other in zip(output.outputs, plain.outputs, strict=True):
            assert own.token_ids == other.token_ids
            assert (own.text, own.finish_reason) == (other.text, other.finish_reason)
            expect_equal_logprobs(own.logprobs, other.logprobs)
        expect_equal_logprobs(output.prompt_logprobs, plain.prompt_logprobs)


def expect_equal_logprobs(found, expected) -> None:
    assert (found is None) == (expected is None)
    for entries, others in zip(found or (), expected or (), strict=True):
        if entries is None:
            assert others is None
            continue
        assert entries.keys() == others.keys()
        for token, entry in entries.items():
            assert abs(entry.logprob - others[token].logprob) < TIE
            assert entry.rank == others[token].rank


def pages_by_hash(llm) -> dict[bytes, torch.Tensor]:
    """K and V, dequantised, of every page that the prefix cache has."""
    kv, found = llm._runner._kv, {}
    for name, page in llm._pool._by_hash.items():
        both = torch.stack([x[:, page].float() for x in (kv.k, kv.v)])
        if kv.scales is not None:
            both = both * kv.scales[:, :, page, :, :, None]
        found[name] = both
    return found


def expect_idle(llm) -> None:
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert 0 < stats.accepted_tokens <= stats.proposed_tokens


@pytest.mark.parametrize(
    "options",
    [*WAYS.values(), *(pytest.param(x, marks=pytest.mark.slow) for x in MORE_WAYS.values())],
    ids=[*WAYS, *MORE_WAYS],
)
def test_every_way_to_batch_gives_plain_tokens(model, options):
    """All requests at the same time, and once more with prefix hits; pages of the same name hold the same."""
    params = list(REQUESTS.values())
    prompts = [PROMPTS[-1 - i % len(PROMPTS)] for i in range(len(params))]
    plain = engine(model, **{**options, "speculation": None})
    llm = engine(model, **{"speculation": SPECULATION, **options})
    expected = plain.generate(prompts, params)
    for _ in range(2):
        expect_equal(llm.generate(prompts, params), expected)
    expect_idle(llm)
    stats = llm.stats()
    assert stats.generated_tokens == 2 * plain.stats().generated_tokens
    few_pages = options.get("pages", 400) < 20
    assert (stats.preemptions > 0) == few_pages
    if "max_num_seqs" not in options and not few_pages:
        assert stats.prefix_hit_tokens > 0 or "enable_prefix_caching" in options
    own, others = pages_by_hash(llm), pages_by_hash(plain)
    common = own.keys() & others.keys()
    assert common or "enable_prefix_caching" in options
    for name in common:
        torch.testing.assert_close(own[name], others[name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_speculates(model, name):
    """Alone, so that its own proposals are taken, and spare steps."""
    llm, params = engine(model, speculation=SPECULATION), REQUESTS[name]
    for prompt in PROMPTS[::2]:
        expect_equal(llm.generate([prompt], params), engine(model).generate([prompt], params))
    stats = llm.stats()
    assert (stats.accepted_tokens > 0) == (name != "one token")
    if params.n == 1:
        # A pass for each token but those that were accepted.
        assert llm._runner.passes == stats.generated_tokens - stats.accepted_tokens


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_quantised_pages(kv_dtype):
    """What a rejected proposal leaves in a slot, its scale too, is overwritten."""
    model = model_of("cpu")
    options = dict(kv_dtype=kv_dtype, page_size=5)
    plain, llm = engine(model, **options), engine(model, speculation=SPECULATION, **options)
    for params in (REQUESTS["greedy"], REQUESTS["drawn"]):
        for output, other in zip(*(x.generate(PROMPTS, params) for x in (llm, plain)), strict=True):
            assert output.outputs[0].token_ids == other.outputs[0].token_ids
    expect_idle(llm)
    own, others = pages_by_hash(llm), pages_by_hash(plain)
    common = own.keys() & others.keys()
    assert len(common) > 0.9 * len(others)
    for name in common:
        # Where a value is on the border of two stored numbers it may be the other one.
        assert (own[name] - others[name]).abs().mean() < 1e-3


def test_windows_and_softcaps(device):
    layers = LayerConfig(6, RopeConfig()), LayerConfig(None, RopeConfig())
    model = model_of(device, layers=layers, softcap=5.0, logit_softcap=20.0)
    llm = engine(model, speculation=SPECULATION, page_size=4, pages=128)
    for params in (REQUESTS["greedy"], REQUESTS["drawn"]):
        expect_equal(llm.generate(PROMPTS, params), engine(model).generate(PROMPTS, params))
    expect_idle(llm)


def test_a_step_reads_before_it_schedules(model):
    """So a step computes no token too many, and proposals follow from all tokens."""
    llm = engine(model, speculation=SPECULATION)
    llm.add_request("a", PROMPTS[-1], REQUESTS["greedy"])
    assert llm.step() == []
    counts = []
    while llm.has_unfinished:
        (output,) = llm.step()
        counts.append(len(output.outputs[0].token_ids))
        assert (llm._in_flight is None) == output.finished
    assert len(set(counts)) == len(counts) == llm._runner.passes
    assert len(counts) < counts[-1] == 24


def test_proposals_take_no_page_from_others(model):
    """Two sequences that fit exactly: one of both would be preempted for the sake of proposals."""
    llm = engine(
        model, speculation=NgramSpeculation(max_tokens=15, shortest=1), page_size=4, pages=10
    )
    params = SamplingParams(temperature=0, max_tokens=8)  # 13 + 8 - 1 tokens each
    prompts = [[1, 2, 3] * 4 + [1], [4, 5] * 6 + [4]]
    expect_equal(llm.generate(prompts, params), engine(model).generate(prompts, params))
    assert llm.stats().preemptions == 0
    expect_idle(llm)


def test_aborts_leave_only_true_pages(model):
    """Requests that are aborted with proposals on their way: what prefixes find then is right, and no page leaks."""
    llm, draw = (
        engine(model, speculation=SPECULATION, page_size=4, pages=60, max_num_seqs=4),
        random.Random(1),
    )
    expected = engine(model).generate(PROMPTS, REQUESTS["greedy"])
    for count in (2, 3, 5, 8, 13):
        for i, prompt in enumerate(PROMPTS):
            llm.add_request(str(i), prompt, REQUESTS["greedy"])
        for _ in range(count):
            llm.step()
        for i in draw.sample(range(len(PROMPTS)), len(PROMPTS)):
            llm.abort(str(i))
        assert llm.stats().pages_used == 0
        while llm.has_unfinished:
            assert llm.step() == []
        expect_equal(llm.generate(PROMPTS, REQUESTS["greedy"]), expected)
    expect_idle(llm)
    assert llm.stats().prefix_hit_tokens > 0
    assert sorted(llm._pool.allocate(60)) == list(range(60))


def test_stop_strings(model, device, tmp_path):
    """A stop string within what one step gives ends the text there."""
    save_tiny_model(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    vocab_size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    model = model_of(device, vocab_size=vocab_size)
    plain, llm = (engine(model, tokenizer=tokenizer, speculation=x) for x in (None, SPECULATION))
    prompt = "one two one two one two"
    (output,) = plain.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    text = output.outputs[0].text
    ended = 0
    for begin in range(0, len(text) - 2, 3):
        params = SamplingParams(
            temperature=0, max_tokens=24, stop=(text[begin : begin + 2],), ignore_eos=begin % 2 > 0
        )
        found, expected = (x.generate([prompt], params) for x in (llm, plain))
        expect_equal(found, expected)
        ended += found[0].outputs[0].finish_reason == "stop"
    assert ended > 4
    expect_idle(llm)


class Alternating:
    """In the place of a grammar's matcher: even and odd tokens by turns, up to 20."""

    error = None

    def __init__(self):
        self._count = 0

    def copy(self):
        return Alternating()

    def allowed(self):
        return torch.arange(64) % 2 == self._count % 2

    def accept(self, token):
        assert token % 2 == self._count % 2
        self._count += 1
        return self._count == 20


def test_grammars_do_not_speculate(model):
    """Beside others that do: what is allowed next follows from each token."""
    plain, llm = (
        engine(model, tokenizer=CharacterTokenizer(), speculation=x) for x in (None, SPECULATION)
    )
    for x in (plain, llm):
        x._grammars = SimpleNamespace(matcher=lambda params: Alternating())
    by_grammar = SamplingParams(temperature=0, max_tokens=24, grammar="")
    expect_equal(*(x.generate([PROMPTS[-1]], by_grammar) for x in (llm, plain)))
    assert llm.stats().proposed_tokens == 0
    params = [by_grammar, REQUESTS["greedy"]] * 2
    expect_equal(*(x.generate(PROMPTS[2:], params) for x in (llm, plain)))
    expect_idle(llm)


def test_from_coroutines(model):
    async def main():
        engine_ = AsyncLLM(engine(model, speculation=SPECULATION))
        try:
            streams = [
                engine_.generate(p, REQUESTS["drawn"], str(i)) for i, p in enumerate(PROMPTS)
            ]
            return await asyncio.gather(*map(_last, streams)), engine_.stats()
        finally:
            await engine_.close()

    outputs, stats = asyncio.run(asyncio.wait_for(main(), 60))
    expect_equal(outputs, engine(model).generate(PROMPTS, REQUESTS["drawn"]))
    assert stats.accepted_tokens > 0


async def _last(stream):
    return [output async for output in stream][-1]


@pytest.mark.interpreter
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_the_kernels_serve_proposals(kernel_device, kv_dtype):
    model = model_of(kernel_device)
    speculation = NgramSpeculation(max_tokens=2, shortest=1)
    llm = engine(model, max_model_len=128, pages=10, kv_dtype=kv_dtype, speculation=speculation)
    params = SamplingParams(temperature=0, max_tokens=3)
    # All tokens there are, so that the first drawn one has stood before; and few.
    for output in llm.generate([list(range(64)), [5]], params):
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    assert llm.stats().proposed_tokens > 0
    assert library.launches["decode_forward/triton"]
